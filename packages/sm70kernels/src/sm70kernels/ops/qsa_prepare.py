"""qsa_prepare: from the fused projections to rotated queries and keys, values, gates and indexer inputs.

    q  = rope(RMS1p(q; q_weight))     k = rope(RMS1p(k; k_weight))     iq = rope(RMS1p(iq; iq_weight))     v, gate, ik unchanged

RMS1p(x; w) = x * rsqrt(mean(x^2) + eps) * (1 + w) in float32, rounded once to the activation dtype; rope turns the first 2 RH
dimensions of that rounded value in float32, pairs (i, i + RH), and rounds once more (kernels.md C3, model.md 2.6). ik stays raw: it is
normalised and rotated only after pooling (qsa_compress).

Columns of qkvg: per query head its D query values, then its D gate values; then all keys, then all values. Columns of iqk: HI
index queries, then one index key, DI each.
"""

import torch
from torch import Tensor

from sm70kernels import inputs, rotary
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec


def reference(
    qkvg: Tensor,
    iqk: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    iq_weight: Tensor,
    eps: float,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (q act[M,HQ,D], gate act[M,HQ,D], k act[M,HK,D], v act[M,HK,D], iq act[M,HI,DI], ik act[M,DI]).

    qkvg act[M, (2 HQ + 2 HK) D]; iqk act[M, (HI + 1) DI]; cos, sin act[M, RH] at each row's position, times the attention factor.
    """
    m, dtype = qkvg.shape[0], qkvg.dtype
    d, di = q_weight.shape[0], iq_weight.shape[0]
    heads = qkvg.shape[1] // (2 * d) - kv_heads
    # [M, heads, D] views, no copies: the rows of qkvg and iqk may be strided.
    query, gate = qkvg[:, : 2 * heads * d].view(m, heads, 2, d).unbind(2)
    key, value = qkvg[:, 2 * heads * d :].view(m, 2, kv_heads, d).unbind(1)
    cos2, sin2 = rotary.angles(cos, sin)
    # One pass over query and key heads: they differ only in the norm's weight.
    both = torch.cat([query, key], 1)
    weight = torch.cat([q_weight.expand(heads, d), k_weight.expand(kv_heads, d)])
    turned = rotary.rotate(rotary.rms1p(both, weight, eps, dtype), cos2, sin2).to(dtype)
    q, k = turned[:, :heads], turned[:, heads:]
    index = rotary.rms1p(iqk[:, :-di].view(m, iqk.shape[1] // di - 1, di), iq_weight, eps, dtype)
    iq = rotary.rotate(index, cos2, sin2).to(dtype)
    return q.contiguous(), gate.contiguous(), k.contiguous(), value.contiguous(), iq, iqk[:, -di:].contiguous()


qsa_prepare = Op(
    "qsa_prepare",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        qkvg="act[M,C] strided",
        iqk="act[M,CI] strided",
        cos="act[M,RH]",
        sin="act[M,RH]",
        q_weight="act[D]",
        k_weight="act[D]",
        iq_weight="act[DI]",
        eps="float",
        kv_heads="dim HK",
        q="act[M,HQ,D] out",
        gate="act[M,HQ,D] out",
        k="act[M,HK,D] out",
        v="act[M,HK,D] out",
        iq="act[M,HI,DI] out",
        ik="act[M,DI] out",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 20)),
        HQ=Spec(6, 12, 24, test=(2, 4), infer="C//(2*D)-HK"),
        HK=Spec(1, 2, test=(1, 2)),
        D=Spec(256, test=(24, 32)),
        HI=Spec(4, test=(3, 4), infer="CI//DI-1"),
        DI=Spec(128, test=(16, 20)),
        RH=Spec(32, test=(4, 8)),
        C=Derived("(2*HQ+2*HK)*D"),
        CI=Derived("(HI+1)*DI"),
    ),
    inputs=dict(
        cos=inputs.uniform(-1.0, 1.0),
        sin=inputs.uniform(-1.0, 1.0),
        q_weight=inputs.normal(0.1),
        k_weight=inputs.normal(0.1),
        iq_weight=inputs.normal(0.1),
        eps=inputs.value(1e-6),
    ),
)
