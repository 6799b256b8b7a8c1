"""rms_norm: root mean square normalisation of each row.

y = h(x · rsqrt(mean(x²) + eps) · g), g = 1 + weight with unit_offset (Gemma's form: every norm of the target model), else weight.
float32 throughout, one rounding at the end. The kernel reads 8 halves at a time: E is a multiple of 8 and tensors are aligned to 16 bytes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sm70kernels import inputs, row_norm, rows
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """x act[M,E], weight act[E] -> act[M,E]."""
    gain = weight.float() + 1.0 if unit_offset else weight.float()
    y = rows.rms(x.float(), eps) * gain
    return y if x.dtype == torch.float32 else y.to(x.dtype)


KERNEL = Kernel("rms_norm")


def launch(config: None, d: Mapping[str, int], x: Tensor, weight: Tensor, eps: float, unit_offset: bool, out: Tensor) -> None:
    """One block a row."""
    threads = row_norm.threads(d["E"])
    KERNEL(dict(E=d["E"], THREADS=threads), d["M"], threads, x, weight, eps, unit_offset, out)


rms_norm = Op(
    "rms_norm",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(x="act[M,E] aligned", weight="act[E] aligned", eps="float", unit_offset="bool", out="act[M,E] out aligned"),
    dims=dict(M=Dim(0, 1 << 20, test=(0, 20)), E=Spec(2560, 10240, test=(1, 24, 75), kernel=(8, 64, 264))),
    inputs=dict(weight=inputs.normal(0.5), eps=inputs.one_of(1e-6, 1e-2)),
    shapes=[dict(M=M, E=E) for E in (2560, 10240) for M in (1, 5, 40, 64)],
)
