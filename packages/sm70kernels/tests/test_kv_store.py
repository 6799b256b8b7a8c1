"""kv_store against its definition: one assignment a row."""

import pytest
import torch
from torch import Tensor

from sm70kernels import kv_store
from sm70kernels.testing import conforms, poison, same_bits


def naive(k: Tensor, v: Tensor, kv_index: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    page = k_cache.shape[1]
    for m, index in enumerate(kv_index.tolist()):
        if index != -1:
            k_cache[index // page, index % page] = k[m]
            v_cache[index // page, index % page] = v[m]


test_matches_naive = conforms(kv_store, naive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_pass_through_and_other_cells_stay(dtype: torch.dtype) -> None:
    k = torch.tensor([float("nan"), float("inf"), -0.0, 6e-8], dtype=dtype).view(4, 1, 1).repeat(1, 2, 3)
    k_cache, v_cache = poison(torch.empty(3, 5, 2, 3, dtype=dtype)), torch.ones(3, 5, 2, 3, dtype=dtype)
    kv_store(k, -k, torch.tensor([14, -1, 0, 7]), k_cache, v_cache)
    for m, index in ((0, 14), (2, 0), (3, 7)):
        assert same_bits(k_cache.view(15, 2, 3)[index], k[m])
        assert same_bits(v_cache.view(15, 2, 3)[index], -k[m])
    untouched = [i for i in range(15) if i not in (14, 0, 7)]
    assert k_cache.view(15, 2, 3)[untouched].isnan().all()
    assert v_cache.view(15, 2, 3)[untouched].eq(1).all()


def test_skipping_every_row_changes_nothing() -> None:
    cache = torch.zeros(2, 4, 1, 3)
    kv_store(torch.ones(3, 1, 3), torch.ones(3, 1, 3), torch.full((3,), -1), cache, cache)
    assert not cache.any()


def test_a_row_is_stored_the_same_among_any_others() -> None:
    k, v = torch.randn(9, 2, 32), torch.randn(9, 2, 32)
    together, apart = torch.zeros(2, 2, 8, 2, 32), torch.zeros(2, 2, 8, 2, 32)
    index = torch.randperm(16)[:9]
    kv_store(k, v, index, together[0], together[1])
    for m in range(9):
        kv_store(k[m : m + 1], v[m : m + 1], index[m : m + 1], apart[0], apart[1])
    assert same_bits(together, apart)


def test_wrong_indices_are_refused() -> None:
    k, cache = torch.ones(2, 1, 3), torch.zeros(2, 4, 1, 3)
    with pytest.raises(ValueError, match="kv_index names cell 5 more than once"):
        kv_store(k, k, torch.tensor([5, 5]), cache, cache.clone())
    for index in (8, -2):
        with pytest.raises(IndexError, match=f"kv_index {index} is outside the pool of 8 cells"):
            kv_store(k, k, torch.tensor([0, index]), cache, cache.clone())
    assert not cache.any()
