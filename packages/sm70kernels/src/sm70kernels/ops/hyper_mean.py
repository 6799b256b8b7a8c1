"""hyper_mean: the mean of the residual streams, the feature a block drafter taps.

    mean = (1/S) Σ_s h_s

Summed in ascending stream order in float32, rounded once.
"""

import numpy as np
from torch import Tensor

from sm70kernels import rows
from sm70kernels.op import INV, Dim, Op, Ratio, Spec
from sm70kernels.streams import fold


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(h: Tensor) -> Tensor:
    """Return mean act [M, E] of h act [M, S, E]."""
    return rows.tensor(fold(rows.floats(h)) / np.float32(h.shape[1]), h.dtype)


hyper_mean = Op(
    "hyper_mean",
    reference=reference,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(h="act[M,S,E]", mean="act[M,E] out"),
    dims=dict(M=Dim(0, 65536, test=(0, 20)), S=Spec(4, test=(1, 2, 4, 5)), E=Spec(2560, test=(24, 33, 64))),
)
