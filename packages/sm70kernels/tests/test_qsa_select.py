"""qsa_select against its definition: sort the visible blocks by (score descending, id ascending) and write the tokens down."""

import math

import pytest
import torch
from torch import Tensor

from sm70kernels import qsa_select
from sm70kernels.testing import conforms, rows_independent

NAN, INF = math.nan, math.inf


def naive(scores: Tensor, visible: Tensor, position: Tensor, topk: int, ratio: int) -> Tensor:
    width = topk * ratio + ratio - 1
    sel = torch.full((len(visible), width), -1, dtype=torch.int32)
    for m, last in enumerate(position.tolist()):
        if last < 0:
            continue
        blocks = range(int(visible[m]))
        if len(blocks) > topk:
            row = scores[m].tolist()
            blocks = sorted(blocks, key=lambda b: (math.isnan(row[b]), -row[b] if not math.isnan(row[b]) else 0.0, b))[:topk]  # type: ignore[assignment]
        tokens = [b * ratio + i for b in sorted(blocks) for i in range(ratio)]
        tokens += range(int(visible[m]) * ratio, last + 1)
        sel[m, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return sel


test_matches_naive = conforms(qsa_select, naive, examples=20, dtypes=(torch.float32,))
test_rows = rows_independent(qsa_select)


def select(row: list[float], position: int, topk: int, ratio: int = 1) -> list[int]:
    seen, last = (torch.tensor([value], dtype=torch.int32) for value in ((position + 1) // ratio, position))
    sel = qsa_select(torch.tensor([row]), seen, last, topk, ratio)
    return sel[0].tolist()


def test_ties_go_to_the_lowest_block() -> None:
    assert select([0.0] * 9, 8, 3) == [0, 1, 2]
    assert select([1.0, 2.0, 1.0, 3.0, 1.0], 4, 3) == [0, 1, 3]
    assert select([0.0, -0.0, 0.0, -0.0], 3, 2) == [0, 1]
    assert select([-0.0, 0.0, 1.0, 0.0], 3, 2) == [0, 2]


def test_infinities_and_nan_have_a_place_in_the_order() -> None:
    assert select([NAN, -INF, -3.4e38, NAN, INF], 4, 2) == [2, 4]
    assert select([NAN, -INF, -3.4e38, NAN, INF], 4, 3) == [1, 2, 4]
    assert select([NAN, -INF, -3.4e38, NAN, INF], 4, 4) == [0, 1, 2, 4]
    assert select([NAN] * 4, 3, 2) == [0, 1]


def test_unseen_blocks_never_count_whatever_their_score() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, 9.0, 9.0], [0.0, NAN, 1.0, NAN, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    seen = torch.tensor([3, 3, 5], dtype=torch.int32)
    assert qsa_select(scores, seen, seen - 1, 2, 1).tolist() == [[1, 2], [0, 2], [0, 1]]


def test_the_tail_follows_the_blocks() -> None:
    row = [1.0, 5.0, 3.0]
    assert select(row, 11, 2, 4) == [4, 5, 6, 7, 8, 9, 10, 11, -1, -1, -1]
    assert select(row, 12, 2, 4) == [4, 5, 6, 7, 8, 9, 10, 11, 12, -1, -1]
    assert select(row, 14, 2, 4) == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert select([5.0, 4.0, 0.0], 11, 2, 4) == [0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1]  # the row's own block is not chosen


def test_few_blocks_are_all_taken_whatever_the_scores() -> None:
    assert select([NAN, -INF], 6, 2, 3) == [0, 1, 2, 3, 4, 5, 6, -1]
    assert select([], 1, 2, 3) == [0, 1] + [-1] * 6
    few, many = 8, 40  # also beside a row that has to choose
    scores = torch.randn(3, 40)
    scores[0, :few] = NAN
    visible = torch.tensor([few, many, 0], dtype=torch.int32)
    got = qsa_select(scores, visible, visible * 4 - 1, 8, 4)
    assert got[0].tolist() == [*range(32), -1, -1, -1]
    assert got[2].tolist() == [-1] * 35


def test_padding_rows_select_nothing() -> None:
    got = qsa_select(torch.zeros(2, 9), torch.tensor([9, 9], dtype=torch.int32), torch.tensor([-1, 8], dtype=torch.int32), 4, 1)
    assert got.tolist() == [[-1] * 4, [0, 1, 2, 3]]


@pytest.mark.parametrize("visible", [511, 512, 513, 2000])
def test_the_model_sizes(visible: int) -> None:
    scores = torch.randn(1, visible).clamp_min(0)
    seen, last = torch.tensor([visible], dtype=torch.int32), torch.tensor([visible * 4 + 2], dtype=torch.int32)
    got = qsa_select(scores, seen, last, 512, 4)
    assert got.shape == (1, 2051)
    assert torch.equal(got, naive(scores, seen, last, 512, 4))


def test_missing_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="a row sees 9 blocks, scores has 4"):
        select([0.0] * 4, 8, 2)
