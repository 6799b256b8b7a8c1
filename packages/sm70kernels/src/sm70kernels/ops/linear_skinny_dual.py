"""linear_skinny_dual: y = x · wᵀ and y2 = x · w2ᵀ in one launch, each to its own rows.

Both products are those of linear_skinny, bit for bit. A weight of few rows costs a launch of its own otherwise, and outputs that are
views of wider rows need no copy afterwards. The kernel needs K to be a multiple of 8.
"""

from collections.abc import Mapping

from torch import Tensor

from sm70kernels import inputs, rows, skinny
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(x: Tensor, w: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """x act[M,K], w act[N,K], w2 act[N2,K] -> act[M,N], act[M,N2], in tiles of 16 rows."""
    y, y2 = (rows.linear(x, weight, rows.TILE["decode"]).to(x.dtype) for weight in (w, w2))
    return y, y2


KERNEL = Kernel("linear_skinny_dual")


def launch(config: tuple[int, int], d: Mapping[str, int], x: Tensor, w: Tensor, w2: Tensor, out: Tensor, out2: Tensor) -> None:
    """Blocks of w come first, then those of w2; `config` is how many warps share a sum in each."""
    first, second = (skinny.tile(d["M"], shares) for shares in config)
    (across, count), (_, count2) = first.grid(d["M"], d["N"]), second.grid(d["M"], d["N2"])
    defines = dict(K=d["K"], ROWS=first.rows, COLUMNS=first.columns, WARPS_K=first.shares, WARPS_K2=second.shares)
    KERNEL(
        defines, (across, count + count2), first.threads, x, x.stride(0), d["M"], w, d["N"], out, out.stride(0), count, w2, d["N2"], out2,
        out2.stride(0),
    )  # fmt: skip


linear_skinny_dual = Op(
    "linear_skinny_dual",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        x="act[M,K] strided aligned",
        w="act[N,K] aligned",
        w2="act[N2,K] aligned",
        out="act[M,N] out strided",
        out2="act[M,N2] out strided",
    ),
    dims=dict(
        M=Dim(0, 64, test=(0, 20)),
        N=Dim(1, 1 << 20, test=(1, 70)),
        N2=Dim(1, 1 << 20, test=(1, 20)),
        K=Spec(2560, test=(16, 40), kernel=(16, 264, 1032)),
    ),
    inputs=dict(w=inputs.normal(0.25), w2=inputs.normal(0.25)),
    configs=[(1, 8), (4, 8), (8, 8), (2, 4)],
    choose=lambda d: (skinny.shares(d["N"], d["K"]), skinny.shares(d["N2"], d["K"])),
    shapes=[dict(M=m, N=n, N2=n2, K=2560) for n, n2 in ((4096, 24), (16384, 96), (320, 1), (1280, 1)) for m in (1, 5, 40, 64)],
    flops=lambda d: 2 * d["M"] * (d["N"] + d["N2"]) * d["K"],
)
