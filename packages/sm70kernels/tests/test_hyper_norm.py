import torch
from torch import Tensor

from sm70kernels.ops.hyper_norm import hyper_norm
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def naive(state: Tensor, weight: Tensor, eps: float) -> Tensor:
    n = torch.empty_like(state)
    for m in range(state.shape[0]):
        for s in range(state.shape[1]):
            stream = state[m, s].tolist()
            mean = sum(x * x for x in stream) / len(stream)
            for i, x in enumerate(stream):
                n[m, s, i] = x / (mean + eps) ** 0.5 * (1 + float(weight[s, i]))
    return n


test_matches_naive = conforms(hyper_norm, naive)
test_rows = rows_independent(hyper_norm)
test_rounding_points = rounds_as_stated(hyper_norm, naive, dict(M=20))


def test_a_zero_stream_stays_zero_and_its_neighbours_are_normed() -> None:
    h = torch.randn(3, 4, 24)
    h[1, 2] = 0.0
    n = hyper_norm(h, torch.zeros(4, 24), 1e-6)
    assert torch.equal(n[1, 2], torch.zeros(24))
    assert torch.allclose(n[1, 3].square().mean(), torch.tensor(1.0), atol=1e-4)


def test_an_infinite_stream_touches_no_other_stream() -> None:
    h, weight = torch.randn(5, 4, 24), torch.randn(4, 24)
    clean = hyper_norm(h, weight, 1e-6)
    h[2, 1, 7] = torch.inf
    n = hyper_norm(h, weight, 1e-6)
    assert torch.isnan(n[2, 1, 7])
    n[2, 1] = clean[2, 1]
    assert same_bits(n, clean)
