"""Normalization operators."""

from tileops.norm.ops.batch_norm import BatchNormFwdOp
from tileops.norm.ops.batch_norm_bwd import BatchNormBwdOp
from tileops.norm.ops.group_norm import GroupNormFwdOp
from tileops.norm.ops.instance_norm import InstanceNormFwdOp
from tileops.norm.ops.rms_norm import RMSNormFwdOp
from tileops.norm.ops.rms_norm_bwd import RMSNormBwdOp

__all__ = [
    "BatchNormBwdOp",
    "BatchNormFwdOp",
    "GroupNormFwdOp",
    "InstanceNormFwdOp",
    "RMSNormBwdOp",
    "RMSNormFwdOp",
]
