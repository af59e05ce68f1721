"""Normalization operators."""

from tileops.norm.ops.rms_norm import RMSNormFwdOp

__all__ = ["RMSNormFwdOp"]
