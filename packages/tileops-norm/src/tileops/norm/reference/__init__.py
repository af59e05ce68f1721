"""What the normalization operators mean, in plain PyTorch.

Each function is both the oracle and the cpu backend. Given a float64 ``x`` it computes and returns float64; given any
other it computes in float32 and rounds each output to its dtype once.
"""

from tileops.norm.reference.ada_layer_norm import ada_layer_norm, ada_layer_norm_zero
from tileops.norm.reference.batch_norm import batch_norm, batch_norm_bwd, batch_norm_bwd_terms
from tileops.norm.reference.fused_add_layer_norm import fused_add_layer_norm
from tileops.norm.reference.fused_add_rms_norm import fused_add_rms_norm
from tileops.norm.reference.fused_add_rms_norm_quant import fused_add_rms_norm_quant
from tileops.norm.reference.fused_qk_norm_rope import fused_qk_norm_rope
from tileops.norm.reference.gated_rms_norm import gated_rms_norm
from tileops.norm.reference.group_norm import group_norm, instance_norm
from tileops.norm.reference.layer_norm import layer_norm, layer_norm_bwd, layer_norm_bwd_terms
from tileops.norm.reference.rms_norm import rms_norm, rms_norm_bwd

__all__ = [
    "ada_layer_norm",
    "ada_layer_norm_zero",
    "batch_norm",
    "batch_norm_bwd",
    "batch_norm_bwd_terms",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_quant",
    "fused_qk_norm_rope",
    "gated_rms_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "layer_norm_bwd",
    "layer_norm_bwd_terms",
    "rms_norm",
    "rms_norm_bwd",
]
