"""prefill_attention against its definition: a causal softmax over the rank's tokens for every row below the limit."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import attention_merge, prefill_attention
from sm70kernels.testing import conforms, same_bits

LOG2E = math.log2(math.e)


def naive(
    q: Tensor,
    position: Tensor,
    request: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    scale: float,
    limit: int,
    rank: int,
    world: int,
    gate: Tensor | None,
    partial: bool,
    out: Tensor,
    lse: Tensor,
    h: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    page, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for m, last in enumerate(position.tolist()):
        if not 0 <= last < limit:
            continue
        local = [t // world for t in range(last + 1) if t % world == rank]
        blocks = [int(block_table[request[m], c // page]) for c in local]
        for j in range(q.shape[1]):
            out[m, j], lse[m, j] = 0.0, -math.inf
            if not local:
                continue
            cells = [(b, c % page, j // group) for b, c in zip(blocks, local, strict=True)]
            k, v = (torch.stack([cache[cell] for cell in cells]) for cache in (k_cache, v_cache))
            scores = (k @ q[m, j]) * scale * LOG2E
            top, total, o = scores.max(), torch.zeros(()), torch.zeros_like(q[m, j])
            for b in range(0, len(local), 64):
                part = scores[b : b + 64]
                p = 2 ** (part - part.max())
                weight = 2 ** (part.max() - top)
                total = total + p.sum() * weight
                o = o + (h(p) @ v[b : b + 64]) * weight
            lse[m, j] = top + torch.log2(total)
            out[m, j] = o / total if partial else h(o / total)
        if gate is not None:
            out[m] *= 1 / (1 + torch.exp(-gate[m]))


test_matches_naive = conforms(prefill_attention, naive, examples=4)

SIZES = {"M": 128, "HQ": 4, "HK": 2, "D": 32, "B": 20, "P": 64, "N": 2, "PT": 4}


def arguments(start: int = 0, dtype: torch.dtype = torch.float32, rows: int = 128, **changes: Any) -> dict[str, Any]:
    """One request's rows from position `start` on, ungated, with no limit."""
    made = prefill_attention.make({**SIZES, "M": rows}, dtype=dtype)
    made["position"] = torch.arange(start, start + rows, dtype=torch.int32)
    made["request"] = torch.zeros(rows, dtype=torch.int32)
    made["block_table"] = torch.randperm(20)[:8].view(2, 4).int()
    made |= {"limit": 10_000, "rank": 0, "world": 1, "gate": None, "partial": False}
    made |= {"out": torch.zeros(rows, 4, 32, dtype=dtype), "lse": torch.zeros(rows, 4)}
    return made | changes


