"""``tileops show``: an entry for people. Reads no torch, except for work that a function of a family counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tileops.core.check import Call, Checker
from tileops.core.cli import output
from tileops.core.errors import SpecError
from tileops.core.roofline import Bound, Profile, boards, bound, profile
from tileops.core.spec import Entry, Row, TensorDecl
from tileops.core.workloads import call_id, cases, row_call


@click.command("show")
@click.argument("op")
@click.option("--board", default="h200", show_default=True, help="Bounds on this board: a name, or a profile's path.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(op: str, board: str, as_json: bool) -> None:
    """Explain an operator: signature, semantics, workloads and their bounds."""
    entry = output.entry_of(op)
    if board not in boards() and not Path(board).is_file():
        raise output.no_such("board", board, boards())
    on = profile(board if board in boards() else Path(board))
    if as_json:
        output.print_json(_document(entry, on))
    else:
        output.console().print(_page(entry, on))


def _bounds(entry: Entry, on: Profile) -> Iterator[tuple[Row, str, Call, Bound | None]]:
    """Each case of the rows: its row, what its id adds to the op's name, its call and bound."""
    checker = Checker(entry)
    for row in entry.workloads:
        for case in cases(row):
            call = row_call(checker, row, case)
            try:
                known = bound(call, on)
            except SpecError:  # a function of the family that counts it, and no torch to import the family with
                known = None
            yield row, call_id(entry, row, case).partition("/")[2], call, known


# What follows is the page.


def _page(entry: Entry, on: Profile) -> Group:
    also = f", also {', '.join(entry.aliases)}" if entry.aliases else ""
    parts: list[RenderableType] = [
        Text.assemble((entry.name, "bold"), f"  {entry.family}, {entry.status}{also}"),
        entry.summary,
        *_signature(entry),
    ]
    if entry.semantics:
        parts.append(_list("Semantics", [(name, " ".join(s.split())) for name, s in entry.semantics.items()]))
    parts += [_rows(entry, on), _list("", list(_facts(entry)))]
    return Group(*(line for part in parts for line in (part, "")))


def _signature(entry: Entry) -> Iterator[RenderableType]:
    sig = entry.signature
    tensors = output.table("", "tensor", "dtype", "shape", "")
    for kind, decls in (("in", sig.inputs), ("out", sig.outputs)):
        for i, decl in enumerate(decls.values()):
            first = "" if i else kind
            tensors.add_row(
                first, f"[bold]{decl.name}[/]", *map(escape, (str(decl.dtype), str(decl.shape), _note(decl)))
            )
    yield tensors
    dtypes = [(i.name, " | ".join(i.choices)) for i in sig.indices.values() if i.kind == "DType"]
    symbolic = [f"{s.index}{f' where {s.when}' if s.when else ''}" for s in sig.symbolic]
    yield _list(
        "Indices",
        [
            (
                "sizes",
                ", ".join(
                    n + ("..." if i.kind == "Shape" else "") for n, i in sig.indices.items() if i.kind != "DType"
                ),
            ),
            *dtypes,
            *((name, f"= {text}") for name, text in sig.let.items()),
            *([("vary", f"{', '.join(symbolic)}: no recompilation when they change")] if symbolic else []),
        ],
    )
    if sig.params:
        params = output.table("param", "type", "default")
        for p in sig.params.values():
            default = "required" if p.default is attrs.NOTHING else str(p.default)
            params.add_row(f"[bold]{p.name}[/]", escape(str(p.type)), escape(default))
        yield params
    if sig.where:
        yield _list("Rules", [("-", f"{rule.text}{f': {rule.hint}' if rule.hint else ''}") for rule in sig.where])


def _note(decl: TensorDecl) -> str:
    notes = {
        "optional": decl.optional,
        f"there if {decl.when}": decl.when,
        "written" + (f" if {decl.mutated}" if decl.mutated and str(decl.mutated) != "true" else ""): decl.mutated,
        "contiguous": decl.contiguous,
        f"strides like {decl.layout}": decl.layout,
        decl.requires.source if decl.requires else "": decl.requires,
    }
    return ", ".join(text for text, holds in notes.items() if holds)


