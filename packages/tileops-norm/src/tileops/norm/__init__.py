"""Normalization operators."""

from tileops.norm.ops.ada_layer_norm import AdaLayerNormFwdOp, AdaLayerNormZeroFwdOp
from tileops.norm.ops.fused_qk_norm_rope import FusedQKNormRoPEFwdOp
from tileops.norm.ops.gated_rms_norm import GatedRMSNormFwdOp
from tileops.norm.ops.rms_norm import RMSNormFwdOp
from tileops.norm.ops.rms_norm_bwd import RMSNormBwdOp

__all__ = [
    "AdaLayerNormFwdOp",
    "AdaLayerNormZeroFwdOp",
    "FusedQKNormRoPEFwdOp",
    "GatedRMSNormFwdOp",
    "RMSNormBwdOp",
    "RMSNormFwdOp",
]
