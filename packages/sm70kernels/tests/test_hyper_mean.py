from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels.backends import calls
from sm70kernels.ops.hyper_mean import hyper_mean
from sm70kernels.streams import fold
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits
from sm70kernels.yardstick import expect, judge


def naive(state: Tensor) -> Tensor:
    mean = torch.empty(state.shape[0], state.shape[2], dtype=torch.float64)
    for m in range(state.shape[0]):
        for i in range(state.shape[2]):
            mean[m, i] = sum(state[m, :, i].tolist()) / state.shape[1]
    return mean


def large(state: Tensor) -> Tensor:
    return state.mean(1)


test_matches_naive = conforms(hyper_mean, naive, large=large)
test_rows = rows_independent(hyper_mean)
test_rounding_points = rounds_as_stated(hyper_mean, naive, dict(M=20))


def test_streams_are_added_in_ascending_order_whatever_the_shape() -> None:
    for streams in range(1, 12):
        for hidden in (1, 7, 16, 33, 64, 320):
            for m in (1, 2, 5, 17, 64):
                x = torch.randn(m, streams, hidden)
                expected = torch.zeros(m, hidden)
                for s in range(streams):
                    expected = expected + x[:, s]
                assert same_bits(torch.from_numpy(fold(x.numpy())), expected), (m, streams, hidden)


@pytest.mark.parametrize("run", calls(hyper_mean))
def test_float16_streams_are_summed_in_float32(run: Callable[..., Tensor]) -> None:
    h = torch.tensor([60000.0, 60000.0, -60000.0, -59904.0], dtype=torch.float16).view(1, 4, 1).repeat(3, 1, 24)
    assert run(h=h).eq(24.0).all()


@pytest.mark.parametrize("run", calls(hyper_mean))
def test_an_infinity_stays_in_its_place(run: Callable[..., Tensor]) -> None:
    h = torch.randn(5, 4, 64).half()
    clean = run(h=h)
    h[2, 1, 7], h[2, 3, 8] = torch.inf, torch.nan
    got = run(h=h)
    assert got[2, 7].isinf()
    assert got[2, 8].isnan()
    got[2, 7:9] = clean[2, 7:9]
    assert same_bits(got, clean)


@pytest.mark.parametrize("config", hyper_mean.configs)
def test_the_kernel_at_the_model_s_streams_has_the_reference_s_bits_and_reads_every_byte_once(config: int) -> None:
    arguments = hyper_mean.make(dict(M=3), seed=3, dtype=torch.float16)
    mean, (counters,) = hyper_mean.emulate(**arguments, config=config, order=2)
    judge(hyper_mean, expect(hyper_mean, large, arguments, torch.float16), {"mean": mean})
    assert same_bits(mean, hyper_mean(**arguments))  # sums and the quotient are IEEE's, in one order
    assert counters.global_bytes_read == 3 * 4 * 2560 * 2
    assert 32 * sum(site.sectors for site in counters.sites) == 3 * 5 * 2560 * 2
