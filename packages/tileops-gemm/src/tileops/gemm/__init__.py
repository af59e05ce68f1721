"""GEMM operators."""

from tileops.gemm.ops.gemm import GEMMFwdOp

GemmFwdOp = GEMMFwdOp

__all__ = ["GEMMFwdOp", "GemmFwdOp"]
