from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels.backends import calls
from sm70kernels.ops.hyper_norm import hyper_norm
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits
from sm70kernels.yardstick import expect, judge


def naive(state: Tensor, weight: Tensor, eps: float) -> Tensor:
    n = torch.empty_like(state)
    for m in range(state.shape[0]):
        for s in range(state.shape[1]):
            stream = state[m, s].tolist()
            mean = sum(x * x for x in stream) / len(stream)
            for i, x in enumerate(stream):
                n[m, s, i] = x / (mean + eps) ** 0.5 * (1 + float(weight[s, i]))
    return n


def large(state: Tensor, weight: Tensor, eps: float) -> Tensor:
    return state / (state.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight)


test_matches_naive = conforms(hyper_norm, naive, large=large)
test_rows = rows_independent(hyper_norm)
test_rounding_points = rounds_as_stated(hyper_norm, naive, dict(M=20))


def test_a_zero_stream_stays_zero_and_its_neighbours_are_normed() -> None:
    h = torch.randn(3, 4, 24)
    h[1, 2] = 0.0
    n = hyper_norm(h, torch.zeros(4, 24), 1e-6)
    assert torch.equal(n[1, 2], torch.zeros(24))
    assert torch.allclose(n[1, 3].square().mean(), torch.tensor(1.0), atol=1e-4)


@pytest.mark.parametrize("run", calls(hyper_norm))
def test_an_infinite_stream_touches_no_other_stream(run: Callable[..., Tensor]) -> None:
    h, weight = torch.randn(5, 4, 264).half(), torch.randn(4, 264).half()
    clean = run(h=h, weight=weight, eps=1e-6)
    h[2, 1, 7] = torch.inf
    n = run(h=h, weight=weight, eps=1e-6)
    assert torch.isnan(n[2, 1, 7])
    n[2, 1] = clean[2, 1]
    assert same_bits(n, clean)


@pytest.mark.parametrize("run", calls(hyper_norm))
def test_a_zero_stream_stays_zero_and_the_largest_one_is_normed(run: Callable[..., Tensor]) -> None:
    h = torch.zeros(2, 4, 264).half()
    h[1, 3] = 60000.0
    n = run(h=h, weight=torch.zeros(4, 264).half(), eps=1e-6)
    assert torch.equal(n[1, 3], torch.ones(264).half())
    n[1, 3] = 0.0
    assert not n.any()


def test_the_kernel_at_the_model_s_streams_reads_every_byte_once() -> None:
    arguments = hyper_norm.make(dict(M=3), seed=2, dtype=torch.float16)
    n, (counters,) = hyper_norm.emulate(**arguments, order=1)
    expected = expect(hyper_norm, large, arguments, torch.float16)
    judge(hyper_norm, expected, {"n": n})
    assert (n == expected.truth["n"].half()).double().mean() > 0.99  # to nearest: a truncation would move half of them
    rows = 3 * 4 * 2560 * 2
    assert counters.global_bytes_read == rows + 4 * 2560 * 2
    assert counters.global_bytes_written == rows
    assert 32 * sum(site.sectors for site in counters.sites) == 3 * rows  # the weight is read once a row
