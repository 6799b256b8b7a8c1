"""top1_merge against its definition: sort the shards' pairs by (NaN last, value descending, token ascending)."""

import itertools

import pytest
import torch
from torch import Tensor

from sm70kernels import top1_merge
from sm70kernels.testing import conforms, rows_independent, same_bits

NAN, INF = float("nan"), float("inf")


def naive(value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    best = value.new_zeros(value.shape[1])
    best_index = index.new_zeros(value.shape[1])
    for m in range(value.shape[1]):
        pairs = zip(value[:, m].tolist(), index[:, m].tolist(), strict=True)
        ranked = sorted(pairs, key=lambda pair: (pair[0] != pair[0], 0.0 if pair[0] != pair[0] else -pair[0], pair[1]))
        best[m], best_index[m] = ranked[0]
    return best, best_index


test_matches_naive = conforms(top1_merge, naive)
test_rows = rows_independent(top1_merge)


@pytest.mark.parametrize(
    ("pairs", "winner"),
    [
        ([(1.0, 5), (1.0, 3)], (1.0, 3)),
        ([(NAN, 0), (-INF, 9)], (-INF, 9)),
        ([(NAN, 40), (NAN, 20), (NAN, 60)], (NAN, 20)),
        ([(-0.0, 1), (0.0, 2)], (-0.0, 1)),
        ([(INF, 8), (INF, 7), (3.0, 1)], (INF, 7)),
    ],
)
def test_ties_and_nan_in_any_order_of_shards(pairs: list[tuple[float, int]], winner: tuple[float, int]) -> None:
    for order in itertools.permutations(pairs):
        value = torch.tensor([[pair[0]] for pair in order])
        index = torch.tensor([[pair[1]] for pair in order], dtype=torch.int32)
        best, best_index = top1_merge(value, index)
        assert same_bits(best, torch.tensor([winner[0]]))
        assert best_index.tolist() == [winner[1]]
