"""linear_skinny against its definition: y[m,n] = h(sum over k of x[m,k] * w[n,k])."""

import pytest
import torch
from torch import Tensor

from sm70kernels import linear_skinny
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def naive(x: Tensor, w: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], w.shape[0])
    for m, row in enumerate(x.tolist()):
        for n, weights in enumerate(w.tolist()):
            y[m, n] = sum(a * b for a, b in zip(row, weights, strict=True))
    return y


test_matches_naive = conforms(linear_skinny, naive, examples=4)
test_rows = rows_independent(linear_skinny)
test_rounding_points = rounds_as_stated(linear_skinny, naive, dict(M=20))


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 48, 64])
def test_every_row_count_of_decode_gives_a_row_the_same_bits(m: int) -> None:
    batch = linear_skinny.make({"M": 64, "N": 24, "K": 160}, seed=1, dtype=torch.float16)
    whole = linear_skinny(**batch)
    assert same_bits(linear_skinny(batch["x"][:m], batch["w"]), whole[:m])


def test_a_row_of_infinities_and_nan_leaves_the_others_alone() -> None:
    batch = linear_skinny.make({"M": 5, "N": 24, "K": 40}, seed=2)
    clean = linear_skinny(**batch)
    x = batch["x"].clone()
    x[1] = float("nan")
    x[3] = float("inf")
    got = linear_skinny(x, batch["w"])
    for row in (0, 2, 4):
        assert same_bits(got[row], clean[row])
    assert got[1].isnan().all()


def test_overflow_is_infinity_and_zero_weights_are_zero() -> None:
    x = torch.full((1, 40), 60000.0, dtype=torch.float16)
    w = torch.stack([torch.ones(40), -torch.ones(40), torch.zeros(40)]).half()
    assert linear_skinny(x, w).tolist() == [[float("inf"), float("-inf"), 0.0]]
