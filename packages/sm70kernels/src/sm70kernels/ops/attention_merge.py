"""attention_merge: join the partial attention results of the ranks that share a context, then apply the output gate.

    m = max_r lse_r      w_r = 2^(lse_r - m)      o = sum_r w_r parts_r / sum_r w_r      (ranks ascending, float32, LSE base 2)
    out = h(f32(h(o)) * sigmoid(f32(gate)))

A rank without tokens has lse = -inf and adds exactly nothing, whatever its part holds; where only one rank has tokens, o is its
part bit for bit; where none has, o = 0 (kernels.md C8).
"""

import math

import torch
from torch import Tensor

from sm70kernels import attention, inputs, softmax
from sm70kernels.op import INV, Dim, Op, Ratio, Spec

_DTYPES = {"f32": torch.float32, "f16": torch.float16}


def reference(parts: Tensor, lse: Tensor, gate: Tensor | None, dtype: str) -> Tensor:
    """Return out [M, HQ, D] in `dtype` from parts f32[R, M, HQ, D], each normalised on its rank, and lse f32[R, M, HQ].

    gate act[M, HQ, D] is optional.
    """
    empty = (lse == -math.inf).unsqueeze(-1)
    weight = softmax.exp2(lse - lse.amax(0).clamp_min_(softmax.FLOOR)).unsqueeze(-1)
    # -0.0 is what changes no addend, signed zeros included.
    shares = torch.where(empty, -0.0, parts * weight)
    o, total = shares[0], weight[0]
    for share, w in zip(shares[1:], weight[1:], strict=True):
        o, total = o + share, total + w
    return attention.gated(torch.where(total == 0, 0.0, o / total), gate, _DTYPES[dtype])


def _lse(draw: inputs.Draw) -> Tensor:
    """Log-sum-exps of which a quarter belong to ranks without tokens."""
    values = draw.normal(*draw.shape) * 4
    return values.masked_fill(torch.rand(draw.shape, generator=draw.generator) < 0.25, -math.inf)


def _dtype(draw: inputs.Draw) -> str:
    """The activation dtype of the gate when there is one, else either."""
    gate = draw.made["gate"]
    if gate is None:
        return "f16" if draw.integer(0, 1) else "f32"
    return "f16" if gate.dtype == torch.float16 else "f32"


attention_merge = Op(
    "attention_merge",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        parts="f32[R,M,HQ,D]",
        lse="f32[R,M,HQ]",
        gate="act[M,HQ,D] optional",
        dtype="enum f32|f16",
        out="act|f32[M,HQ,D] out",
    ),
    dims=dict(R=Dim(1, 16, test=(1, 4)), M=Dim(0, 8192, test=(0, 20)), HQ=Spec(6, test=(1, 3, 4)), D=Spec(256, test=(5, 32))),
    inputs=dict(lse=_lse, dtype=_dtype),
)
