"""lm_head_top1 against its definition: scan tokens upwards, take over only on a strictly larger logit."""

import torch
from torch import Tensor

from sm70kernels import lm_head_logits, lm_head_top1
from sm70kernels.testing import conforms, rows_independent

NAN, INF = float("nan"), float("inf")


def naive(x: Tensor, w: Tensor, vocab_start: int, valid: int) -> tuple[Tensor, Tensor]:
    values, tokens = [], []
    for m in range(x.shape[0]):
        value, token = NAN, vocab_start
        for v, logit in enumerate((x[m] * w[:valid]).sum(1).tolist()):
            if logit > value or (value != value and logit == logit):
                value, token = logit, vocab_start + v
        values.append(value)
        tokens.append(token)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(tokens, dtype=torch.int32)


test_matches_naive = conforms(lm_head_top1, naive, examples=6)
test_rows = rows_independent(lm_head_top1)


def top1(logits: list[float], valid: int | None = None, vocab_start: int = 100) -> tuple[float, int]:
    """Run the op on given logits: x is 1 in one place, and the weights there are the logits."""
    w = torch.zeros(len(logits), 16)
    w[:, 0] = torch.tensor(logits)
    value, index = lm_head_top1(torch.eye(1, 16), w, vocab_start, len(logits) if valid is None else valid)
    return float(value), int(index)


def test_ties_go_to_the_lowest_token() -> None:
    assert top1([1.0, 5.0, 3.0, 5.0, 5.0]) == (5.0, 101)
    assert top1([-0.0, 0.0, 0.0]) == (0.0, 100)
    assert top1([2.0] * 40) == (2.0, 100)


def test_nan_never_wins() -> None:
    assert top1([NAN, -3.0, NAN, -2.0]) == (-2.0, 103)
    assert top1([NAN, -INF]) == (-INF, 101)
    assert top1([-INF, -INF]) == (-INF, 100)


def test_a_row_without_candidates_is_nan_at_vocab_start() -> None:
    value, index = top1([NAN, NAN, NAN])
    assert value != value
    assert index == 100
    value, index = top1([1.0, 2.0], valid=0)
    assert value != value
    assert index == 100


def test_padding_rows_never_win() -> None:
    assert top1([1.0, 2.0, 9.0, 9.0], valid=2) == (2.0, 101)
    assert top1([-1.0, -2.0, 0.0, 0.0], valid=2) == (-1.0, 100)


def test_value_is_the_logit_of_lm_head_logits() -> None:
    batch = lm_head_top1.make({"M": 9, "V": 50, "K": 40}, dtype=torch.float16) | {"valid": 50, "vocab_start": 0}
    value, index = lm_head_top1(**batch)
    logits = lm_head_logits(batch["x"], batch["w"])
    assert torch.equal(value, logits.gather(1, index.long()[:, None])[:, 0])
