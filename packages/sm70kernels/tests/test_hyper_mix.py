from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels.ops.hyper_mix import hyper_mix
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def naive(n: Tensor, w_in: Tensor, w_up: Tensor, kind: str, h: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[Tensor, Tensor]:
    m, streams, hidden = n.shape
    rank = w_up.shape[1]
    x, gate = torch.zeros(m, hidden, dtype=torch.float64), torch.zeros(m, w_in.shape[0] - rank, dtype=torch.float64)
    for row in range(m):
        flat = n[row].reshape(-1)
        low = h((w_in * flat).sum(1)) / streams
        lora = h(low[:rank] * sigmoid(low[:rank]))
        for s in range(streams):
            up = h((w_up[s * hidden : (s + 1) * hidden] * lora).sum(1))
            x[row] += sigmoid(up) * n[row, s] / streams
        gate[row] = 2 * sigmoid(low[rank:])
    return x, gate


def large(n: Tensor, w_in: Tensor, w_up: Tensor, kind: str, h: Callable[[Tensor], Tensor] = lambda x: x) -> tuple[Tensor, Tensor]:
    (m, streams, hidden), rank = n.shape, w_up.shape[1]
    low = h(n.reshape(m, -1) @ w_in.T) / streams
    up = h(h(low[:, :rank] * sigmoid(low[:, :rank])) @ w_up.T).reshape(m, streams, hidden)
    return (sigmoid(up) * n).mean(1), 2 * sigmoid(low[:, rank:])


test_matches_naive = conforms(hyper_mix, naive, large=large)
test_rows = rows_independent(hyper_mix)
test_rounding_points = rounds_as_stated(hyper_mix, naive, dict(M=20))


def small(m: int, gates: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    w_in, w_up = torch.randn(8 + gates, 96, generator=generator), torch.randn(96, 8, generator=generator)
    return torch.randn(m, 4, 24, generator=generator), w_in / 10, w_up


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_rows_keep_their_bits_across_tiles(kind: str) -> None:
    n, w_in, w_up = small(130)
    x, gate = hyper_mix(n, w_in, w_up, kind)
    for row in (0, 15, 16, 63, 64, 129):
        assert same_bits(hyper_mix(n[row : row + 1], w_in, w_up, kind), (x[row : row + 1], gate[row : row + 1]))


def test_a_final_mixer_has_no_gates_and_the_same_input() -> None:
    n, w_in, w_up = small(5)
    x, gate = hyper_mix(n, w_in[:8].contiguous(), w_up, "decode")
    assert gate.shape == (5, 0)
    assert torch.allclose(x, hyper_mix(n, w_in, w_up, "decode")[0], atol=1e-6)


def test_zero_weights_give_a_quarter_of_the_stream_sum_over_two_and_gates_of_one() -> None:
    n, w_in, w_up = small(3)
    x, gate = hyper_mix(n, torch.zeros_like(w_in), torch.zeros_like(w_up), "decode")
    assert torch.allclose(x, n.sum(1) / 8)
    assert torch.equal(gate, torch.ones(3, 4))


def test_an_infinite_row_touches_no_other_row() -> None:
    n, w_in, w_up = small(16)
    clean = hyper_mix(n, w_in, w_up, "decode")
    n[9, 0, 0] = torch.inf
    dirty = hyper_mix(n, w_in, w_up, "decode")
    for a, b in zip(clean, dirty, strict=True):
        a[9] = b[9]
    assert same_bits(clean, dirty)
