"""hyper_inject: add a block's output to every residual stream, and norm the result for the next mix.

    h_s <- round(h_s + gate_s · o)
    n    = hyper_norm(h)             only when the next norm's weight is given

The gate is float32 and the sum is rounded once. What is normed is the rounded state, so the fused form gives the bits of
hyper_inject followed by hyper_norm. The residual is the raw h, not the normed streams.
"""

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.op import INV, Dim, Op, Ratio, Spec
from sm70kernels.streams import stream_norm


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(h: Tensor, o: Tensor, gate: Tensor, weight: Tensor | None, eps: float) -> Tensor | None:
    """Update h act [M, S, E] in place with o act [M, E] and gate f32 [M, S].

    Returns n act [M, S, E], the norm of the new h by weight act [S, E] and eps; None when weight is None.
    """
    added = gate.numpy()[:, :, None] * rows.floats(o)[:, None]
    if h.dtype is torch.float32:
        state = h.numpy()
        state += added
    else:
        added += rows.floats(h)
        h.copy_(torch.from_numpy(added))
        state = rows.floats(h)
    return None if weight is None else rows.tensor(stream_norm(state, rows.floats(weight), eps), h.dtype)


hyper_inject = Op(
    "hyper_inject",
    reference=reference,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        h="act[M,S,E] inout",
        o="act[M,E]",
        gate="f32[M,S]",
        weight="act[S,E] optional",
        eps="float",
        n="act[M,S,E] out when=weight",
    ),
    dims=dict(M=Dim(0, 65536, test=(0, 20)), S=Spec(4, test=(1, 2, 4)), E=Spec(2560, test=(24, 40, 64))),
    inputs=dict(gate=inputs.uniform(0.0, 2.0), weight=inputs.optional(inputs.normal(0.1)), eps=inputs.value(1e-6)),
)
