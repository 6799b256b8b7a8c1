"""linear_prefill: y = x · wᵀ for the rows of a prefill slice.

y[m,n] = h(Σ_k x[m,k] w[n,k]): float32 products and sum, one rounding to the activation dtype, no bias. Its tile is 64 rows, the
position grid's step, so that where a prompt was cut into slices leaves no trace in a row's bits.
"""

import torch
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(x: Tensor, w: Tensor) -> Tensor:
    """x act[M,K], w act[N,K] -> act[M,N], in tiles of 64 rows."""
    y = rows.linear(x, w, rows.TILE["prefill"])
    return y if x.dtype == torch.float32 else y.to(x.dtype)


linear_prefill = Op(
    "linear_prefill",
    reference=reference,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(x="act[M,K] strided", w="act[N,K]", out="act[M,N] out"),
    dims=dict(
        M=Dim(0, 1 << 20, test=(0, 70)),
        N=Spec(2560, 4120, 3584, 640, 512, 336, 320, 10240, 1, test=(1, 24, 33)),
        K=Spec(2560, 1536, 10240, 320, 160, test=(16, 40)),
    ),
    inputs=dict(w=inputs.normal(0.25)),
    flops=lambda d: 2 * d["M"] * d["N"] * d["K"],
)