def run(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x = x | {"out": x["out"].clone(), "lse": x["lse"].clone()}
    prefill_attention(**x)
    return x["out"], x["lse"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_in_every_slice_and_at_every_place(dtype: torch.dtype) -> None:
    """INV: alone in a tile, at another place of it, beside rows with more context, among other requests."""
    whole = arguments(0, dtype, rows=192)
    out, lse = run(whole)
    names = ("q", "position", "request", "out", "lse")
    generator = torch.Generator().manual_seed(5)
    for row in torch.randint(0, 192, (12,), generator=generator).tolist():
        alone = run(whole | {name: whole[name][row : row + 1] for name in names})
        assert same_bits((out[row], lse[row]), (alone[0][0], alone[1][0]))
        order = torch.randperm(192, generator=generator)
        shuffled = run(whole | {name: whole[name][order] for name in names})
        at = int((order == row).nonzero())
        assert same_bits((out[row], lse[row]), (shuffled[0][at], shuffled[1][at]))
    for begin, end in ((0, 64), (64, 192), (128, 192), (64, 100)):
        part = run(whole | {name: whole[name][begin:end] for name in names})
        assert same_bits((out[begin:end], lse[begin:end]), part)
    other = arguments(30, dtype, rows=64)
    both = whole | {name: torch.cat([other[name], whole[name]]) for name in names}
    both["request"] = torch.tensor([1] * 64 + [0] * 192, dtype=torch.int32)
    got = run(both)
    assert same_bits((out, lse), (got[0][64:], got[1][64:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("length", [1, 31, 33, 63, 64, 65, 127, 128])
def test_memory_past_the_last_token_may_hold_anything(length: int, dtype: torch.dtype) -> None:
    x = arguments(0, dtype)
    x["position"][length:] = -1
    clean = run(x)
    owned = torch.zeros(20 * 64, dtype=torch.bool)
    for t in range(length):
        owned[int(x["block_table"][0, t // 64]) * 64 + t % 64] = True
    poison = {name: torch.where(owned.view(20, 64, 1, 1), x[name], math.nan) for name in ("k_cache", "v_cache")}
    table = x["block_table"].clone()
    table[0, -(-length // 64) :] = -1
    assert same_bits(clean, run(x | poison))
    assert same_bits(clean, run(x | poison | {"block_table": table}))


def test_the_first_row_returns_its_own_value() -> None:
    x = arguments(rows=64)
    out, _ = run(x)
    assert same_bits(out[0], x["v_cache"][int(x["block_table"][0, 0]), 0].repeat_interleave(2, 0))


def test_other_rows_are_left_alone() -> None:
    x = arguments(20, limit=100)
    x["position"][[3, 70]] = -1
    x["out"], x["lse"] = torch.full((128, 4, 32), 7.0), torch.full((128, 4), 7.0)
    out, lse = run(x)
    dense = (x["position"] >= 0) & (x["position"] < 100)
    assert out[~dense].eq(7.0).all()
    assert lse[~dense].eq(7.0).all()
    assert not out[dense].eq(7.0).any()
    unlimited = run(x | {"limit": 1000})
    assert same_bits(out[dense], unlimited[0][dense])


@pytest.mark.parametrize("world", [2, 3])
def test_shards_merge_to_the_whole(world: int) -> None:
    x = arguments(0, gate=torch.randn(128, 4, 32))
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    k, v = x["k_cache"][:2].flatten(0, 1), x["v_cache"][:2].flatten(0, 1)  # tokens 0 .. 127
    whole, _ = run(x | {"block_table": table})
    parts, logs = [], []
    for rank in range(world):
        pool = [torch.full((2, 64, 2, 32), math.nan) for _ in range(2)]
        for cache, tokens in zip(pool, (k, v), strict=True):
            mine = tokens[rank::world]
            cache.view(128, 2, 32)[: len(mine)] = mine
        shard = {"k_cache": pool[0], "v_cache": pool[1], "rank": rank, "world": world, "gate": None, "partial": True}
        part, lse = run(x | shard | {"block_table": torch.tensor([[0, 1]], dtype=torch.int32), "out": torch.zeros(128, 4, 32)})
        assert lse[:rank].eq(-math.inf).all()
        assert not part[:rank].any()
        parts.append(part)
        logs.append(lse)
    assert torch.allclose(attention_merge(torch.stack(parts), torch.stack(logs), x["gate"], "f32"), whole, atol=2e-6)


def test_wrong_calls_are_refused() -> None:
    x = arguments(dtype=torch.float16)
    mixed = x["request"].clone()
    mixed[5] = 1
    with pytest.raises(ValueError, match=r"rows 0 to 63 share a tile but belong to requests \[0, 1\]"):
        run(x | {"request": mixed})
    with pytest.raises(ValueError, match=r"out: expected torch\.float32 for partial=True, got torch\.float16"):
        run(x | {"partial": True})
    with pytest.raises(ValueError, match="partial=True takes no gate"):
        run(x | {"partial": True, "gate": x["q"], "out": x["out"].float()})
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        run(x | {"rank": 2, "world": 2})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_stays_with_the_rows_that_see_it(value: float) -> None:
    """Row 39 must not know that the slice goes on to a bad token 40: a slice cut there has the same bits."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(64, 2, 20, generator=generator)
    k, v = (torch.randn(1, 64, 1, 20, generator=generator) for _ in range(2))

    def run(v: Tensor) -> Tensor:
        o, lse = torch.zeros(64, 2, 20), torch.zeros(64, 2)
        rows, table = torch.arange(64, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
        prefill_attention(q, rows, torch.zeros_like(rows), k, v, table, 0.2, 2051, 0, 1, None, False, o, lse)
        return o

    good, bad = run(v), v.clone()
    bad[0, 40] = value
    seen = run(bad)
    assert torch.equal(seen[:40], good[:40])
    assert not seen[40:].isfinite().any()
