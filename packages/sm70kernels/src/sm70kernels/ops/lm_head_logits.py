"""lm_head_logits: logits of the vocabulary rows this rank holds, in float32 for either activation dtype.

logits[m,v] = Σ_k x[m,k] w[v,k], never rounded to float16: sampling, logprobs and the greedy choice all see the same float32 value.
Decode, verify and prompt rows take the same tile of 16 rows, so a token's logits do not depend on which step computed them.
"""

from collections.abc import Mapping

from torch import Tensor

from sm70kernels import inputs, rows, skinny
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(x: Tensor, w: Tensor) -> Tensor:
    """x act[M,K], w act[V,K] -> f32[M,V], in tiles of 16 rows."""
    return rows.linear(x, w, rows.TILE["decode"])


KERNEL = Kernel("lm_head_logits")


def launch(config: int, d: Mapping[str, int], x: Tensor, w: Tensor, logits: Tensor) -> None:
    """A warp sums whole columns; a block takes up to 8 rows."""
    tile = skinny.tile(d["M"], config)
    KERNEL(dict(K=d["K"], **tile.defines), tile.grid(d["M"], d["V"]), tile.threads, x, d["M"], w, d["V"], logits)


lm_head_logits = Op(
    "lm_head_logits",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(x="act[M,K] aligned", w="act[V,K] aligned", logits="f32[M,V] out"),
    dims=dict(
        M=Dim(0, 1 << 20, test=(0, 20)),
        V=Dim(1, 1 << 20, test=(1, 70)),
        K=Spec(2560, test=(16, 40), kernel=(40, 264)),
    ),
    inputs=dict(w=inputs.normal(0.25)),
    configs=(1,),
    shapes=[dict(M=m, V=v, K=2560) for v in (62080, 248320) for m in (1, 5, 40, 64)],
    flops=lambda d: 2 * d["M"] * d["V"] * d["K"],
)
