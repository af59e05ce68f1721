"""Work and time bound of a call, and the boards' figures behind it."""

from tileops.core.roofline.bounds import Achieved, Bound, achieved, bound
from tileops.core.roofline.counting import Work, content_of, distinct_bytes, work
from tileops.core.roofline.hardware import (
    Confidence,
    Figure,
    Peak,
    Profile,
    Rated,
    Unit,
    Which,
    board_of,
    boards,
    figure_of,
    peak_at_clock,
    peak_figure,
    profile,
)

__all__ = [
    "Achieved",
    "Bound",
    "Confidence",
    "Figure",
    "Peak",
    "Profile",
    "Rated",
    "Unit",
    "Which",
    "Work",
    "achieved",
    "board_of",
    "boards",
    "bound",
    "content_of",
    "distinct_bytes",
    "figure_of",
    "peak_at_clock",
    "peak_figure",
    "profile",
    "work",
]
