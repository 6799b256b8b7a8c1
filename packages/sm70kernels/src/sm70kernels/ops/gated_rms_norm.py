"""gated_rms_norm: RMS norm of every value head of the recurrent layer's output, times a weight, times the gate.

    y = act( w act( o rsqrt(mean(o^2) + eps) ) gate(z) ),   gate = sigmoid or silu

The weight is a plain factor, not 1 + w. The normalised value is rounded to the activation dtype before the weight, as in the
transformers implementation; the rest is float32 with one rounding at the end.
"""

import numpy as np
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.op import INV, Dim, Op, Ratio, Spec
from sm70kernels.streams import rounded

_SILU_FLOOR = np.float32(-128.0)
"""silu is -0 in float32 from -104 down, so a floor changes no finite input; silu(-inf) becomes its limit instead of NaN."""


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(o: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """Return [M, HV, V] in o's dtype from o and z [M, HV, V], weight f32 [V]; activation is "sigmoid" or "silu"."""
    x, gate = rows.floats(o), rows.floats(z)
    y = rounded(x / rows.root_mean_square(x, eps), o.dtype)
    y *= weight.numpy()
    y *= rows.logistic(gate) if activation == "sigmoid" else rows.swish(np.maximum(gate, _SILU_FLOOR))
    return rows.tensor(y, o.dtype)


gated_rms_norm = Op(
    "gated_rms_norm",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        o="act[M,HV,V]",
        z="act[M,HV,V] strided",
        weight="f32[V]",
        eps="float",
        activation="enum sigmoid|silu",
        out="act[M,HV,V] out",
    ),
    dims=dict(M=Dim(0, 8192, test=(0, 20)), HV=Spec(48, 24, 12, test=(1, 4)), V=Spec(128, test=(8, 40))),
    inputs=dict(z=inputs.normal(3.0), eps=inputs.value(1e-6)),
)
