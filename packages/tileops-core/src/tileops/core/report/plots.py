"""The plots of a page, as inline SVG that takes its colours and its type from the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import attrs

from tileops.core.report.documents import Row
from tileops.core.report.html import Html, tag

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 420, 60, 14, 14, 52
Scale = Callable[[float], float]


@attrs.frozen
class Roof:
    """A limit, in FLOP/s of one kind of arithmetic or in B/s; ``name`` says whose."""

    name: str
    theoretical: float | None
    calibrated: float | None

    def known(self) -> list[tuple[str, float]]:
        """The figures that there are, by the class that draws them."""
        return [(kind, v) for kind in ("theoretical", "calibrated") if (v := getattr(self, kind))]


def roofline(
    rows: Sequence[Row], memory: Roof, compute: Sequence[Roof], kind: Callable[[Row], str], tip: Callable[[Row], str]
) -> Html:
    """Arithmetic intensity (FLOP/byte) against TFLOP/s, both logarithmic; ``kind`` is the class of a row's mark."""
    marks = [
        (row.flops / row.bytes, row.tflops, row) for row in rows if row.ok and row.flops and row.bytes and row.tflops
    ]
    ceilings = [(roof, roof.theoretical or roof.calibrated or 0.0) for roof in compute if roof.known()]
    slope = memory.theoretical or memory.calibrated
    ridges = [peak / slope for _, peak in ceilings] if slope else []
    near = [x for x, *_ in marks]
    left, right = min(near, default=1.0) / 2, max([*near, *ridges, 1.0]) * 4
    peaks = [peak / 1e12 for _, peak in ceilings] or ([slope * right / 1e12] if slope else [])
    heights = [y for _, y, _ in marks]
    low, high = min(heights, default=1.0) / 2, max([*heights, *peaks, 1.0]) * 2
    x, y = _log(left, right, LEFT, WIDTH - RIGHT), _log(low, high, HEIGHT - BOTTOM, TOP)

    parts = [_grid(x, y, (left, right), (low, high))]
    top = max((peak for _, peak in ceilings), default=math.inf)
    for style, rate in memory.known():
        start, end = max(left, low * 1e12 / rate), min(right, top / rate, high * 1e12 / rate)
        if start < end:
            parts.append(_line(x(start), y(rate * start / 1e12), x(end), y(rate * end / 1e12), f"roof {style}"))
    if slope:
        parts.append(_along(x, y, slope, max(left, low * 1e12 / slope), memory.name))
    for roof, peak in ceilings:
        for style, rate in roof.known():
            start = rate / slope if slope else left
            parts.append(_line(x(start), y(rate / 1e12), x(right), y(rate / 1e12), f"roof {style}"))
        at = {"x": f"{x(right) - 4:.1f}", "y": f"{y(peak / 1e12) - 6:.1f}", "text_anchor": "end", "class_": "name"}
        parts.append(tag("text", roof.name, **at))
    parts += [
        tag(
            "circle",
            tag("title", tip(row)),
            cx=f"{x(at):.1f}",
            cy=f"{y(rate):.1f}",
            r="4.5",
            class_=f"mark {kind(row)}",
        )
        for at, rate, row in marks
    ]
    return _svg(WIDTH, HEIGHT, "Roofline: FLOP per byte against TFLOP/s", parts)


def history(points: Sequence[tuple[str, float]]) -> Html:
    """Named figures in order, as a line about 1."""
    width, height, side, foot = 300, 130, 34, 24
    values = [v for _, v in points]
    low, high = min([*values, 0.98]), max([*values, 1.02])
    pad = (high - low) * 0.12
    y = _linear(low - pad, high + pad, height - foot, 8)
    x = _linear(0, len(points) - 1, side + 8, width - 12)
    spots = [(x(i), y(v)) for i, v in enumerate(values)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
    parts = [_line(side, y(1), width, y(1), "one"), tag("polyline", points=path, class_="line")]
    parts += [
        tag("circle", tag("title", f"{name}: {v:.3f}"), cx=f"{a:.1f}", cy=f"{b:.1f}", r="3.5", class_="mark")
        for (name, v), (a, b) in zip(points, spots, strict=True)
    ]
    parts += [tag("text", f"{v:.2f}", x=side - 6, y=f"{y(v) + 4:.1f}", text_anchor="end") for v in _apart(low, high)]
    for i, anchor in ((0, "start"), (len(points) - 1, "end")):
        edge = side if i == 0 else width
        parts.append(tag("text", points[i][0], x=edge, y=height - 6, text_anchor=anchor))
    return _svg(width, height, "Ratio to the fastest over time", parts)


def _apart(low: float, high: float) -> list[float]:
    """The ends of a range, and 1 where it isn't too near to either."""
    return [low, *([1.0] if min(1 - low, high - 1) > 0.2 * (high - low) else []), high]


def _svg(width: int, height: int, title: str, parts: Iterable[Html]) -> Html:
    return tag("svg", tag("title", title), parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> Html:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=style)


def _along(x: Scale, y: Scale, slope: float, start: float, name: str) -> Html:
    """A name that runs along the memory roof, above its start."""
    a, b = (x(start), y(slope * start / 1e12)), (x(start * 10), y(slope * start * 10 / 1e12))
    angle = math.degrees(math.atan2(b[1] - a[1], b[0] - a[0]))
    turned = f"translate({a[0]:.1f} {a[1]:.1f}) rotate({angle:.1f})"
    return tag("text", name, transform=turned, x=14, y=-7, class_="name")


def _grid(x: Scale, y: Scale, across: tuple[float, float], up: tuple[float, float]) -> Html:
    parts: list[Html] = []
    for v in _decades(*across):
        parts.append(_line(x(v), TOP, x(v), HEIGHT - BOTTOM, "grid"))
        parts.append(tag("text", f"{v:,g}", x=f"{x(v):.1f}", y=HEIGHT - BOTTOM + 19, text_anchor="middle"))
    for v in _decades(*up):
        parts.append(_line(LEFT, y(v), WIDTH - RIGHT, y(v), "grid"))
        parts.append(tag("text", f"{v:,g}", x=LEFT - 7, y=f"{y(v) + 4:.1f}", text_anchor="end"))
    parts.append(tag("text", "FLOP / byte", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 8, text_anchor="middle"))
    parts.append(tag("text", "TFLOP/s", x=LEFT + 8, y=TOP + 16))
    return tag("g", parts)


def _decades(low: float, high: float) -> list[float]:
    return [10.0**e for e in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def _log(low: float, high: float, start: float, end: float) -> Scale:
    linear = _linear(math.log10(low), math.log10(high), start, end)
    return lambda v: linear(math.log10(v))


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    return lambda v: start + (v - low) / (high - low) * (end - start)
