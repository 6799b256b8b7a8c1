"""qsa_localize: the part of a selection that one rank of a context-sharded cache holds, in its local numbering.

local[m] = [t // world for t in sel[m] if t >= 0 and t % world == rank], in order, then -1      (kernels.md C12)
"""

import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Dim, Exact, Op


def reference(sel: Tensor, rank: int, world: int) -> Tensor:
    """Return local i32[M, W] of sel i32[M, W] (token numbers, negative = none) for this rank of `world`.

    Raises ValueError unless 0 <= rank < world.
    """
    if not 0 <= rank < world:
        raise ValueError(f"qsa_localize: rank {rank} is not one of {world} ranks (0 .. {world - 1})")
    m, w = sel.shape
    mine = (sel >= 0) & (sel % world == rank)
    # Tokens of other ranks go to a column that is cut off.
    place = torch.where(mine, mine.cumsum(1) - 1, w)
    local = sel.new_full((m, w + 1), -1).scatter_(1, place, sel // world)
    return local[:, :w].contiguous()


def _selection(draw: inputs.Draw) -> Tensor:
    """Selections with holes anywhere: ascending distinct tokens, some replaced by -1."""
    m, w = draw.shape
    steps = torch.randint(1, 4, (m, w), generator=draw.generator)
    holes = torch.rand(m, w, generator=draw.generator) < 0.3
    return (steps.cumsum(1) - 1).masked_fill(holes, -1).to(draw.dtype)


qsa_localize = Op(
    "qsa_localize",
    reference=reference,
    launch=None,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(sel="i32[M,W]", rank="int", world="int", local="i32[M,W] out"),
    dims=dict(M=Dim(0, 8192, test=(0, 20)), W=Dim(0, 8192, test=(0, 40))),
    inputs=dict(sel=_selection, world=inputs.value(3), rank=inputs.integers(0, 2)),
)
