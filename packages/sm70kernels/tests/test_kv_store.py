"""kv_store against its definition: one assignment a row, of the values or of their codes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import kv_store
from sm70kernels.backends import calls
from sm70kernels.op import ContractError
from sm70kernels.testing import conforms, poison, same_bits
from sm70kernels.yardstick import clone

from .kv_codes import encode_i8, nearest_e4m3, quotient


def naive(
    k: Tensor,
    v: Tensor,
    kv_index: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    page = k_cache.shape[1]
    for m, index in enumerate(kv_index.tolist()):
        if index == -1:
            continue
        cell = (index // page, index % page)
        for x, cache, scale, scales in ((k, k_cache, k_scale, k_scales), (v, v_cache, v_scale, v_scales)):
            for head, row in enumerate(x[m].tolist()):
                if scale is not None:
                    row = [nearest_e4m3(quotient(value, float(scale))) for value in row]
                elif scales is not None:
                    row, scales[*cell, head] = encode_i8(row)
                cache[*cell, head] = torch.tensor(row, dtype=cache.dtype)


def large(
    k: Tensor,
    v: Tensor,
    kv_index: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: None = None,
    v_scale: None = None,
    k_scales: None = None,
    v_scales: None = None,
) -> None:
    """A cache of activations only."""
    rows = kv_index >= 0
    for x, cache in ((k, k_cache), (v, v_cache)):
        cache.flatten(0, 1)[kv_index[rows]] = x[rows]


test_matches_naive = conforms(kv_store, naive, large=large)


def coded(kind: str, m: int, heads: int = 2, d: int = 32, pool: tuple[int, int] = (5, 24), seed: int = 0) -> dict[str, Any]:
    """A call with a cache of codes: poisoned pools, values of many magnitudes, infinities and NaN among them, every fifth row skipped."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(m, heads, d, generator=generator) * torch.logspace(-5, 4, max(m, 1))[:m, None, None] for _ in range(2))
    if m > 3:
        k[1, 0, 3], v[2, heads - 1, 0], v[3, 0, 1], k[0] = math.inf, math.nan, -math.inf, 0.0
    index = torch.randperm(pool[0] * pool[1], generator=generator)[:m]
    index[4::5] = -1
    dtype = torch.uint8 if kind == "e4m3" else torch.int8
    call = dict(k=k.half(), v=v.half(), kv_index=index)
    call |= {name: poison(torch.empty(*pool, heads, d, dtype=dtype)) for name in ("k_cache", "v_cache")}
    if kind == "e4m3":
        return call | dict(k_scale=torch.tensor(0.37), v_scale=torch.tensor(2.5e-3))
    return call | {name: poison(torch.empty(*pool, heads)) for name in ("k_scales", "v_scales")}


def written(call: dict[str, Any]) -> tuple[Tensor, ...]:
    return tuple(call[name] for name in ("k_cache", "v_cache", "k_scales", "v_scales") if name in call)


@pytest.mark.parametrize("run", calls(kv_store))
@pytest.mark.parametrize("kind", ["e4m3", "i8"])
@pytest.mark.parametrize("m", [0, 1, 7, 20])
def test_codes_are_those_of_the_definition_and_other_cells_stay(run: Callable[..., None], kind: str, m: int) -> None:
    call = coded(kind, m)
    expected = clone(call)
    naive(**expected)
    run(**call)
    assert same_bits(written(call), written(expected))


@pytest.mark.parametrize("kind", ["f16", "e4m3", "i8"])
@pytest.mark.parametrize(("heads", "d", "pool"), [(1, 256, (3, 64)), (2, 256, (2, 17)), (2, 80, (1, 24))])
def test_every_configuration_stores_what_the_reference_does(kind: str, heads: int, d: int, pool: tuple[int, int]) -> None:
    for config in kv_store.configs:
        for order in (None, 3):
            call = coded(kind if kind != "f16" else "e4m3", 13, heads, d, pool, seed=config)
            if kind == "f16":
                call = {name: call[name] for name in ("k", "v", "kv_index")}
                call |= {name: poison(torch.empty(*pool, heads, d).half()) for name in ("k_cache", "v_cache")}
            expected = clone(call)
            kv_store(**expected)
            kv_store.emulate(**call, config=config, order=order)
            assert same_bits(written(call), written(expected))


@pytest.mark.parametrize("kind", ["e4m3", "i8"])
def test_float32_activations_are_stored_as_codes_too(kind: str) -> None:
    call = coded(kind, 9)
    call |= dict(k=call["k"].float() * 1.0001, v=call["v"].float() / 3)
    expected = clone(call)
    naive(**expected)
    kv_store(**call)
    assert same_bits(written(call), written(expected))


