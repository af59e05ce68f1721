"""The rivals of the normalization operators."""

from tileops.norm.baselines import channels, conditioned, fused_add, layer_norm, rms_norm

RIVALS = {
    **rms_norm.RIVALS,
    **layer_norm.RIVALS,
    **fused_add.RIVALS,
    **conditioned.RIVALS,
    **channels.RIVALS,
}
