"""top1_merge: the greedy token of the whole vocabulary from the winners of its shards.

Per row the best of R (value, token) pairs in lm_head_top1's order: larger value, then lower token; NaN loses to everything, and
among nothing but NaN the lowest token wins. The result does not depend on the order of the shards.
"""

import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import INV, Dim, Exact, Op

_NONE = torch.iinfo(torch.int32).max


def reference(value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """value f32[R,M], index i32[R,M] -> best f32[M], best_index i32[M]."""
    best = value.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(0)
    wins = (value == best) | value.isnan().all(0)
    best_index = torch.where(wins, index, _NONE).amin(0)
    # The winner's own value, so that -0 or NaN come back as they were.
    return torch.where(wins & (index == best_index), value, -torch.inf).amax(0), best_index


top1_merge = Op(
    "top1_merge",
    reference=reference,
    determinism=INV,
    tolerance=Exact(),
    args=dict(value="f32[R,M]", index="i32[R,M]", best="f32[M] out", best_index="i32[M] out"),
    dims=dict(R=Dim(1, 64, test=(1, 5)), M=Dim(0, 1 << 20, test=(0, 20))),
    inputs=dict(index=inputs.distinct("R*M")),
)
