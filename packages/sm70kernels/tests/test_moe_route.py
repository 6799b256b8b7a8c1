import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels.backends import calls
from sm70kernels.op import ContractError
from sm70kernels.ops.moe_route import moe_route
from sm70kernels.testing import conforms, rows_independent

INF, NAN = math.inf, math.nan


def naive(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    ids, weights = torch.zeros(logits.shape[0], topk, dtype=torch.int32), torch.zeros(logits.shape[0], topk, dtype=torch.float64)
    for m, row in enumerate(logits.tolist()):
        best = sorted(range(len(row)), key=lambda i: (-row[i] if row[i] == row[i] else INF, i))[:topk]
        if any(math.isnan(v) or v == INF for v in row) or all(v == -INF for v in row):
            ids[m] = torch.arange(topk)
            continue
        ids[m] = torch.tensor(best)
        scale = [math.exp(row[i] - row[best[0]]) for i in best]
        weights[m] = torch.tensor([v / sum(scale) for v in scale], dtype=torch.float64)
    return ids, weights


def large(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    ids = logits.argsort(dim=1, descending=True, stable=True)[:, :topk]
    weights = logits.gather(1, ids).softmax(1)
    degenerate = ~(logits.max(1).values.abs() < INF) | logits.isnan().any(1)
    ids[degenerate] = torch.arange(topk, device=ids.device)
    weights[degenerate] = 0.0
    return ids.int(), weights


test_matches_naive = conforms(moe_route, naive, large=large)
test_matches_naive_at_the_models_size = conforms(moe_route, naive, examples=3, dims=dict(X=512, K=10))
test_rows = rows_independent(moe_route)


@pytest.mark.parametrize(
    ("row", "ids"),
    [
        ([5, 3, 3, 3, 1, 1], [0, 1, 2]),  # a tie across the cut: lower ids stay
        ([1, 1, 3, 3, 3, 3], [2, 3, 4]),
        ([2, 2, 2, 2, 2, 2], [0, 1, 2]),
        ([-0.0, 0.0, -0.0, 0.0, -1, -1], [0, 1, 2]),  # -0 equals +0
        ([-1, 0.0, -1, -0.0, 0.0, -0.0], [1, 3, 4]),
        ([-INF, 4, -INF, -INF, 2, -INF], [1, 4, 0]),
        ([1, NAN, 2, 3, 4, 5], [0, 1, 2]),
        ([1, 2, 3, 4, 5, INF], [0, 1, 2]),
        ([INF, NAN, -INF, 4, 5, 6], [0, 1, 2]),
        ([-INF] * 6, [0, 1, 2]),
    ],
)
@pytest.mark.parametrize(("dtype", "run"), [(torch.float32, moe_route), *((torch.float16, *run.values) for run in calls(moe_route))])
def test_order_and_degenerate_rows(row: list[float], ids: list[int], dtype: torch.dtype, run: Callable[..., tuple[Tensor, Tensor]]) -> None:
    logits = torch.cat([torch.randn(5, 6), torch.full((5, 2), -INF)], 1).to(dtype)
    logits[3, :6] = torch.tensor(row)
    got, weights = run(logits=logits, topk=3)
    expected = naive(logits, 3)
    assert got[3].tolist() == ids == expected[0][3].tolist()
    assert torch.allclose(weights.double(), expected[1], rtol=1e-6, atol=0)
    if not torch.isfinite(logits[3].float().max()):
        assert weights[3].tolist() == [0.0, 0.0, 0.0]


def test_kept_minus_infinity_weighs_exactly_nothing() -> None:
    _, weights = moe_route(torch.tensor([[-INF, 4, -INF, -INF, 2, -INF]]), 4)
    assert weights[0, 2:].tolist() == [0.0, 0.0]
    assert math.isclose(float(weights.sum()), 1.0, rel_tol=1e-6)


def test_weights_are_within_four_ulp() -> None:
    logits = torch.randint(-2048, 2049, (64, 40)) / 256  # differences of logits are exact
    _, weights = moe_route(logits, 8)
    truth = naive(logits.double(), 8)[1]
    assert ((weights.double() - truth).abs() <= 4 * 2.0**-23 * truth).all()
    assert torch.allclose(weights.sum(1), torch.ones(64), rtol=0, atol=1e-6)


def test_more_routes_than_experts_are_refused() -> None:
    with pytest.raises(ContractError, match=r"K <= min\(X, 32\) = 4"):
        moe_route(torch.zeros(2, 4), 5)
