"""gated_rms_norm: RMS norm of every value head of the recurrent layer's output, times a weight, times the gate.

    y = act( w act( o rsqrt(mean(o^2) + eps) ) gate(z) ),   gate = sigmoid or silu

The weight is a plain factor, not 1 + w. The normalised value is rounded to the activation dtype before the weight, as in the
transformers implementation; the rest is float32 with one rounding at the end.

The kernel reads 8 halves at a time: V is a power of two from 8 to 256, tensors and the strides of z are aligned to 16 bytes.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.cuda import Kernel
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


KERNELS = {activation: Kernel("gated_rms_norm", f"gated_rms_norm_{activation}") for activation in ("sigmoid", "silu")}


def launch(
    config: int, d: Mapping[str, int], o: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, out: Tensor
) -> None:
    """Blocks of `config` threads; V / 8 lanes a head."""
    heads, each = d["M"] * d["HV"], 8 * config // d["V"]
    defines = dict(HV=d["HV"], V=d["V"], THREADS=config)
    KERNELS[activation](defines, -(-heads // each), config, o, z, z.stride(0), z.stride(1), weight, eps, heads, out)


gated_rms_norm = Op(
    "gated_rms_norm",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        o="act[M,HV,V] aligned",
        z="act[M,HV,V] strided aligned",
        weight="f32[V] aligned",
        eps="float",
        activation="enum sigmoid|silu",
        out="act[M,HV,V] out aligned",
    ),
    dims=dict(M=Dim(0, 8192, test=(0, 20)), HV=Spec(48, 24, 12, test=(1, 4)), V=Spec(128, test=(8, 40), kernel=(8, 64))),
    inputs=dict(z=inputs.normal(3.0), eps=inputs.value(1e-6)),
    configs=(128, 64, 256),
    shapes=[dict(M=M, HV=HV, V=128) for HV in (48, 12) for M in (1, 5, 40, 64)],
)
