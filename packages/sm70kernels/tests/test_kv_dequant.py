"""kv_dequant against its definition: one decoded row an index."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import kv_dequant, kv_store
from sm70kernels.backends import calls
from sm70kernels.op import ContractError
from sm70kernels.testing import conforms, poison, rows_independent, same_bits

from .kv_codes import e4m3_value, single


def naive(
    k_cache: Tensor,
    v_cache: Tensor,
    kv_index: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    page, heads, d = k_cache.shape[1:]
    found = []
    for cache, scale, scales in ((k_cache, k_scale, k_scales), (v_cache, v_scale, v_scales)):
        out = torch.zeros(len(kv_index), heads, d, dtype=torch.float64)
        for m, index in enumerate(kv_index.tolist()):
            for head in range(heads) if index != -1 else ():
                row = cache[index // page, index % page, head].tolist()
                if scale is not None:
                    row = [single(e4m3_value(code) * float(scale)) for code in row]
                elif scales is not None:
                    row = [single(code * float(scales[index // page, index % page, head])) for code in row]
                out[m, head] = torch.tensor(row, dtype=torch.float64)
        found.append(out)
    return found[0], found[1]


def large(
    k_cache: Tensor, v_cache: Tensor, kv_index: Tensor, k_scale: None, v_scale: None, k_scales: None, v_scales: None
) -> tuple[Tensor, Tensor]:
    """A cache of activations only."""
    k, v = (cache.flatten(0, 1)[kv_index.clamp(min=0)].clone() for cache in (k_cache, v_cache))
    k[kv_index < 0] = 0.0
    v[kv_index < 0] = 0.0
    return k, v


test_matches_naive = conforms(kv_dequant, naive, large=large)
test_rows = rows_independent(kv_dequant)


def coded(kind: str, m: int, heads: int = 2, d: int = 32, pool: tuple[int, int] = (5, 24), seed: int = 0) -> dict[str, Any]:
    """A call on a cache of random codes, all NaN codes among them, with an INT8 scale that is NaN; every fifth index is a hole."""
    generator = torch.Generator().manual_seed(seed)
    cells = pool[0] * pool[1]
    index = torch.randint(0, cells, (m,), generator=generator)
    index[4::5] = -1
    k_cache, v_cache = (torch.randint(0, 256, (*pool, heads, d), generator=generator).to(torch.uint8) for _ in range(2))
    if kind == "e4m3":
        scales = dict(k_scale=torch.tensor(0.37), v_scale=torch.tensor(300.0))
        return dict(k_cache=k_cache, v_cache=v_cache, kv_index=index) | scales
    k_scales, v_scales = (torch.randn(*pool, heads, generator=generator).exp() for _ in range(2))
    k_scales.flatten()[index[:1] * heads] = math.nan
    planes = dict(k_scales=k_scales, v_scales=v_scales)
    return dict(k_cache=k_cache.view(torch.int8), v_cache=v_cache.view(torch.int8), kv_index=index) | planes


def outputs(call: dict[str, Any]) -> dict[str, Tensor]:
    shape = (len(call["kv_index"]), *call["k_cache"].shape[2:])
    return {name: poison(torch.empty(shape).half()) for name in ("k", "v")}


def equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.allclose(a, b.to(a.dtype), rtol=0, atol=0, equal_nan=True) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("run", calls(kv_dequant))
@pytest.mark.parametrize("kind", ["e4m3", "i8"])
@pytest.mark.parametrize("m", [0, 1, 7, 20])
def test_codes_become_the_rounded_products_of_the_definition(run: Callable[..., Any], kind: str, m: int) -> None:
    call = coded(kind, m)
    given = outputs(call)
    found = run(**call, **given)
    assert found[0] is given["k"]
    assert equal(found, naive(**call))
    assert not torch.cat([x[4::5] for x in found]).any()


@pytest.mark.parametrize("kind", ["f16", "e4m3", "i8"])
@pytest.mark.parametrize(("heads", "d", "pool"), [(1, 256, (3, 64)), (2, 256, (2, 17)), (2, 80, (1, 24))])
def test_every_configuration_reads_what_the_reference_does(kind: str, heads: int, d: int, pool: tuple[int, int]) -> None:
    call = coded("i8" if kind == "i8" else "e4m3", 13, heads, d, pool)
    if kind == "f16":
        call = {name: torch.randn(*pool, heads, d).half() for name in ("k_cache", "v_cache")} | {"kv_index": call["kv_index"]}
    expected = kv_dequant(**call)
    for config in kv_dequant.configs:
        for order in (None, 3):
            found, _ = kv_dequant.emulate(**call, **outputs(call), config=config, order=order)
            assert equal(found, expected)


@pytest.mark.parametrize("run", calls(kv_dequant))
def test_a_hole_reads_nothing_and_one_row_of_bad_scale_spoils_no_other(run: Callable[..., Any]) -> None:
    call = coded("i8", 6)
    call["kv_index"] = torch.tensor([-1, 7, 0, 7, -1, 119])
    call["k_scales"].view(-1, 2)[7] = math.nan
    k, v = run(**call, **outputs(call))
    assert k[[1, 3]].isnan().all()
    assert not k[[0, 4]].any()
    assert k[[2, 5]].isfinite().all()
    assert v.isfinite().all()


def test_the_kernel_makes_zeros_of_rows_outside_the_pool() -> None:
    call = coded("e4m3", 6)
    call["kv_index"] = torch.tensor([120, 3, -2, 1 << 62, -(1 << 63), 119])
    found, _ = kv_dequant.emulate(**call, **outputs(call))
    call["kv_index"] = torch.tensor([-1, 3, -1, -1, -1, 119])
    assert equal(found, kv_dequant(**call))


def test_indices_outside_the_pool_are_refused() -> None:
    cache = torch.zeros(2, 4, 1, 3)
    for index in (8, -2):
        with pytest.raises(IndexError, match=f"kv_index {index} is outside the pool of 8 cells"):
            kv_dequant(cache, cache, torch.tensor([0, index]))


@pytest.mark.parametrize("kind", ["e4m3", "i8"])
def test_what_was_stored_comes_back_within_the_format_s_step(kind: str) -> None:
    k, v = (torch.randn(9, 2, 32).half() for _ in range(2))
    index = torch.randperm(24)[:9]
    dtype = torch.uint8 if kind == "e4m3" else torch.int8
    caches = torch.zeros(3, 8, 2, 32, dtype=dtype), torch.zeros(3, 8, 2, 32, dtype=dtype)
    if kind == "e4m3":
        scales: dict[str, Tensor] = dict(k_scale=torch.tensor(0.01), v_scale=torch.tensor(0.02))
    else:
        scales = dict(k_scales=torch.zeros(3, 8, 2), v_scales=torch.zeros(3, 8, 2))
    kv_store(k, v, index, *caches, **scales)
    for stored, got in zip((k, v), kv_dequant(*caches, index, **scales), strict=True):
        half = stored.float().abs() / 16 + 2.0**-10 * 0.02 if kind == "e4m3" else stored.float().abs().amax(-1, keepdim=True) / 254
        step = half + stored.float().abs() * 2.0**-11  # what comes back is rounded to float16
        assert ((stored.float() - got.float()).abs() <= step).all()


def test_codes_become_float16_where_nothing_says_otherwise() -> None:
    call = coded("e4m3", 3)
    torch.testing.assert_close(kv_dequant.emulate(**call)[0], kv_dequant(**call), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ContractError, match=r"k: this call makes torch.float16"):
        kv_dequant(**call, **{name: out.float() for name, out in outputs(call).items()})
    assert same_bits(kv_dequant(**call, **outputs(call)), kv_dequant(**call))
