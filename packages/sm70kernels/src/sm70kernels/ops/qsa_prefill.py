"""qsa_prefill: sparse attention of the prefill rows that are past the reach of dense attention.

    out[m, h] = softmax_t(scale * q[m, h] . k[t, h // G]) . v[t, h // G]      t over the tokens of sel[m], G = HQ / HK

Only rows with position >= limit are computed; the others are left as they are (prefill_attention has them). The arithmetic of a row
is that of qsa_attention: the selection is read in fixed blocks of 64 columns, merged in ascending order
(sm70kernels.softmax). LSE is base 2. With a gate, out = h(f32(h(out)) * sigmoid(f32(gate))). A row without tokens: out 0, LSE -inf
(kernels.md C6).
"""

import torch
from torch import Tensor

from sm70kernels import attention, inputs, softmax
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(
    q: Tensor,
    sel: Tensor,
    position: Tensor,
    request: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    scale: float,
    limit: int,
    gate: Tensor | None,
    partial: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write the sparse rows of out act[M, HQ, D] (float32 and not gated if partial) and of lse f32[M, HQ] in place.

    q act[M, HQ, D]; sel i32[M, W] token numbers in this rank's numbering, each at most once a row, -1 = none; position, request
    i32[M] (position -1: padding row); caches act[B, P, HK, D]; block_table i32[N, PT]. Raises ValueError if a gate comes with
    partial=True or out has the wrong dtype.
    """
    attention.check_partial("qsa_prefill", gate, partial)
    attention.check_out("qsa_prefill", out, q.dtype, partial)
    index = ((position >= limit) & (position >= 0)).nonzero().view(-1)
    if index.numel() == 0:
        return
    o, e = softmax.selected(q[index], sel[index], request[index], k_cache, v_cache, block_table, scale)
    out[index] = o if partial else attention.gated(o, None if gate is None else gate[index], out.dtype)
    lse[index] = e


def _position(draw: inputs.Draw) -> Tensor:
    """Positions on both sides of any limit, padding rows among them."""
    return torch.randint(-1, 200, draw.shape, generator=draw.generator).to(draw.dtype)


qsa_prefill = Op(
    "qsa_prefill",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        q="act[M,HQ,D]",
        sel="i32[M,W]",
        position="i32[M]",
        request="i32[M]",
        k_cache="act[B,P,HK,D]",
        v_cache="act[B,P,HK,D]",
        block_table="i32[N,PT]",
        scale="float",
        limit="int",
        gate="act[M,HQ,D] optional",
        partial="bool",
        out="act|f32[M,HQ,D] inout",
        lse="f32[M,HQ] inout",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 80)),
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
        position=_position,
        request=inputs.integers(0, "N-1"),
        block_table=inputs.integers(0, "B-1"),
        scale=inputs.value(0.2),
        limit=inputs.integers(0, 160),
        partial=attention.draw_partial,
        out=attention.draw_out,
    ),
)
