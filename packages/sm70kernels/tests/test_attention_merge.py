"""attention_merge against its definition: a weighted mean over the ranks that have tokens."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels import attention_merge
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def naive(parts: Tensor, lse: Tensor, gate: Tensor | None, dtype: str, h: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    ranks, rows, heads, d = parts.shape
    out = torch.zeros(rows, heads, d, dtype=torch.float64)
    for m in range(rows):
        for j in range(heads):
            held = [r for r in range(ranks) if lse[r, m, j] != -math.inf]
            if held:
                top = max(float(lse[r, m, j]) for r in held)
                weights = [2.0 ** (float(lse[r, m, j]) - top) for r in held]
                mean = sum(w * parts[r, m, j] for w, r in zip(weights, held, strict=True)) / sum(weights)
                out[m, j] = h(mean) if dtype == "f16" else mean
            if gate is not None:
                out[m, j] *= 1 / (1 + torch.exp(-gate[m, j]))
    return out


test_matches_naive = conforms(attention_merge, naive)
test_rounding_points = rounds_as_stated(attention_merge, naive, dict(M=20))
test_rows = rows_independent(attention_merge)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("holder", [0, 1, 2])
def test_the_only_rank_with_tokens_passes_through_bit_for_bit(holder: int, dtype: str) -> None:
    parts, lse = torch.full((3, 2, 2, 5), math.nan), torch.full((3, 2, 2), -math.inf)
    parts[holder], lse[holder] = torch.randn(2, 2, 5), torch.randn(2, 2) * 100
    parts[holder, 0, 0, :3] = torch.tensor([-0.0, 1e-45, -3e38])
    got = attention_merge(parts, lse, None, dtype)
    assert same_bits(got, parts[holder].to(got.dtype))


def test_no_tokens_anywhere_is_zero() -> None:
    gate = torch.randn(3, 1, 4)
    got = attention_merge(torch.full((2, 3, 1, 4), math.nan), torch.full((2, 3, 1), -math.inf), gate, "f32")
    assert same_bits(got, torch.zeros(3, 1, 4))


def test_far_apart_log_sums_do_not_overflow() -> None:
    parts = torch.stack([torch.ones(1, 1, 4), torch.full((1, 1, 4), 2.0)])
    for low, high in ((-300.0, 300.0), (5.0, 3e4)):
        assert attention_merge(parts, torch.tensor([[[low]], [[high]]]), None, "f32").eq(2.0).all()
        assert attention_merge(parts, torch.tensor([[[high]], [[low]]]), None, "f32").eq(1.0).all()


def test_nan_stays_in_its_row_and_head() -> None:
    parts, lse = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2)
    clean = attention_merge(parts, lse, None, "f32")
    parts[1, 1, 0] = math.nan
    got = attention_merge(parts, lse, None, "f32")
    assert got[1, 0].isnan().all()
    got[1, 0] = clean[1, 0]
    assert same_bits(got, clean)


def test_ranks_are_added_in_ascending_order() -> None:
    parts = torch.tensor([1.0, 2.0**-24, 2.0**-24]).view(3, 1, 1, 1)
    lse = torch.zeros(3, 1, 1)
    ascending = (torch.tensor(1.0) + 2.0**-24 + 2.0**-24) / 3  # the small ones vanish one by one
    assert same_bits(attention_merge(parts, lse, None, "f32").view(()), ascending)
    flipped = ((torch.tensor(2.0**-24) + 2.0**-24) + 1.0) / 3
    assert same_bits(attention_merge(parts.flip(0), lse, None, "f32").view(()), flipped)


def test_the_result_is_rounded_before_the_gate() -> None:
    parts, gate = torch.randn(1, 40, 4, 32), torch.randn(40, 4, 32).half()
    got = attention_merge(parts, torch.zeros(1, 40, 4), gate, "f16")
    sigmoid = torch.sigmoid(gate.double())
    rounded = (parts[0].half().double() * sigmoid).half()
    assert (got != rounded).float().mean() < 0.01  # float32 against float64 may differ in a rare last bit
    assert (got != (parts[0].double() * sigmoid).half()).float().mean() > 0.1
