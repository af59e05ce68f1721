"""A call against its signature: indices solved, rules held, outputs derived. Imports torch only for symbolic sizes."""

from tileops.core.check.call import Call, TensorMeta, contiguous_strides, ordered_strides
from tileops.core.check.checker import Checker

__all__ = ["Call", "Checker", "TensorMeta", "contiguous_strides", "ordered_strides"]
