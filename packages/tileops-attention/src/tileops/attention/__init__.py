"""Attention operators."""

from tileops.attention.ops.gqa_dense import GQADenseFwdOp

__all__ = ["GQADenseFwdOp"]
