import pytest
import torch
from torch import Tensor

from sm70kernels.ops.greedy_verify import greedy_verify
from sm70kernels.testing import conforms, rows_independent


def naive(target: Tensor, draft: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    tokens, count = torch.full_like(target, -1), torch.zeros_like(rows)
    for i in range(rows.shape[0]):
        for t in range(int(rows[i])):
            tokens[i, t] = target[i, t]
            count[i] += 1
            if draft[i, t] != target[i, t]:
                break
    return tokens, count


test_matches_naive = conforms(greedy_verify, naive, examples=60, dtypes=(torch.float32,))
test_rows = rows_independent(greedy_verify, "N")


def vector(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_all_none_and_some_accepted_without_drafts_and_without_rows() -> None:
    target = torch.tensor([[5, 6, 7]] * 6, dtype=torch.int32)
    draft = torch.tensor([[5, 6, -1], [4, 6, -1], [5, 4, -1], [-1, -1, -1], [5, 6, 7], [5, 6, 7]], dtype=torch.int32)
    tokens, count = greedy_verify(target, draft, vector(3, 3, 3, 3, 2, 0))
    assert count.tolist() == [3, 1, 2, 1, 2, 0]
    assert tokens.tolist() == [[5, 6, 7], [5, -1, -1], [5, 6, -1], [5, -1, -1], [5, 6, -1], [-1, -1, -1]]


def test_one_row_is_plain_decoding() -> None:
    tokens, count = greedy_verify(vector(3, 0).view(2, 1), vector(-1, -1).view(2, 1), vector(1, 1))
    assert tokens.tolist() == [[3], [0]]
    assert count.tolist() == [1, 1]


def test_more_rows_than_there_are_is_refused() -> None:
    target = torch.tensor([[5, 6]], dtype=torch.int32)
    with pytest.raises(ValueError, match="3 valid rows of a request that has 2"):
        greedy_verify(target, target.clone(), torch.tensor([3], dtype=torch.int32))
