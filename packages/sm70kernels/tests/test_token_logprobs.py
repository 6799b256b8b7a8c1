import math

import pytest
import torch
from torch import Tensor

from sm70kernels.contract import ContractError
from sm70kernels.ops.token_logprobs import token_logprobs
from sm70kernels.testing import conforms, rows_independent, same_bits

INF = math.inf
FLOOR = -9999.0


def naive(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, vocabulary = logits.shape
    logprob, rank = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int32)
    ids, values = torch.zeros(count, k, dtype=torch.int32), torch.zeros(count, k, dtype=torch.float64)
    for m in range(count):
        z = logits[m].tolist()
        total = math.fsum(math.exp(x) for x in z)
        order = sorted(range(vocabulary), key=lambda v: (-z[v], v))
        logprob[m] = max(z[chosen[m]] - math.log(total), FLOOR)
        rank[m] = 1 + order.index(int(chosen[m]))
        for j in range(k):
            ids[m, j], values[m, j] = order[j], max(z[order[j]] - math.log(total), FLOOR)
    return logprob, rank, ids, values


test_matches_naive = conforms(token_logprobs, naive, examples=30, dtypes=(torch.float32,))
test_rows = rows_independent(token_logprobs)


def run(logits: list[float], chosen: int, k: int) -> tuple[float, int, list[int], list[float]]:
    logprob, rank, ids, values = token_logprobs(torch.tensor([logits]), torch.tensor([chosen], dtype=torch.int32), k)
    return float(logprob[0]), int(rank[0]), ids[0].tolist(), values[0].tolist()


def test_ties_go_to_the_lowest_ids() -> None:
    logits = [1.0, 2.0, 2.0, -0.0, 0.0, 2.0]
    for token, place in ((1, 1), (2, 2), (5, 3), (0, 4), (3, 5), (4, 6)):
        assert run(logits, token, 0)[1] == place
    for k in range(7):
        assert run(logits, 0, k)[2] == [1, 2, 5, 0, 3, 4][:k]


def test_what_cannot_come_has_the_floor_and_is_ordered_by_id() -> None:
    logprob, rank, ids, values = run([-INF, 0.0, math.nan, -INF, 0.0], 3, 5)
    assert (logprob, rank, ids) == (FLOOR, 5, [1, 4, 0, 2, 3])
    assert values == [pytest.approx(-math.log(2))] * 2 + [FLOOR] * 3
    assert run([0.0, -1e5], 1, 2) == (FLOOR, 2, [0, 1], [0.0, FLOOR])
    assert run([-INF, math.nan, -INF], 1, 3) == (FLOOR, 2, [0, 1, 2], [FLOOR] * 3)


def test_infinite_logits_share_the_mass() -> None:
    logprob, rank, ids, values = run([0.0, INF, -INF, INF], 3, 4)
    assert (rank, ids) == (2, [1, 3, 0, 2])
    assert [logprob, *values] == pytest.approx([-math.log(2)] * 3 + [FLOOR] * 2)


def test_large_logits_do_not_overflow_and_a_sure_token_has_zero() -> None:
    assert run([1000.0, 1000.0], 0, 0)[0] == pytest.approx(-math.log(2))
    assert run([-1000.0, -1000.0], 0, 0)[0] == pytest.approx(-math.log(2))
    assert run([500.0, 0.0], 0, 2) == (0.0, 1, [0, 1], [0.0, -500.0])


def test_k_of_many_are_the_first_k_of_all() -> None:
    """A vocabulary of the model's size, with ties at every cut, against one sort of all."""
    logits = torch.randn(2, 248_320, generator=torch.Generator().manual_seed(0)).mul(64).round() / 64
    chosen = torch.tensor([77, 248_319], dtype=torch.int32)
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices.int()
    expected = torch.log_softmax(logits.double(), 1)
    logprob, rank, ids, values = token_logprobs(logits, chosen, 248_320)
    assert torch.equal(ids, order)
    assert torch.equal(rank, 1 + (order == chosen[:, None]).int().argmax(1).int())
    torch.testing.assert_close(values.double(), expected.gather(1, order.long()), rtol=1e-6, atol=0)
    torch.testing.assert_close(logprob.double(), expected.gather(1, chosen[:, None].long())[:, 0], rtol=1e-6, atol=0)
    for k in (0, 1, 20, 5000):
        assert same_bits(token_logprobs(logits, chosen, k), (logprob, rank, ids[:, :k].contiguous(), values[:, :k].contiguous()))


def test_tokens_and_counts_that_do_not_exist_are_refused() -> None:
    for token in (-1, 3):
        with pytest.raises(ValueError, match=f"chosen 0: token {token}, but logits has V=3"):
            run([0.0, 1.0, 2.0], token, 1)
    with pytest.raises(ContractError, match="expected K <= V = 3, got K=4"):
        run([0.0, 1.0, 2.0], 0, 4)
