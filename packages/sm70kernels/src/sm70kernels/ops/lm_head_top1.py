"""lm_head_top1: the greedy token among the vocabulary rows this rank holds, and its float32 logit.

logits as in lm_head_logits; row v of the shard is token vocab_start + v; rows from `valid` on are padding and never win. The order
is (larger logit, then lower token): zeros of either sign tie, NaN loses to everything. A row without a candidate (all logits NaN,
or valid = 0) gives token vocab_start and value NaN, which top1_merge ranks last.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sm70kernels import inputs, rows, skinny
from sm70kernels.cuda import Kernel
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec


def reference(x: Tensor, w: Tensor, vocab_start: int, valid: int) -> tuple[Tensor, Tensor]:
    """x act[M,K], w act[V,K] -> value f32[M], index i32[M] (token ids of the whole vocabulary)."""
    valid = min(valid, w.shape[0])
    if valid <= 0:
        none = torch.full((x.shape[0],), float("nan"))
        return none, torch.full_like(none, vocab_start, dtype=torch.int32)
    logits = rows.linear(x, w, rows.TILE["decode"])[:, :valid]
    ranked = logits.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    wins = logits == ranked.amax(1, keepdim=True)  # false for NaN, so an all-NaN row has no winner
    # The lowest winner; `valid` stands for "none" and becomes row 0.
    row = torch.where(wins, torch.arange(valid), valid).amin(1, keepdim=True).remainder(valid)
    return logits.gather(1, row).squeeze(1), (row.squeeze(1) + vocab_start).int()


COLUMNS = Kernel("lm_head_top1", "best_of_columns")
PARTS = Kernel("lm_head_top1", "best_of_parts")


def launch(
    config: int, d: Mapping[str, int], x: Tensor, w: Tensor, vocab_start: int, valid: int, value: Tensor, index: Tensor, best: Tensor
) -> None:
    """Best key of every row and block of columns, then of every row."""
    m, valid = d["M"], max(0, min(valid, d["V"]))
    tile = skinny.tile(m, config)
    grid = tile.grid(m, valid)
    COLUMNS(dict(K=d["K"], **tile.defines), grid, tile.threads, x, m, w, valid, d["P"], best)
    PARTS({}, m, 256, best, d["P"], grid[1], vocab_start, value, index)


def _valid(draw: inputs.Draw) -> int:
    """All rows most of the time, else any number of them."""
    rows = draw.dims["V"]
    return rows if draw.integer(0, 3) else draw.integer(0, rows)


lm_head_top1 = Op(
    "lm_head_top1",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        x="act[M,K] aligned",
        w="act[V,K] aligned",
        vocab_start="int",
        valid="int",
        value="f32[M] out",
        index="i32[M] out",
        best="i64[M,P] scratch",
    ),
    dims=dict(
        M=Dim(0, 1 << 20, test=(0, 20)),
        V=Dim(1, 1 << 20, test=(1, 20)),
        K=Spec(2560, test=(16, 40), kernel=(40, 264)),
        P=Derived(f"(V + {skinny.NARROWEST - 1}) // {skinny.NARROWEST}"),
    ),
    inputs=dict(w=inputs.normal(0.25), vocab_start=inputs.one_of(0, 7, 186240), valid=_valid),
    configs=(1,),
    shapes=[dict(M=m, V=v, K=2560) for v in (62080, 248320) for m in (1, 5, 40, 64)],
    flops=lambda d: 2 * d["M"] * d["V"] * d["K"],
)
