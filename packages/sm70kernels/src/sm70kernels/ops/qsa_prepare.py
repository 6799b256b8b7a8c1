"""qsa_prepare: from the fused projections to rotated queries and keys, values, gates and indexer inputs.

    q  = rope(RMS1p(q; q_weight))     k = rope(RMS1p(k; k_weight))     iq = rope(RMS1p(iq; iq_weight))     v, gate, ik unchanged

RMS1p(x; w) = x * rsqrt(mean(x^2) + eps) * (1 + w) in float32, rounded once to the activation dtype; rope turns the first 2 RH
dimensions of that rounded value in float32, pairs (i, i + RH), and rounds once more (kernels.md C3, model.md 2.6). ik stays raw: it is
normalised and rotated only after pooling (qsa_compress).

Columns of qkvg: per query head its D query values, then its D gate values; then all keys, then all values. Columns of iqk: HI
index queries, then one index key, DI each.
"""

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, rotary
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec


@np.errstate(all="ignore")  # infinities and NaN are data
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
    m, channels = qkvg.shape
    d, di = q_weight.shape[0], iq_weight.shape[0]
    # [M, heads, D] views, no copies: the rows of qkvg and iqk may be strided.
    heads = qkvg.numpy().reshape(m, channels // d, d)
    index = iqk.numpy().reshape(m, iqk.shape[1] // di, di)
    cut = heads.shape[1] - 2 * kv_heads
    parts, weights = [heads[:, :cut:2], heads[:, cut : cut + kv_heads], index[:, :-1]], [q_weight, k_weight, iq_weight]
    if d == di:  # heads of one size take one pass: the bits are the same
        q, k, iq = rotary.norm_and_rotate(parts, weights, eps, cos, sin)
    else:
        q, k = rotary.norm_and_rotate(parts[:2], weights[:2], eps, cos, sin)
        (iq,) = rotary.norm_and_rotate(parts[2:], weights[2:], eps, cos, sin)
    gate, v, ik = (torch.from_numpy(x.copy()) for x in (heads[:, 1:cut:2], heads[:, cut + kv_heads :], index[:, -1]))
    return q, gate, k, v, iq, ik


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
