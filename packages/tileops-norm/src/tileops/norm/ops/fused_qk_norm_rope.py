"""FusedQKNormRoPEFwdOp: normalization and rotary embedding of query and key heads, in place."""

from __future__ import annotations

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class FusedQKNormRoPEFwdOp(Op):
    """RMSNorm of each query and key head, then rotary position embedding of its first R elements; writes into qkv.

    Args:
        heads: query heads.
        heads_kv: key heads, and as many value heads.
        eps: added to the mean of a head's squares.
        rope_layout: ``neox`` pairs the elements i and i + R/2 of a head, ``interleaved`` 2i and 2i + 1.

    The call takes ``qkv``, ``[tokens, (heads + 2 * heads_kv) * D]`` of float32, float16 or bfloat16 with any strides;
    ``q_weight`` and ``k_weight``, ``[D]`` of qkv's dtype or float32; ``cos_sin_cache``, ``[P, R]`` of qkv's dtype or
    float32, the cosines of a position in the first half of its row and the sines in the second, R even and at most D;
    and ``positions``, ``[tokens]`` of int64, each from 0 to P - 1, which only ``TILEOPS_DEBUG=1`` checks: others read
    beyond the cache. It returns None. q and k are overwritten; v and what lies between rows are not touched. All of it
    is computed in float32 and rounded once. Raises CheckError for any other call.

    >>> op = FusedQKNormRoPEFwdOp(1, 1)
    >>> qkv, one = torch.tensor([[2.0, 2.0, 3.0, 3.0, 9.0, 9.0]]), torch.ones(2)
    >>> op(qkv, one, one, torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
    >>> qkv
    tensor([[-1.0000,  1.0000, -1.0000,  1.0000,  9.0000,  9.0000]])
    """

    kernels = ("fused_qk_norm_rope:FusedQKNormRoPEHeads",)
    heads: int
    heads_kv: int
    eps: float = 1e-6
    rope_layout: str = "neox"

    def __call__(
        self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, positions: Tensor
    ) -> None:
        return self.run(qkv, q_weight, k_weight, cos_sin_cache, positions)  # type: ignore[no-any-return] # it is None
