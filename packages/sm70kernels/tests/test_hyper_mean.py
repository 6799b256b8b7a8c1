import torch
from torch import Tensor

from sm70kernels.ops.hyper_mean import hyper_mean
from sm70kernels.streams import fold
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def naive(state: Tensor) -> Tensor:
    mean = torch.empty(state.shape[0], state.shape[2], dtype=torch.float64)
    for m in range(state.shape[0]):
        for i in range(state.shape[2]):
            mean[m, i] = sum(state[m, :, i].tolist()) / state.shape[1]
    return mean


test_matches_naive = conforms(hyper_mean, naive)
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


def test_float16_streams_are_summed_in_float32() -> None:
    h = torch.tensor([60000.0, 60000.0, -60000.0, -59904.0], dtype=torch.float16).view(1, 4, 1)
    assert hyper_mean(h).item() == 24.0
