"""moe_qpn: the routed experts and the shared expert of decode and verify rows, in 16-row tiles per expert.

    y_r = W2_e · (silu(gate_e x) ⊙ (up_e x)),  e = ids[m, r]
    out = Σ_r weight_r · y_r + sigmoid(w_g · x) · shared(x)

The routes of a row are added in slot order; an id outside 0..X-1 contributes nothing; a duplicate id is a route of its own.
Rounding points are those of :mod:`sm70kernels.experts`, the same in both expert ops.
"""

from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.experts import moe
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    shared13: Tensor | None,
    shared2: Tensor | None,
    shared_gate: Tensor | None,
) -> Tensor:
    """Return out act [M, E].

    x act [M, E]; ids i32 [M, K]; weights f32 [M, K]; w13 [X, 2I, E] (gate rows, then up rows) and w2 [E, X, I]; of the shared expert
    shared13 act [2J, E], shared2 act [E, J] and shared_gate act [1, E], all None without one.
    """
    shared = None if shared13 is None or shared2 is None or shared_gate is None else (shared13, shared2, shared_gate)
    return moe(x, ids, weights, w13, w2, shared, rows.TILE["decode"])


moe_qpn = Op(
    "moe_qpn",
    reference=reference,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        x="act[M,E]",
        ids="i32[M,K]",
        weights="f32[M,K]",
        w13="bank[X,I2,E]",
        w2="bank[E,X,I]",
        shared13="act[J2,E] optional",
        shared2="act[E,J] when=shared13",
        shared_gate="act[1,E] when=shared13",
        out="act[M,E] out",
    ),
    dims=dict(
        M=Dim(0, 64, test=(0, 20)),
        K=Dim(1, 64, test=(1, 6)),
        X=Spec(512, test=(4, 8)),
        E=Spec(2560, test=(24, 40)),
        I=Spec(160, 320, 640, test=(8, 20)),
        I2=Derived("2*I"),
        J=Spec(160, 320, 640, test=(8, 20)),
        J2=Derived("2*J"),
    ),
    inputs=dict(
        ids=inputs.integers(-1, "X"),
        weights=inputs.uniform(0.0, 1.0),
        w13=inputs.normal(0.2),
        w2=inputs.normal(0.2),
        shared13=inputs.optional(inputs.normal(0.2)),
        shared2=inputs.normal(0.2),
        shared_gate=inputs.normal(0.2),
    ),
    flops=lambda d: 6 * d["M"] * d["E"] * (d["K"] * d["I"] + d["J"]),
)
