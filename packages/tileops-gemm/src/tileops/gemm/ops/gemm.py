"""GEMMFwdOp: dense matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attrs import define
from torch import Tensor

from tileops.core.op import Op


@define(frozen=True)
class GEMMFwdOp(Op):
    """Dense matrix product ``d = op(a) @ op(b)``, where ``op`` transposes an operand whose flag is set.

    Args:
        trans_a: ``a`` is stored ``[K, M]`` instead of ``[M, K]``.
        trans_b: ``b`` is stored ``[N, K]``, as a linear layer's weight is, instead of ``[K, N]``.

    The call takes ``a`` and ``b``, both float16 or both bfloat16, with any strides, and returns ``d``, ``[M, N]`` of
    their dtype: products are summed in float32 over all of K and rounded once. K = 0 gives zeros. Its gradients
    are products, too. Raises CheckError for any other call.

    >>> gemm = GEMMFwdOp()
    >>> gemm(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)).shape
    torch.Size([2, 4])
    """

    trans_a: bool = False
    trans_b: bool = True
    kernels = (
        "gemv:GEMV",
        "gemm_skinny:GEMMSkinny",
        "gemm_persistent:GEMMPersistent",
        "gemm_general:GEMMGeneral",
    )
    # Up to 128 rows the widths of a tile of tokens; then steps in which the count of waves of tiles changes little.
    buckets: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "M": (1, 2, 16, 32, 64, 96, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, 2560, 3072, 3584, 4096)
    }
    pitches = ("M", "K")

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return self.run(a, b)
