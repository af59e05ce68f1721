"""What the normalization operators mean, in plain PyTorch.

Each function is both the oracle and the cpu backend. Given a float64 ``x`` it computes and returns float64; given any
other it computes in float32 and rounds each output to its dtype once.
"""

from tileops.norm.reference.ada_layer_norm import ada_layer_norm, ada_layer_norm_zero
from tileops.norm.reference.fused_qk_norm_rope import fused_qk_norm_rope
from tileops.norm.reference.gated_rms_norm import gated_rms_norm
from tileops.norm.reference.rms_norm import rms_norm, rms_norm_bwd

__all__ = [
    "ada_layer_norm",
    "ada_layer_norm_zero",
    "fused_qk_norm_rope",
    "gated_rms_norm",
    "rms_norm",
    "rms_norm_bwd",
]
