import pytest
import torch
from torch import Tensor

from sm70kernels.ops.conv_replay import conv_replay
from sm70kernels.ops.gdn_conv import gdn_conv
from sm70kernels.testing import conforms, same_bits


def naive(window: Tensor, x: Tensor, slot: Tensor, accepted: Tensor, snapshot_slot: Tensor, snapshot_at: Tensor) -> None:
    for layer in range(window.shape[0]):
        old = window[layer].clone()
        for i in range(slot.shape[0]):
            if slot[i] < 0:
                continue
            held = [row.clone() for row in old[slot[i]]]
            for t in range(int(accepted[i])):
                held = [*held, x[layer, i, t]][1:]
                if snapshot_slot[i] >= 0 and snapshot_at[i] == t + 1:
                    window[layer, snapshot_slot[i]] = torch.stack(held)
            if accepted[i] > 0:
                window[layer, slot[i]] = torch.stack(held)


def vector(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


test_matches_naive = conforms(conv_replay, naive, examples=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_the_windows_gdn_conv_would_have_stored(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    layers, requests, width, channels = 3, 6, 4, 20
    window = torch.randn(layers, 14, 3, channels, generator=generator).to(dtype)
    x = torch.randn(layers, requests, width, channels, generator=generator).to(dtype)
    slot, accepted = vector(5, -1, 0, 3, 7, 1), vector(1, 2, 0, 3, 4, 2)
    target, at = vector(8, 9, 10, 11, 12, -1), vector(1, 1, 1, 2, 3, 1)
    before, none, keep = window.clone(), torch.zeros(6, dtype=torch.int32), torch.zeros(6, 0, dtype=torch.int32)

    def stored(rows: Tensor) -> Tensor:
        pool = before.clone()
        for layer in range(layers):
            weight = torch.ones(channels, 4, dtype=dtype)
            gdn_conv(x[layer].flatten(0, 1), weight, pool[layer], slot, none, rows, none, keep, keep, "decode", True)
        return pool

    conv_replay(window, x, slot, accepted, target, at)
    expected, middle = stored(accepted), stored(at)
    for i in (0, 3, 4):
        expected[:, target[i]] = middle[:, slot[i]]
    assert same_bits(window, expected)


def test_snapshot_at_every_position_of_a_step() -> None:
    x = torch.arange(10.0, 14.0).view(1, 1, 4, 1)
    for at in range(6):
        window = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -1.0, -1.0]]).view(1, 2, 3, 1)
        conv_replay(window, x, *(torch.tensor([n], dtype=torch.int32) for n in (0, 3, 1, at)))
        assert window[0, 0, :, 0].tolist() == [10.0, 11.0, 12.0]
        stored = {1: [2.0, 3.0, 10.0], 2: [3.0, 10.0, 11.0], 3: [10.0, 11.0, 12.0]}.get(at, [-1.0, -1.0, -1.0])
        assert window[0, 1, :, 0].tolist() == stored


def test_more_rows_than_were_recorded_are_refused() -> None:
    window, x, one = torch.zeros(1, 1, 3, 8), torch.ones(1, 1, 2, 8), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="accepted 4 of T=2"):
        conv_replay(window, x, one, one + 4, one - 1, one)
    assert not window.any()
