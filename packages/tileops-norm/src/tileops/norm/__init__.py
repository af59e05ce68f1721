"""Normalization operators."""

from tileops.norm.ops.ada_layer_norm import AdaLayerNormFwdOp, AdaLayerNormZeroFwdOp
from tileops.norm.ops.batch_norm import BatchNormFwdOp
from tileops.norm.ops.batch_norm_bwd import BatchNormBwdOp
from tileops.norm.ops.fused_add_layer_norm import FusedAddLayerNormFwdOp
from tileops.norm.ops.fused_add_rms_norm import FusedAddRMSNormFwdOp
from tileops.norm.ops.fused_add_rms_norm_quant import FusedAddRMSNormQuantFwdOp
from tileops.norm.ops.fused_qk_norm_rope import FusedQKNormRoPEFwdOp
from tileops.norm.ops.gated_rms_norm import GatedRMSNormFwdOp
from tileops.norm.ops.group_norm import GroupNormFwdOp
from tileops.norm.ops.instance_norm import InstanceNormFwdOp
from tileops.norm.ops.layer_norm import LayerNormFwdOp
from tileops.norm.ops.layer_norm_bwd import LayerNormBwdOp
from tileops.norm.ops.rms_norm import RMSNormFwdOp
from tileops.norm.ops.rms_norm_bwd import RMSNormBwdOp

__all__ = [
    "AdaLayerNormFwdOp",
    "AdaLayerNormZeroFwdOp",
    "BatchNormBwdOp",
    "BatchNormFwdOp",
    "FusedAddLayerNormFwdOp",
    "FusedAddRMSNormFwdOp",
    "FusedAddRMSNormQuantFwdOp",
    "FusedQKNormRoPEFwdOp",
    "GatedRMSNormFwdOp",
    "GroupNormFwdOp",
    "InstanceNormFwdOp",
    "LayerNormBwdOp",
    "LayerNormFwdOp",
    "RMSNormBwdOp",
    "RMSNormFwdOp",
]
