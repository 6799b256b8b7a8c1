"""qsa_localize against its definition: walk the selection, keep what the rank owns."""

import pytest
import torch
from torch import Tensor

from sm70kernels import qsa_localize
from sm70kernels.testing import conforms, rows_independent


def naive(sel: Tensor, rank: int, world: int) -> Tensor:
    local = torch.full_like(sel, -1)
    for m, row in enumerate(sel.tolist()):
        kept = [token // world for token in row if token >= 0 and token % world == rank]
        for column, token in enumerate(kept):
            local[m, column] = token
    return local


test_matches_naive = conforms(qsa_localize, naive, dtypes=(torch.float32,))
test_rows = rows_independent(qsa_localize)


def localize(row: list[int], rank: int, world: int) -> list[int]:
    return qsa_localize(torch.tensor([row], dtype=torch.int32), rank, world)[0].tolist()


def test_one_rank_only_closes_the_holes() -> None:
    assert localize([-1, 3, -1, 4, 9, -1], 0, 1) == [3, 4, 9, -1, -1, -1]


def test_a_rank_may_hold_nothing() -> None:
    assert localize([0, 1, 2, -1], 3, 4) == [-1] * 4
    assert localize([0, 1], 15, 16) == [-1] * 2
    assert localize([], 0, 2) == []


@pytest.mark.parametrize("world", [1, 2, 4, 16])
def test_the_ranks_together_hold_the_selection(world: int) -> None:
    sel = torch.randperm(500)[:70].sort().values.int().tolist()
    tokens = [t * world + rank for rank in range(world) for t in localize(sel, rank, world) if t >= 0]
    assert sorted(tokens) == sel


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        localize([1], 2, 2)
