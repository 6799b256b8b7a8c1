"""rms_norm against its definition: y = h(x / sqrt(mean of squares + eps) * gain)."""

import math

import pytest
import torch
from torch import Tensor

from sm70kernels import rms_norm
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def naive(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    y = torch.zeros_like(x)
    for m, row in enumerate(x.tolist()):
        scale = 1 / math.sqrt(sum(value * value for value in row) / len(row) + eps)
        for e, value in enumerate(row):
            gain = float(weight[e]) + (1.0 if unit_offset else 0.0)
            y[m, e] = value * scale * gain
    return y


test_matches_naive = conforms(rms_norm, naive)
test_rows = rows_independent(rms_norm)
test_rounding_points = rounds_as_stated(rms_norm, naive, dict(M=20))


def test_zero_rows_stay_zero_and_bad_rows_stay_alone() -> None:
    x = torch.randn(4, 24)
    clean = rms_norm(x, torch.ones(24), 1e-6, True)
    x[1] = 0.0
    x[2, 3] = float("inf")
    got = rms_norm(x, torch.ones(24), 1e-6, True)
    assert not got[1].any()
    assert got[2].isnan().any()
    assert same_bits(got[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("magnitude", [6e4, 6e-8])
def test_float16_extremes_are_normalised_in_float32(magnitude: float) -> None:
    x = torch.full((1, 24), magnitude).half()
    got = rms_norm(x, torch.zeros(24).half(), 0.0, True)
    assert torch.equal(got, torch.ones(1, 24).half())
