"""Result documents as people read them: one page, or what changed between two."""

from tileops.core.report.compare import Change, Comparison, compare
from tileops.core.report.documents import Document, Rival, Row, Time, load
from tileops.core.report.page import render

__all__ = ["Change", "Comparison", "Document", "Rival", "Row", "Time", "compare", "load", "render"]
