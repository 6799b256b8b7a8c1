"""rms_norm: root mean square normalisation of each row.

y = h(x · rsqrt(mean(x²) + eps) · g), g = 1 + weight with unit_offset (Gemma's form: every norm of the target model), else weight.
float32 throughout, one rounding at the end.
"""

import torch
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """x act[M,E], weight act[E] -> act[M,E]."""
    gain = weight.float() + 1.0 if unit_offset else weight.float()
    y = rows.rms(x.float(), eps) * gain
    return y if x.dtype == torch.float32 else y.to(x.dtype)


rms_norm = Op(
    "rms_norm",
    reference=reference,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(x="act[M,E]", weight="act[E]", eps="float", unit_offset="bool", out="act[M,E] out"),
    dims=dict(M=Dim(0, 1 << 20, test=(0, 20)), E=Spec(2560, 10240, test=(1, 24, 75))),
    inputs=dict(weight=inputs.normal(0.5), eps=inputs.one_of(1e-6, 1e-2)),
)
