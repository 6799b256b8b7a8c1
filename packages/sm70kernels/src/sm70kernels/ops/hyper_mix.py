"""hyper_mix: the block input and the injection gates from the normed residual streams.

    l    = W_in · n              n flattened to S·E; W_in = R low-rank rows, then G inject rows (G = S, or 0 in a final mixer)
    a    = silu(l[:R] / S)
    u    = sigmoid(W_up · a)     [S, E]
    x    = (1/S) Σ_s u_s ⊙ n_s   the mean of the gated, normed streams
    gate = 2 · sigmoid(l[R:] / S)

Rounding points: l, a and W_up·a to the activation dtype; the division by S, the activations and the sum over streams (ascending)
in float32; x once. The gates stay float32.
"""

import torch
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec
from sm70kernels.streams import constant, fold, rounded, stored, widened


def reference(n: Tensor, w_in: Tensor, w_up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return (x act [M, E], gate f32 [M, G]).

    n act [M, S, E]; w_in act [R+G, S·E]; w_up act [S·E, R]; kind "decode" (16-row tiles) or "prefill" (64-row tiles).
    """
    (m, streams, hidden), act = n.shape, n.dtype
    tile, parts = rows.TILE[kind], (w_up.shape[1], w_in.shape[0] - w_up.shape[1])
    low = rounded(rows.linear(n.view(m, streams * hidden), w_in, tile), act).div_(constant(streams))
    # One sigmoid over both parts: it serves silu(l) = l · sigmoid(l) and the gates, and the whole of l needs no padding or copy.
    (lora, _), (share, gate) = low.split_with_sizes(parts, 1), rows.sigmoid(low).split_with_sizes(parts, 1)
    mix = rounded(rows.linear(rounded(lora * share, act), w_up, tile), act)
    x = fold(rows.elementwise(torch.sigmoid_, mix).view(n.shape).mul_(widened(n))).div_(constant(streams))
    return stored(x, act), gate + gate


hyper_mix = Op(
    "hyper_mix",
    reference=reference,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        n="act[M,S,E]",
        w_in="act[RI,SE]",
        w_up="act[SE,R]",
        kind="enum decode|prefill",
        x="act[M,E] out",
        gate="f32[M,G] out",
    ),
    dims=dict(
        M=Dim(0, 65536, test=(0, 20)),
        S=Spec(4, test=(1, 2, 4)),
        E=Spec(2560, test=(24, 40)),
        R=Spec(320, test=(8, 20)),
        G=Dim(0, "S", infer="RI-R"),
        RI=Derived("R+G"),
        SE=Derived("S*E"),
    ),
    inputs=dict(w_in=inputs.normal(0.1), w_up=inputs.normal(0.3)),
    flops=lambda d: 2 * d["M"] * d["SE"] * (d["RI"] + d["R"]),
)
