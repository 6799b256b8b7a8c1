from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels.op import ContractError
from sm70kernels.ops.hyper_inject import hyper_inject
from sm70kernels.ops.hyper_norm import hyper_norm
from sm70kernels.testing import DTYPES, conforms, rounds_as_stated, rows_independent, same_bits


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


test_matches_naive = conforms(hyper_inject, naive)
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


def test_float16_rounds_the_sum_once() -> None:
    # 2048 + 1.0002 lies above the middle of 2048 and 2050; the product rounded first is 1, a tie that goes to 2048.
    h = torch.full((1, 1, 2), 2048.0, dtype=torch.float16)
    hyper_inject(h, torch.ones(1, 2, dtype=torch.float16), torch.tensor([[1.0002]]), None, 1e-6)
    assert torch.tensor(1.0002).half() == 1
    assert h.flatten().tolist() == [2050.0, 2050.0]


def test_an_infinite_row_touches_no_other_row() -> None:
    h, o, gate, weight = torch.randn(9, 4, 24), torch.randn(9, 24), torch.rand(9, 4), torch.randn(4, 24)
    other, o_inf = h.clone(), o.clone()
    o_inf[4, 3] = torch.inf
    clean, dirty = hyper_inject(h, o, gate, weight, 1e-6), hyper_inject(other, o_inf, gate, weight, 1e-6)
    assert clean is not None
    assert dirty is not None
    assert not torch.isfinite(other[4]).all()
    other[4], dirty[4] = h[4], clean[4]
    assert same_bits((h, clean), (other, dirty))


def test_a_norm_output_without_a_weight_is_refused() -> None:
    h = torch.randn(2, 4, 24)
    with pytest.raises(ContractError, match="weight"):
        hyper_inject(h, torch.randn(2, 24), torch.rand(2, 4), None, 1e-6, torch.empty_like(h))
