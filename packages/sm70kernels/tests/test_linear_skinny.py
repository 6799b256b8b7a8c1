"""linear_skinny against its definition: y[m,n] = h(sum over k of x[m,k] * w[n,k])."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels import linear_skinny
from sm70kernels.backends import calls
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def naive(x: Tensor, w: Tensor) -> Tensor:
    y = x.new_zeros(x.shape[0], w.shape[0])
    for m, row in enumerate(x.tolist()):
        for n, weights in enumerate(w.tolist()):
            y[m, n] = sum(a * b for a, b in zip(row, weights, strict=True))
    return y


def large(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


test_matches_naive = conforms(linear_skinny, naive, examples=4, large=large)
test_rows = rows_independent(linear_skinny)
test_rounding_points = rounds_as_stated(linear_skinny, naive, dict(M=20))


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 48, 64])
def test_every_row_count_of_decode_gives_a_row_the_same_bits(m: int) -> None:
    batch = linear_skinny.make({"M": 64, "N": 24, "K": 160}, seed=1, dtype=torch.float16)
    whole = linear_skinny(**batch)
    assert same_bits(linear_skinny(batch["x"][:m], batch["w"]), whole[:m])


@pytest.mark.parametrize("run", calls(linear_skinny))
def test_a_row_of_infinities_and_nan_leaves_the_others_alone(run: Callable[..., Tensor]) -> None:
    batch = linear_skinny.make({"M": 5, "N": 24, "K": 264}, seed=2, dtype=torch.float16)
    clean = run(**batch)
    x = batch["x"].clone()
    x[1] = float("nan")
    x[3] = float("inf")
    got = run(x=x, w=batch["w"])
    for row in (0, 2, 4):
        assert same_bits(got[row], clean[row])
    assert got[1].isnan().all()


@pytest.mark.parametrize("run", calls(linear_skinny))
def test_overflow_is_infinity_and_zero_weights_are_zero(run: Callable[..., Tensor]) -> None:
    x = torch.full((1, 16), 60000.0, dtype=torch.float16)
    w = torch.cat([torch.ones(1, 16), -torch.ones(1, 16), torch.zeros(22, 16)]).half()
    assert run(x=x, w=w).tolist() == [[float("inf"), float("-inf"), *[0.0] * 22]]


@pytest.mark.parametrize("run", calls(linear_skinny))
def test_rows_of_a_wider_matrix_are_read_in_place(run: Callable[..., Tensor]) -> None:
    batch = linear_skinny.make({"M": 9, "N": 33, "K": 16}, seed=4, dtype=torch.float16)
    wide = torch.full((9, 40), torch.nan).half()
    wide[:, 8:24] = batch["x"]
    assert same_bits(run(x=wide[:, 8:24], w=batch["w"]), run(**batch))


def test_every_share_of_the_sum_over_k_is_as_exact_whatever_the_rows() -> None:
    """Row counts around every tile, each with the bits of the row alone, under every configuration."""
    batch = linear_skinny.make({"M": 64, "N": 24, "K": 1032}, seed=5, dtype=torch.float16)
    for shares in linear_skinny.configs:
        whole, _ = linear_skinny.emulate(**batch, config=shares)
        for m in (1, 2, 3, 4, 5, 8, 9, 17):
            part, _ = linear_skinny.emulate(x=batch["x"][:m], w=batch["w"], config=shares)
            assert same_bits(part, whole[:m])
