"""hyper_mix: the block input and the injection gates from the normed residual streams.

    l    = W_in · n              n flattened to S·E; W_in = R low-rank rows, then G inject rows (G = S, or 0 in a final mixer)
    a    = silu(l[:R] / S)
    u    = sigmoid(W_up · a)     [S, E]
    x    = (1/S) Σ_s u_s ⊙ n_s   the mean of the gated, normed streams
    gate = 2 · sigmoid(l[R:] / S)

Rounding points: l, a and W_up·a to the activation dtype; the division by S, the activations and the sum over streams (ascending)
in float32; x once. The gates stay float32.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, rows, skinny
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec
from sm70kernels.streams import rounded


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(n: Tensor, w_in: Tensor, w_up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return (x act [M, E], gate f32 [M, G]).

    n act [M, S, E]; w_in act [R+G, S·E]; w_up act [S·E, R]; kind "decode" (16-row tiles) or "prefill" (64-row tiles).
    """
    (m, streams, hidden), act, tile = n.shape, n.dtype, rows.TILE[kind]
    normed, up, count = rows.floats(n), rows.floats(w_up), np.float32(streams)
    rank = up.shape[1]
    low = rounded(rows.multiply(normed.reshape(m, streams * hidden), rows.floats(w_in), tile), act)
    low /= count
    # One sigmoid over both parts: it serves silu(l) = l · sigmoid(l) and the gates.
    share = rows.logistic(low)
    mix = rounded(rows.multiply(rounded(low[:, :rank] * share[:, :rank], act), up, tile), act)
    u = rows.logistic(mix).reshape(m, streams, hidden)
    u *= normed
    x = np.add.reduce(u, 1)
    x /= count
    return rows.tensor(x, act), torch.from_numpy(share[:, rank:] * np.float32(2.0))


DOWN, UP = Kernel("hyper_mix", "hyper_mix_down"), Kernel("hyper_mix", "hyper_mix_up")


def launch(
    config: int, d: Mapping[str, int], n: Tensor, w_in: Tensor, w_up: Tensor, kind: str, x: Tensor, gate: Tensor, low: Tensor
) -> None:
    """Down with `config` warps to a sum; up with one, four rows a block. Both kinds of rows take the same route."""
    m, sizes = d["M"], {name: d[name] for name in ("S", "E", "R")}
    down = skinny.tile(m, config)
    DOWN(sizes | dict(DOWN=1, **down.defines), down.grid(m, d["RI"]), down.threads, n, m, w_in, d["G"], low, gate)
    up = skinny.tile(min(m, 4), 1)
    UP(sizes | dict(ROWS=up.rows, GROUPS=up.groups), (-(-m // up.rows), -(-d["E"] // up.groups)), up.threads, low, m, w_up, n, x)


hyper_mix = Op(
    "hyper_mix",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        n="act[M,S,E] aligned",
        w_in="act[RI,SE] aligned",
        w_up="act[SE,R] aligned",
        kind="enum decode|prefill",
        x="act[M,E] out",
        gate="f32[M,G] out",
        low="act[M,R] scratch aligned",
    ),
    dims=dict(
        M=Dim(0, 65536, test=(0, 20)),
        S=Spec(4, test=(1, 2, 4)),
        E=Spec(2560, test=(24, 40)),
        R=Spec(320, test=(8, 20), kernel=(8, 24)),
        G=Dim(0, "S", infer="RI-R"),
        RI=Derived("R+G"),
        SE=Derived("S*E"),
    ),
    inputs=dict(w_in=inputs.normal(0.1), w_up=inputs.normal(0.3)),
    configs=skinny.SHARES[::-1],
    choose=lambda d: skinny.shares(d["R"] + d["S"], d["SE"]),
    shapes=[dict(M=m, S=4, E=2560, R=320, G=g) for g in (4, 0) for m in (1, 5, 40, 64)],
    flops=lambda d: 2 * d["M"] * d["SE"] * (d["RI"] + d["R"]),
)
