"""Work and time bound of a call, and the boards' figures behind it."""

from tileops.core.roofline.bounds import Bound, bound
from tileops.core.roofline.counting import Work, content_of, distinct_bytes, work
from tileops.core.roofline.hardware import (
    Confidence,
    Figure,
    Peak,
    Profile,
    Rated,
    Unit,
    board_of,
    boards,
    peak_at_clock,
    peak_figure,
    profile,
)

__all__ = [
    "Bound",
    "Confidence",
    "Figure",
    "Peak",
    "Profile",
    "Rated",
    "Unit",
    "Work",
    "board_of",
    "boards",
    "bound",
    "content_of",
    "distinct_bytes",
    "peak_at_clock",
    "peak_figure",
    "profile",
    "work",
]
