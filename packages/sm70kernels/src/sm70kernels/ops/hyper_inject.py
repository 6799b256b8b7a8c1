"""hyper_inject: add a block's output to every residual stream, and norm the result for the next mix.

    h_s <- round(h_s + gate_s · o)
    n    = hyper_norm(h)             only when the next norm's weight is given

The gate is float32 and the sum is rounded once. What is normed is the rounded state, so the fused form gives the bits of
hyper_inject followed by hyper_norm. The residual is the raw h, not the normed streams.

The kernel fuses product and sum, and reads 8 halves at a time: E is a multiple of 8 and tensors are aligned to 16 bytes.
"""

from collections.abc import Mapping
from math import gcd

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, row_norm, rows
from sm70kernels.cuda import Kernel
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


INJECT, INJECT_NORM = Kernel("hyper_inject"), Kernel("hyper_inject", "hyper_inject_norm")


def launch(
    config: int, d: Mapping[str, int], h: Tensor, o: Tensor, gate: Tensor, weight: Tensor | None, eps: float, n: Tensor | None
) -> None:
    """One block for `config` streams of a row, or as many as divide S: it changes no bits."""
    streams, threads = gcd(config, d["S"]), row_norm.threads(d["E"])
    defines = dict(S=d["S"], E=d["E"], THREADS=threads, STREAMS=streams)
    grid = d["M"] * d["S"] // streams
    if weight is None:
        INJECT(defines, grid, threads, h, o, gate)
    else:
        INJECT_NORM(defines, grid, threads, h, o, gate, weight, eps, n)


hyper_inject = Op(
    "hyper_inject",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        h="act[M,S,E] inout aligned",
        o="act[M,E] aligned",
        gate="f32[M,S]",
        weight="act[S,E] optional aligned",
        eps="float",
        n="act[M,S,E] out aligned when=weight",
    ),
    dims=dict(M=Dim(0, 65536, test=(0, 20)), S=Spec(4, test=(1, 2, 4)), E=Spec(2560, test=(24, 40, 64), kernel=(24, 264))),
    inputs=dict(gate=inputs.uniform(0.0, 2.0), weight=inputs.optional(inputs.normal(0.1)), eps=inputs.value(1e-6)),
    configs=(1, 2, 4),
    shapes=[dict(M=M) for M in (1, 5, 40, 64)],
)
