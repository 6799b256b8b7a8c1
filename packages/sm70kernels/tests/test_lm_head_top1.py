"""lm_head_top1 against its definition: scan tokens upwards, take over only on a strictly larger logit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import lm_head_logits, lm_head_top1
from sm70kernels.backends import calls
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


def large(x: Tensor, w: Tensor, vocab_start: int, valid: int) -> tuple[Tensor, Tensor]:
    logits = x @ w[:valid].T
    if valid == 0:
        return torch.full((len(x),), NAN, dtype=torch.float64), torch.full((len(x),), vocab_start, dtype=torch.int32)
    value = logits.max(1).values
    token = (logits == value[:, None]).double().argmax(1) + vocab_start
    return value, token.int()


test_matches_naive = conforms(lm_head_top1, naive, examples=6, large=large, also=[dict(M=20, V=v, K=40) for v in (8000, 9000)])
test_rows = rows_independent(lm_head_top1)


Top1 = Callable[..., tuple[float, int]]


@pytest.fixture(params=calls(lm_head_top1))
def top1(request: pytest.FixtureRequest) -> Top1:
    """Run the op on given logits: x is 1 in one place, and the weights there are the logits."""

    def run(logits: list[float], valid: int | None = None, vocab_start: int = 100) -> tuple[float, int]:
        padded = [*logits, *[NAN] * (50 - len(logits))]
        w = torch.zeros(50, 40).half()
        w[:, 0] = torch.tensor(padded)
        given: dict[str, Any] = dict(vocab_start=vocab_start, valid=len(logits) if valid is None else valid)
        value, index = request.param(x=torch.eye(1, 40).half(), w=w, **given)
        return float(value), int(index)

    return run


def test_ties_go_to_the_lowest_token(top1: Top1) -> None:
    assert top1([1.0, 5.0, 3.0, 5.0, 5.0]) == (5.0, 101)
    assert top1([-0.0, 0.0, 0.0]) == (0.0, 100)
    assert top1([2.0] * 40) == (2.0, 100)


def test_nan_never_wins(top1: Top1) -> None:
    assert top1([NAN, -3.0, NAN, -2.0]) == (-2.0, 103)
    assert top1([NAN, -INF]) == (-INF, 101)
    assert top1([-INF, -INF]) == (-INF, 100)


def test_a_row_without_candidates_is_nan_at_vocab_start(top1: Top1) -> None:
    value, index = top1([NAN, NAN, NAN])
    assert value != value
    assert index == 100
    value, index = top1([1.0, 2.0], valid=0)
    assert value != value
    assert index == 100


def test_padding_rows_never_win(top1: Top1) -> None:
    assert top1([1.0, 2.0, 9.0, 9.0], valid=2) == (2.0, 101)
    assert top1([-1.0, -2.0, 0.0, 0.0], valid=2) == (-1.0, 100)


def test_value_is_the_logit_of_lm_head_logits() -> None:
    batch = lm_head_top1.make({"M": 9, "V": 50, "K": 40}, dtype=torch.float16) | {"valid": 50, "vocab_start": 0}
    value, index = lm_head_top1(**batch)
    logits = lm_head_logits(batch["x"], batch["w"])
    assert torch.equal(value, logits.gather(1, index.long()[:, None])[:, 0])
