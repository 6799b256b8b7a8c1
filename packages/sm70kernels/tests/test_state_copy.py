import torch
from torch import Tensor

from sm70kernels.ops.state_copy import state_copy
from sm70kernels.testing import conforms


def naive(pool: Tensor, source: Tensor, target: Tensor) -> None:
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        for layer in range(pool.shape[0]):
            for w in range(pool.shape[2]):
                if s >= 0 and t >= 0:
                    pool[layer, t, w] = pool[layer, s, w]


test_matches_naive = conforms(state_copy, naive, examples=30, dtypes=(torch.float32,))


def copied(pairs: list[tuple[int, int]]) -> list[int]:
    pool = torch.arange(5, dtype=torch.uint8).view(1, 5, 1).expand(2, 5, 300).contiguous()
    state_copy(pool, *(torch.tensor(side, dtype=torch.int32) for side in zip(*pairs, strict=True)))
    assert (pool == pool[:1, :, :1]).all()
    return pool[0, :, 0].tolist()


def test_pairs_take_effect_in_order() -> None:
    assert copied([(0, 1), (1, 2)]) == [0, 0, 0, 3, 4]
    assert copied([(1, 2), (0, 1)]) == [0, 0, 1, 3, 4]
    assert copied([(3, 4), (2, 4)]) == [0, 1, 2, 3, 2]


def test_onto_itself_and_negative_indices_change_nothing() -> None:
    assert copied([(3, 3), (-1, 2), (2, -1)]) == [0, 1, 2, 3, 4]


def test_bytes_count_what_is_moved_and_not_what_is_held() -> None:
    assert state_copy.bytes(dict(L=3, SL=500, W=1000, N=2)) == 2 * (8 + 2 * 3 * 1000)
