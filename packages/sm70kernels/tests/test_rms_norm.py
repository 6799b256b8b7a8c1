"""rms_norm against its definition: y = h(x / sqrt(mean of squares + eps) * gain)."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels import rms_norm
from sm70kernels.backends import calls
from sm70kernels.op import ContractError
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits
from sm70kernels.yardstick import expect, judge


def naive(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    y = torch.zeros_like(x)
    for m, row in enumerate(x.tolist()):
        scale = 1 / math.sqrt(sum(value * value for value in row) / len(row) + eps)
        for e, value in enumerate(row):
            gain = float(weight[e]) + (1.0 if unit_offset else 0.0)
            y[m, e] = value * scale * gain
    return y


def large(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + (1.0 if unit_offset else 0.0))


test_matches_naive = conforms(rms_norm, naive, large=large)
test_rows = rows_independent(rms_norm)
test_rounding_points = rounds_as_stated(rms_norm, naive, dict(M=20))


@pytest.mark.parametrize("run", calls(rms_norm))
def test_zero_rows_stay_zero_and_bad_rows_stay_alone(run: Callable[..., Tensor]) -> None:
    x, weight = torch.randn(4, 264).half(), torch.ones(264).half()
    clean = run(x=x, weight=weight, eps=1e-6, unit_offset=True)
    x[1] = 0.0
    x[2, 3] = float("inf")
    got = run(x=x, weight=weight, eps=1e-6, unit_offset=True)
    assert not got[1].any()
    assert got[2].isnan().any()
    assert same_bits(got[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("run", calls(rms_norm))
@pytest.mark.parametrize("magnitude", [6e4, 6e-8])
def test_float16_extremes_are_normalised_in_float32(magnitude: float, run: Callable[..., Tensor]) -> None:
    x = torch.full((1, 64), magnitude).half()
    got = run(x=x, weight=torch.zeros(64).half(), eps=0.0, unit_offset=True)
    assert torch.equal(got, torch.ones(1, 64).half())


@pytest.mark.parametrize("e", [2560, 10240])
def test_the_kernel_at_the_model_s_rows_reads_every_byte_once(e: int) -> None:
    arguments = rms_norm.make(dict(M=3, E=e), seed=1, dtype=torch.float16)
    out, (counters,) = rms_norm.emulate(**arguments)
    expected = expect(rms_norm, large, arguments, torch.float16)
    judge(rms_norm, expected, {"out": out})
    assert (out == expected.truth["out"].half()).double().mean() > 0.99  # to nearest: a truncation would move half of them
    rows = 3 * e * 2
    assert counters.global_bytes_read == rows + e * 2
    assert counters.global_bytes_written == rows
    # Weights are read once a row; everything else once.
    assert 32 * sum(site.sectors for site in counters.sites) == 3 * rows


def test_the_kernel_refuses_a_row_that_is_not_aligned() -> None:
    x = torch.randn(65).half()[1:].view(1, 64)
    with pytest.raises(ContractError, match="x: expected an address that is a multiple of 16"):
        rms_norm.emulate(x=x, weight=torch.ones(64).half(), eps=1e-6, unit_offset=False)
