"""qsa_attention: the decode route of sparse attention: every row reads the tokens of its own selection.

    out[m, h] = softmax_t(scale * q[m, h] . k[t, h // G]) . v[t, h // G]      t over the tokens of sel[m], G = HQ / HK

Token t of a request lies in block block_table[request, t // P] at offset t % P; -1 and tokens whose table entry names no block are
masked, wherever they stand. The selection is read in fixed blocks of 64 columns merged in ascending order; formulas, rounding
points and the reason why longer neighbours change nothing are in sm70kernels.softmax. LSE is base 2. With a gate,
out = h(f32(h(out)) * sigmoid(f32(gate))). A row without tokens: out 0, LSE -inf (kernels.md C5, model.md 2.6).
"""

from torch import Tensor

from sm70kernels import attention, inputs, softmax
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(
    q: Tensor,
    sel: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request: Tensor,
    scale: float,
    gate: Tensor | None,
    partial: bool,
) -> tuple[Tensor, Tensor]:
    """Return (out act[M, HQ, D], lse f32[M, HQ]); partial=True gives out in float32, not gated, for attention_merge.

    q act[M, HQ, D]; sel i32[M, W] token numbers in this rank's numbering, each at most once a row; caches act[B, P, HK, D];
    block_table i32[N, PT]; request i32[M] (negative: no tokens). Raises ValueError if a gate comes with partial=True.
    """
    attention.check_partial("qsa_attention", gate, partial)
    out, lse = softmax.selected(q, sel, request, k_cache, v_cache, block_table, scale)
    return (out if partial else attention.gated(out, gate, q.dtype)), lse


qsa_attention = Op(
    "qsa_attention",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        q="act[M,HQ,D]",
        sel="i32[M,W]",
        k_cache="act[B,P,HK,D]",
        v_cache="act[B,P,HK,D]",
        block_table="i32[N,PT]",
        request="i32[M]",
        scale="float",
        gate="act[M,HQ,D] optional",
        partial="bool",
        out="act|f32[M,HQ,D] out",
        lse="f32[M,HQ] out",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 20)),
        HQ=Spec(6, 12, 24, test=(2, 4)),
        HK=Spec(1, 2),
        D=Spec(256, test=(20, 32)),
        W=Dim(0, 8192, test=(0, 150)),
        B=Dim(1, 1 << 24, test=(1, 20)),
        P=Dim(1, 4096, test=(5, 64)),
        N=Dim(1, 8192, test=(1, 4)),
        PT=Dim(1, 1 << 20, test=(3, 6)),
    ),
    inputs=dict(
        sel=attention.selection("PT*P"),
        block_table=inputs.integers(0, "B-1"),
        request=inputs.integers(0, "N-1"),
        scale=inputs.value(0.2),
        partial=attention.draw_partial,
    ),
)
