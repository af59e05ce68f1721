"""Measuring what calls cost."""

SCHEMA = "tileops.results/1"  # of the result documents; docs/results.md
TIE = 0.01  # of a ratio's distance from 1, within which nobody leads


def is_tie(ratio: float) -> bool:
    """Whether a ratio says no more than that both are as fast."""
    return abs(ratio - 1) <= TIE + 1e-9
