"""The spec language: YAML in, frozen entries or positioned diagnostics out. Imports no torch."""

from tileops.core.spec.diagnostics import Diagnostic, Place
from tileops.core.spec.load import SpecFile, load, parse_spec
from tileops.core.spec.model import Entry, Row, Signature, TensorDecl

__all__ = ["Diagnostic", "Entry", "Place", "Row", "Signature", "SpecFile", "TensorDecl", "load", "parse_spec"]
