"""Normalization operators."""

from tileops.norm.ops.layer_norm import LayerNormFwdOp
from tileops.norm.ops.layer_norm_bwd import LayerNormBwdOp
from tileops.norm.ops.rms_norm import RMSNormFwdOp
from tileops.norm.ops.rms_norm_bwd import RMSNormBwdOp

__all__ = ["LayerNormBwdOp", "LayerNormFwdOp", "RMSNormBwdOp", "RMSNormFwdOp"]
