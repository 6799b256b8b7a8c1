"""hyper_mean: the mean of the residual streams, the feature a block drafter taps.

    mean = (1/S) Σ_s h_s

Summed in ascending stream order in float32, rounded once. The kernel reads 8 halves at a time: E is a multiple of 8 and tensors are
aligned to 16 bytes.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from sm70kernels import rows
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, Dim, Op, Ratio, Spec
from sm70kernels.streams import fold


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(h: Tensor) -> Tensor:
    """Return mean act [M, E] of h act [M, S, E]."""
    return rows.tensor(fold(rows.floats(h)) / np.float32(h.shape[1]), h.dtype)


KERNEL = Kernel("hyper_mean")


def launch(config: int, d: Mapping[str, int], h: Tensor, mean: Tensor) -> None:
    """Blocks of `config` threads, each of which makes 8 means."""
    vectors = d["M"] * d["E"] // 8
    KERNEL(dict(S=d["S"], E=d["E"], THREADS=config), -(-vectors // config), config, h, vectors, mean)


hyper_mean = Op(
    "hyper_mean",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(h="act[M,S,E] aligned", mean="act[M,E] out aligned"),
    dims=dict(M=Dim(0, 65536, test=(0, 20)), S=Spec(4, test=(1, 2, 4, 5)), E=Spec(2560, test=(24, 33, 64), kernel=(24, 64))),
    configs=(128, 64, 256),
    shapes=[dict(M=M) for M in (1, 5, 40, 64)],
)
