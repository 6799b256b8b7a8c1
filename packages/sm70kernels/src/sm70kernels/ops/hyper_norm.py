"""hyper_norm: RMS norm of every residual stream on its own.

    n_s = h_s · rsqrt(mean_e(h_s²) + eps) · (1 + w_s)

float32 arithmetic, one rounding at the end. The mean runs over one stream of E values, never over S·E; the stored weight is
near 0, hence 1 + w. The kernel reads 8 halves at a time: E is a multiple of 8 and tensors are aligned to 16 bytes.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from sm70kernels import inputs, row_norm, rows
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, Dim, Op, Ratio, Spec
from sm70kernels.streams import stream_norm


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(h: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return n act [M, S, E] for h act [M, S, E] and weight act [S, E]; eps is added to the mean square."""
    return rows.tensor(stream_norm(rows.floats(h), rows.floats(weight), eps), h.dtype)


KERNEL = Kernel("hyper_norm")


def launch(config: None, d: Mapping[str, int], h: Tensor, weight: Tensor, eps: float, n: Tensor) -> None:
    """One block a stream of a row."""
    threads = row_norm.threads(d["E"])
    KERNEL(dict(S=d["S"], E=d["E"], THREADS=threads), d["M"] * d["S"], threads, h, weight, eps, n)


hyper_norm = Op(
    "hyper_norm",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(h="act[M,S,E] aligned", weight="act[S,E] aligned", eps="float", n="act[M,S,E] out aligned"),
    dims=dict(M=Dim(0, 65536, test=(0, 20)), S=Spec(4, test=(1, 2, 4)), E=Spec(2560, test=(24, 40, 64), kernel=(24, 264))),
    inputs=dict(weight=inputs.normal(0.1), eps=inputs.value(1e-6)),
    shapes=[dict(M=M) for M in (1, 5, 40, 64)],
)
