"""linear_prefill against its definition: y[m,n] = h(sum over k of x[m,k] * w[n,k])."""

import pytest
import torch
from torch import Tensor

from sm70kernels import linear_prefill
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def naive(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([(row * w).sum(1) for row in x]) if len(x) else x.new_zeros(0, len(w))


test_matches_naive = conforms(linear_prefill, naive, examples=5)
test_rows = rows_independent(linear_prefill)
test_rounding_points = rounds_as_stated(linear_prefill, naive, dict(M=20))


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 128])
def test_a_slice_cut_anywhere_gives_the_same_rows(cut: int) -> None:
    batch = linear_prefill.make({"M": 150, "N": 33, "K": 40}, seed=1)
    parts = [linear_prefill(part, batch["w"]) for part in (batch["x"][:cut], batch["x"][cut:])]
    assert same_bits(torch.cat(parts), linear_prefill(**batch))