@pytest.mark.parametrize("run", calls(kv_store))
def test_a_row_that_is_not_finite_is_poison_in_int8_and_saturates_in_e4m3(run: Callable[..., None]) -> None:
    call = coded("i8", 4)
    call["kv_index"] = torch.arange(4)
    run(**call)
    k_scales, k_cache = call["k_scales"][0], call["k_cache"][0]
    assert k_scales[:4].isnan().tolist() == [[False, False], [True, False], [False, False], [False, False]]
    assert not k_cache[1, 0].any()
    assert k_cache[1, 1].any()
    assert k_scales[0].tolist() == [torch.tensor(1e-6).item()] * 2  # a row of zeros
    call = coded("e4m3", 4)
    call["kv_index"] = torch.arange(4)
    run(**call)
    assert int(call["k_cache"][0, 1, 0, 3]) == 0x7E
    assert int(call["v_cache"][0, 3, 0, 1]) == 0xFE
    assert int(call["v_cache"][0, 2, 1, 0]) == 0x7F


@pytest.mark.parametrize("run", calls(kv_store))
def test_bits_pass_through_and_other_cells_stay(run: Callable[..., None]) -> None:
    k = torch.tensor([float("nan"), float("inf"), -0.0, 6e-8]).half().view(4, 1, 1).repeat(1, 2, 32)
    k_cache, v_cache = poison(torch.empty(3, 5, 2, 32).half()), torch.ones(3, 5, 2, 32).half()
    run(k=k, v=-k, kv_index=torch.tensor([14, -1, 0, 7]), k_cache=k_cache, v_cache=v_cache)
    for m, index in ((0, 14), (2, 0), (3, 7)):
        assert same_bits(k_cache.view(15, 2, 32)[index], k[m])
        assert same_bits(v_cache.view(15, 2, 32)[index], -k[m])
    untouched = [i for i in range(15) if i not in (14, 0, 7)]
    assert k_cache.view(15, 2, 32)[untouched].isnan().all()
    assert v_cache.view(15, 2, 32)[untouched].eq(1).all()


@pytest.mark.parametrize("run", calls(kv_store))
def test_skipping_every_row_changes_nothing(run: Callable[..., None]) -> None:
    cache = torch.zeros(2, 4, 1, 32).half()
    run(k=torch.ones(3, 1, 32).half(), v=torch.ones(3, 1, 32).half(), kv_index=torch.full((3,), -1), k_cache=cache, v_cache=cache)
    assert not cache.any()


@pytest.mark.parametrize("kind", ["e4m3", "i8"])
def test_the_kernel_skips_rows_outside_the_pool(kind: str) -> None:
    call = coded(kind, 6)
    call["kv_index"] = torch.tensor([120, 3, -2, 1 << 62, -(1 << 63), 119])
    expected = clone(call)
    expected["kv_index"] = torch.tensor([-1, 3, -1, -1, -1, 119])
    kv_store(**expected)
    kv_store.emulate(**call)
    assert same_bits(written(call), written(expected))


def test_a_row_is_stored_the_same_among_any_others() -> None:
    k, v = torch.randn(9, 2, 32), torch.randn(9, 2, 32)
    together, apart = torch.zeros(2, 2, 8, 2, 32), torch.zeros(2, 2, 8, 2, 32)
    index = torch.randperm(16)[:9]
    kv_store(k, v, index, together[0], together[1])
    for m in range(9):
        kv_store(k[m : m + 1], v[m : m + 1], index[m : m + 1], apart[0], apart[1])
    assert same_bits(together, apart)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cells_beyond_2_31_bytes_are_reached() -> None:
    cells = (1 << 23) + 64
    k_cache, v_cache = torch.zeros(2, cells // 64, 64, 1, 256, dtype=torch.uint8, device="cuda")
    k, scale = torch.full((1, 1, 256), 2.0, device="cuda").half(), torch.tensor(1.0, device="cuda")
    kv_store(k, -k, torch.tensor([cells - 1], device="cuda"), k_cache, v_cache, scale, scale)
    for cache, code in ((k_cache, 0x40), (v_cache, 0xC0)):
        assert cache[-1, -1].eq(code).all()
        assert int(cache.count_nonzero()) == 256


def test_wrong_indices_are_refused() -> None:
    k, cache = torch.ones(2, 1, 3), torch.zeros(2, 4, 1, 3)
    with pytest.raises(ValueError, match="kv_index names cell 5 more than once"):
        kv_store(k, k, torch.tensor([5, 5]), cache, cache.clone())
    for index in (8, -2):
        with pytest.raises(IndexError, match=f"kv_index {index} is outside the pool of 8 cells"):
            kv_store(k, k, torch.tensor([0, index]), cache, cache.clone())
    assert not cache.any()


def test_scales_that_do_not_belong_to_the_storage_are_refused() -> None:
    call = coded("e4m3", 2)
    with pytest.raises(ContractError, match="k_scale: missing"):
        kv_store(**(call | dict(k_scale=None)))
    with pytest.raises(ContractError, match="k_scales: given"):
        kv_store(**(call | dict(k_scales=torch.zeros(5, 24, 2))))
    with pytest.raises(ContractError, match="one call has one storage"):
        kv_store(**(call | dict(v_cache=call["v_cache"].view(torch.int8))))
