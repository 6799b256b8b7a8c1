from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels.backends import calls
from sm70kernels.op import ContractError
from sm70kernels.ops.hyper_inject import hyper_inject
from sm70kernels.ops.hyper_norm import hyper_norm
from sm70kernels.testing import DTYPES, conforms, rounds_as_stated, rows_independent, same_bits
from sm70kernels.yardstick import clone, expect, judge, outputs


def naive(
    state: Tensor, o: Tensor, gate: Tensor, weight: Tensor | None, eps: float, h: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor | None:
    m, streams, hidden = state.shape
    n = torch.empty_like(state)
    for row in range(m):
        for s in range(streams):
            state[row, s] = h(state[row, s] + gate[row, s] * o[row])
            if weight is not None:
                mean = sum(v * v for v in state[row, s].tolist()) / hidden
                n[row, s] = state[row, s] / (mean + eps) ** 0.5 * (1 + weight[s])
    return None if weight is None else n


def large(
    state: Tensor, o: Tensor, gate: Tensor, weight: Tensor | None, eps: float, h: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor | None:
    state.copy_(h(state + gate[:, :, None] * o[:, None]))
    return None if weight is None else state / (state.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight)


test_matches_naive = conforms(hyper_inject, naive, large=large)
test_rows = rows_independent(hyper_inject)
test_rounding_points = rounds_as_stated(hyper_inject, naive, dict(M=20))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_norm_has_the_bits_of_inject_then_norm(dtype: torch.dtype) -> None:
    h, o, weight = (torch.randn(shape).to(dtype) for shape in ((19, 4, 40), (19, 40), (4, 40)))
    gate = torch.rand(19, 4) * 2
    other = h.clone()
    n = hyper_inject(h, o, gate, weight, 1e-6)
    assert hyper_inject(other, o, gate, None, 1e-6) is None
    assert same_bits((h, n), (other, hyper_norm(other, weight, 1e-6)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_block_output_leaves_the_state_as_it_is(dtype: torch.dtype) -> None:
    h = torch.randn(6, 4, 24).to(dtype)
    before = h.clone()
    hyper_inject(h, torch.zeros(6, 24, dtype=dtype), torch.rand(6, 4), None, 1e-6)
    assert torch.equal(h, before)


@pytest.mark.parametrize("run", calls(hyper_inject))
def test_float16_rounds_the_sum_once(run: Callable[..., None]) -> None:
    # 2048 + 1.0002 lies above the middle of 2048 and 2050; the product rounded first is 1, a tie that goes to 2048.
    h = torch.full((1, 1, 24), 2048.0, dtype=torch.float16)
    run(h=h, o=torch.ones(1, 24, dtype=torch.float16), gate=torch.tensor([[1.0002]]), weight=None, eps=1e-6)
    assert torch.tensor(1.0002).half() == 1
    assert h.flatten().tolist() == [2050.0] * 24


@pytest.mark.parametrize("run", calls(hyper_inject))
def test_a_sum_beyond_float16_becomes_infinity_and_its_norm_nan(run: Callable[..., Tensor]) -> None:
    h, o = torch.full((2, 4, 24), 60000.0).half(), torch.full((2, 24), 60000.0).half()
    o[1] = 0.0
    n = run(h=h, o=o, gate=torch.ones(2, 4), weight=torch.zeros(4, 24).half(), eps=1e-6)
    assert h[0].isinf().all()
    assert n[0].isnan().all()
    assert torch.equal(n[1], torch.ones(4, 24).half())


@pytest.mark.parametrize("streams", hyper_inject.configs)
@pytest.mark.parametrize("e", [24, 264, 2560])
def test_the_fused_kernel_has_the_bits_of_two_kernels_however_many_streams_a_block_takes(streams: int, e: int) -> None:
    fused = hyper_inject.make(dict(M=5, S=4, E=e), seed=e, dtype=torch.float16) | dict(weight=torch.randn(4, e).half())
    apart = clone(fused)
    n, _ = hyper_inject.emulate(**fused, config=streams, order=3)
    hyper_inject.emulate(**(apart | dict(weight=None)))
    expected, _ = hyper_norm.emulate(h=apart["h"], weight=apart["weight"], eps=apart["eps"])
    assert same_bits((fused["h"], n), (apart["h"], expected))


@pytest.mark.parametrize("streams", hyper_inject.configs)
def test_the_kernel_at_the_model_s_streams_reads_every_byte_once(streams: int) -> None:
    arguments = hyper_inject.make(dict(M=3), seed=4, dtype=torch.float16) | dict(weight=torch.randn(4, 2560).half())
    given = clone(arguments)
    n, (counters,) = hyper_inject.emulate(**given, config=streams)
    expected = expect(hyper_inject, large, arguments, torch.float16)
    judge(hyper_inject, expected, outputs(hyper_inject, given, n))
    assert torch.equal(given["h"], expected.truth["h"].half())  # fused and rounded to nearest, as exact sums would be
    state, o = 3 * 4 * 2560 * 2, 3 * 2560 * 2
    assert counters.global_bytes_read == state + o + 4 * 2560 * 2 + 3 * 4 * 4
    assert counters.global_bytes_written == 2 * state
    gates = 3 * 4 * 10 * 32  # a sector for each of the 10 warps
    assert 32 * sum(site.sectors for site in counters.sites) == 4 * state + o * (4 // streams) + gates  # state in and out, weights, norm


@pytest.mark.parametrize("run", calls(hyper_inject))
def test_an_infinite_row_touches_no_other_row(run: Callable[..., Tensor]) -> None:
    h, o, gate, weight = torch.randn(9, 4, 24).half(), torch.randn(9, 24).half(), torch.rand(9, 4), torch.randn(4, 24).half()
    other, o_inf = h.clone(), o.clone()
    o_inf[4, 3] = torch.inf
    rest = dict(gate=gate, weight=weight, eps=1e-6)
    clean, dirty = run(h=h, o=o, **rest), run(h=other, o=o_inf, **rest)
    assert clean is not None
    assert dirty is not None
    assert not torch.isfinite(other[4]).all()
    other[4], dirty[4] = h[4], clean[4]
    assert same_bits((h, clean), (other, dirty))


def test_a_norm_output_without_a_weight_is_refused() -> None:
    h = torch.randn(2, 4, 24)
    with pytest.raises(ContractError, match="weight"):
        hyper_inject(h, torch.randn(2, 24), torch.rand(2, 4), None, 1e-6, torch.empty_like(h))
