"""RMSNorm of query and key heads and rotary position embedding, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from tileops.norm.reference.common import mean, wide_of


def fused_qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    heads: int,
    heads_kv: int,
    eps: float,
    rope_layout: str,
    T: torch.dtype,
) -> None:
    """Normalize each head of q and k and rotate its first R elements; writes into ``qkv`` and leaves v alone.

    ``qkv`` is ``[tokens, (heads + 2 * heads_kv) * D]`` of any strides, the weights are ``[D]``, ``cos_sin_cache`` is
    ``[P, R]`` with the cosines first, ``positions`` ``[tokens]``, each below P.
    """
    D, wide = q_weight.shape[0], wide_of(qkv)
    cos, sin = cos_sin_cache[positions].to(wide).unsqueeze(1).chunk(2, -1)
    first = 0
    for count, weight in ((heads, q_weight), (heads_kv, k_weight)):
        part = qkv.narrow(1, first * D, count * D)
        head = part.unflatten(1, (count, D)).to(wide)
        normed = head * (mean(head.square()) + eps).rsqrt() * weight.to(wide)
        part.copy_(_rotated(normed, cos, sin, rope_layout).flatten(1))
        first += count


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, rope_layout: str) -> Tensor:
    """The first elements of the last axis rotated in pairs, as many as there are angles."""
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    axis = -2 if rope_layout == "neox" else -1  # along which a pair's two lie
    a, b = turned.unflatten(-1, (2, pairs) if axis == -2 else (pairs, 2)).unbind(axis)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2)
    return torch.cat((turned, rest), -1)
