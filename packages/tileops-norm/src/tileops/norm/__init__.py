"""Normalization operators."""

from tileops.norm.ops.rms_norm import RMSNormFwdOp
from tileops.norm.ops.rms_norm_bwd import RMSNormBwdOp

__all__ = ["RMSNormBwdOp", "RMSNormFwdOp"]
