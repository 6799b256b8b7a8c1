"""linear_skinny: y = x · wᵀ for the few rows of decode and verify steps.

y[m,n] = h(Σ_k x[m,k] w[n,k]): float32 products and sum, one rounding to the activation dtype, no bias. A row that holds infinities
or NaN changes no other row; a sum beyond float16's range rounds to infinity. The kernel needs K to be a multiple of 8.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sm70kernels import inputs, rows, skinny
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(x: Tensor, w: Tensor) -> Tensor:
    """x act[M,K], w act[N,K] -> act[M,N], in tiles of 16 rows."""
    y = rows.linear(x, w, rows.TILE["decode"])
    return y if x.dtype == torch.float32 else y.to(x.dtype)


KERNEL = Kernel("linear_skinny")


def launch(config: int, d: Mapping[str, int], x: Tensor, w: Tensor, out: Tensor) -> None:
    """Split K over `config` warps; a block of 8 warps takes as many rows as there are, up to 8."""
    tile = skinny.tile(d["M"], config)
    KERNEL(dict(K=d["K"], **tile.defines), tile.grid(d["M"], d["N"]), tile.threads, x, x.stride(0), d["M"], w, d["N"], out)


linear_skinny = Op(
    "linear_skinny",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(x="act[M,K] strided aligned", w="act[N,K] aligned", out="act[M,N] out"),
    dims=dict(
        M=Dim(0, 64, test=(0, 20)),
        N=Dim(1, 1 << 20, test=(1, 70)),
        K=Spec(2560, 1536, 6144, 10240, 320, 160, 640, test=(16, 40), kernel=(16, 264, 1032)),
    ),
    inputs=dict(w=inputs.normal(0.25)),
    configs=skinny.SHARES,
    choose=lambda d: skinny.shares(d["N"], d["K"]),
    shapes=[dict(M=m, N=n, K=k) for n, k in skinny.REAL for m in (1, 5, 40, 64)],
    flops=lambda d: 2 * d["M"] * d["N"] * d["K"],
)
