"""lm_head_logits: logits of the vocabulary rows this rank holds, in float32 for either activation dtype.

logits[m,v] = Σ_k x[m,k] w[v,k], never rounded to float16: sampling, logprobs and the greedy choice all see the same float32 value.
Decode, verify and prompt rows take the same tile of 16 rows, so a token's logits do not depend on which step computed them.
"""

from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(x: Tensor, w: Tensor) -> Tensor:
    """x act[M,K], w act[V,K] -> f32[M,V], in tiles of 16 rows."""
    return rows.linear(x, w, rows.TILE["decode"])


lm_head_logits = Op(
    "lm_head_logits",
    reference=reference,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(x="act[M,K]", w="act[V,K]", logits="f32[M,V] out"),
    dims=dict(M=Dim(0, 1 << 20, test=(0, 20)), V=Spec(62080, 124160, 248320, test=(1, 17, 50)), K=Spec(2560, test=(16, 40))),
    inputs=dict(w=inputs.normal(0.25)),
    flops=lambda d: 2 * d["M"] * d["V"] * d["K"],
)