def _rows(entry: Entry, on: Profile) -> Table:
    table = output.table("case", ">FLOP", ">bytes", ">FLOP/B", ">bound", "by", title=f"Workloads, bounds on {on.name}")
    shown = None
    for row, name, _, known in _bounds(entry, on):
        sizes = ""
        if row is not shown:
            given = f" with {', '.join(row.some)}" if row.some else ""
            sizes = f"\n{output.settings(entry, row.values)}{given}"
        shown = row
        cells = ("-",) * 5
        if known:
            intensity = "-" if known.intensity is None else output.digits(known.intensity)
            cells = (
                output.amount(known.flops),
                ("" if known.exact else "<= ") + output.amount(known.bytes),
                intensity,
                output.duration(known.seconds),
                known.by or "-",
            )
        table.add_row(f"{escape(name)}[dim]{escape(sizes)}[/]", *cells)
    return table


def _facts(entry: Entry) -> Iterator[tuple[str, str]]:
    if entry.reference:
        yield "reference", entry.reference.target
    if entry.model:
        yield "yardstick", entry.model.target
    if entry.absolute:
        yield "absolute product", entry.absolute.target
    if entry.ref_api:
        yield "follows", entry.ref_api
    for backend, rivals in entry.baselines.items():
        optional = f"; optional {', '.join(rivals.optional)}" if rivals.optional else ""
        yield f"rivals on {backend}", f"{', '.join(rivals.required) or 'none'}{optional}"
    if entry.grad:
        yield "gradient", ", ".join(g.op + (f" if {g.when}" if g.when else "") for g in entry.grad)
    if not entry.fullgraph:
        yield "torch.compile", f"breaks the graph: {entry.fullgraph_reason}"


def _list(title: str, items: list[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.title, grid.title_justify, grid.title_style = title or None, "left", "bold"
    for name, text in items:
        grid.add_row(f"[bold]{escape(name)}[/]", escape(text))
    return grid


# And for machines.


def _document(entry: Entry, on: Profile) -> dict[str, Any]:
    sig = entry.signature
    return {
        "name": entry.name,
        "family": entry.family,
        "status": entry.status,
        "summary": entry.summary,
        "aliases": entry.aliases,
        "ref_api": entry.ref_api,
        "reference": entry.reference.target if entry.reference else None,
        "dtypes": {i.name: i.choices for i in sig.indices.values() if i.kind == "DType"},
        "params": [
            {"name": p.name, "type": str(p.type), "required": p.default is attrs.NOTHING}
            | ({} if p.default is attrs.NOTHING else {"default": p.default})
            for p in sig.params.values()
        ],
        "inputs": [_tensor(t) for t in sig.inputs.values()],
        "outputs": [_tensor(t) for t in sig.outputs.values()],
        "rules": [{"rule": str(r.text), "hint": r.hint} for r in sig.where],
        "symbolic": [{"index": s.index, "when": str(s.when) if s.when else None} for s in sig.symbolic],
        "semantics": entry.semantics,
        "board": on.board,
        "rows": [
            {
                "case": call.id,
                "label": row.label,
                "values": row.values,
                "inputs": {n: str(m) for n, m in call.inputs.items() if m},
                "flops": known and known.flops,
                "bytes": known and known.bytes,
                "exact": known and known.exact,
                "intensity": known and known.intensity,
                "bound_us": known and known.seconds and known.seconds * 1e6,
                "bound_by": known and known.by,
            }
            for row, _, call, known in _bounds(entry, on)
        ],
        "baselines": {b: attrs.asdict(rivals) for b, rivals in entry.baselines.items()},
    }


def _tensor(decl: TensorDecl) -> dict[str, Any]:
    return {
        "name": decl.name,
        "dtype": str(decl.dtype),
        "shape": str(decl.shape),
        "optional": decl.optional,
        "when": str(decl.when) if decl.when else None,
        "mutated": str(decl.mutated) if decl.mutated else None,
    }
