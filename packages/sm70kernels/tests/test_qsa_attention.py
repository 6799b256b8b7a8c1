"""qsa_attention against its definition: a softmax over the valid tokens of each row's selection."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import attention_merge, qsa_attention, qsa_localize
from sm70kernels.rows import sigmoid
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits

LOG2E = math.log2(math.e)


def naive(
    q: Tensor,
    sel: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    request: Tensor,
    scale: float,
    gate: Tensor | None,
    partial: bool,
    h: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    page, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for m in range(len(q)):
        cells = [(int(block_table[request[m], t // page]), t % page) if t >= 0 else None for t in sel[m].tolist()]
        for j in range(q.shape[1]):
            scores = [-math.inf if c is None else float(q[m, j] @ k_cache[c][j // group]) * scale * LOG2E for c in cells]
            top = max(scores, default=-math.inf)
            if top == -math.inf:
                continue
            total, o = 0.0, torch.zeros(q.shape[2], dtype=torch.float64)
            for b in range(0, len(scores), 64):
                local = max(scores[b : b + 64])
                for score, cell in zip(scores[b : b + 64], cells[b : b + 64], strict=True):
                    if cell is not None:
                        p = torch.tensor(2.0 ** (score - local), dtype=torch.float64)
                        total += float(p) * 2 ** (local - top)
                        o += h(p) * v_cache[cell][j // group] * 2 ** (local - top)
            o, lse[m, j] = o / total, top + math.log2(total)
            out[m, j] = o if partial else h(o)
        if gate is not None:
            out[m] *= 1 / (1 + torch.exp(-gate[m]))
    return out, lse


test_matches_naive = conforms(qsa_attention, naive, examples=5, dims={"HQ": 2})
test_rounding_points = rounds_as_stated(qsa_attention, naive, dict(M=20))
test_rows = rows_independent(qsa_attention, examples=12)

SIZES = {"M": 20, "HQ": 4, "HK": 2, "D": 32, "W": 150, "B": 40, "P": 64, "N": 4, "PT": 6}


def arguments(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    made = qsa_attention.make(SIZES, dtype=dtype) | {"gate": None, "partial": False}
    made["block_table"] = torch.arange(24, dtype=torch.int32).view(4, 6) + 7
    return made | changes


def only(x: dict[str, Any], keep: int) -> dict[str, Any]:
    """The same call with every row's selection cut to its first `keep` columns."""
    sel = x["sel"].clone()
    sel[:, keep:] = -1
    return x | {"sel": sel}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_without_tokens_are_zero(dtype: torch.dtype) -> None:
    x = arguments(dtype, gate=torch.randn(20, 4, 32).to(dtype))
    for empty in (x | {"sel": torch.full((20, 150), -1, dtype=torch.int32)}, x | {"sel": torch.empty(20, 0, dtype=torch.int32)},
                  x | {"request": torch.full((20,), -1, dtype=torch.int32)}):  # fmt: skip
        out, lse = qsa_attention(**empty)
        assert same_bits(out, torch.zeros(20, 4, 32, dtype=dtype))
        assert same_bits(lse, torch.full((20, 4), -math.inf))


def test_one_token_gives_its_value() -> None:
    sel = torch.full((20, 150), -1, dtype=torch.int32)
    sel[:, 77] = 130
    x = arguments(sel=sel)
    out, lse = qsa_attention(**x)
    for m in range(20):
        block = int(x["block_table"][x["request"][m], 2])
        assert same_bits(out[m], x["v_cache"][block, 2].repeat_interleave(2, 0))
        dot = (x["q"][m] * x["k_cache"][block, 2].repeat_interleave(2, 0)).sum(-1) * x["scale"] * LOG2E
        assert torch.allclose(lse[m], dot, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("short", [1, 63, 64, 65, 130])
def test_longer_neighbours_change_no_bit(short: int, dtype: torch.dtype) -> None:
    x = arguments(dtype, sel=torch.randperm(384)[:150].sort().values.int().repeat(20, 1))
    all_short = only(x, short)
    mixed = all_short | {"sel": all_short["sel"].clone()}
    mixed["sel"][1::2] = x["sel"][1::2]
    got, alone = qsa_attention(**mixed), qsa_attention(**all_short)
    for a, b in zip(got, alone, strict=True):
        assert same_bits(a[::2].contiguous(), b[::2].contiguous())
    assert short >= 150 or not torch.equal(got[0][1::2], alone[0][1::2])


def test_masked_blocks_anywhere_change_no_bit() -> None:
    """A selection keeps its bits when whole 64-column blocks of -1 come before, between and after its blocks."""
    x = arguments()
    sel = torch.randperm(384)[:128].int().repeat(20, 1)
    hole = torch.full((20, 64), -1, dtype=torch.int32)
    plain = qsa_attention(**(x | {"sel": sel}))
    for pieces in ([hole, sel], [sel, hole, hole], [sel[:, :64], hole, sel[:, 64:]]):
        assert same_bits(plain, qsa_attention(**(x | {"sel": torch.cat(pieces, 1)})))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_memory_nobody_selected_may_hold_anything(dtype: torch.dtype, poison: float) -> None:
    x = arguments(dtype)
    x["block_table"][:, 5] = 99  # a table entry that names no block
    x["block_table"][:, 4] = -1
    clean = qsa_attention(**x)
    owned = torch.zeros(40 * 64, dtype=torch.bool)
    for m in range(20):
        for t in x["sel"][m].tolist():
            if 0 <= t < 4 * 64:
                owned[int(x["block_table"][x["request"][m], t // 64]) * 64 + t % 64] = True
    for name in ("k_cache", "v_cache"):
        x[name] = torch.where(owned.view(40, 64, 1, 1), x[name], poison)
    assert same_bits(clean, qsa_attention(**x))


def test_tokens_outside_the_table_are_masked() -> None:
    x = arguments()
    sel = torch.where(x["sel"] < 192, x["sel"], -1)
    assert same_bits(qsa_attention(**(x | {"sel": sel})), qsa_attention(**(x | {"block_table": x["block_table"][:, :3].contiguous()})))


def test_block_placement_does_not_matter() -> None:
    x = arguments(torch.float16)
    before = qsa_attention(**x)
    place = torch.randperm(40)
    for name in ("k_cache", "v_cache"):
        moved = torch.empty_like(x[name])
        moved[place] = x[name]
        x[name] = moved
    x["block_table"] = place[x["block_table"].long()].int()
    assert same_bits(before, qsa_attention(**x))


def test_bad_values_stay_in_their_rows() -> None:
    x = arguments(request=torch.tensor([0, 1] * 10, dtype=torch.int32))
    clean = qsa_attention(**x)
    for name in ("k_cache", "v_cache"):
        bad = x | {name: x[name].clone()}
        bad[name][7:13] = math.nan  # every block of request 0
        out, lse = qsa_attention(**bad)
        tokens = (x["sel"][::2] >= 0).any(1)
        assert out[::2][tokens].isnan().all()
        assert not out[::2][~tokens].any()
        assert same_bits(out[1::2].contiguous(), clean[0][1::2].contiguous())
        assert same_bits(lse[1::2].contiguous(), clean[1][1::2].contiguous())


@pytest.mark.parametrize("magnitude", [1e4, -1e4])
def test_huge_scores_do_not_overflow(magnitude: float) -> None:
    x = arguments(q=torch.full((20, 4, 32), magnitude))
    out, lse = qsa_attention(**x)
    assert out.isfinite().all()
    some = (x["sel"] >= 0).any(1)
    assert lse[some].isfinite().all()
    assert lse[some].abs().max() > 1e4


def test_equal_scores_average_the_values() -> None:
    x = arguments(q=torch.zeros(20, 4, 32), scale=0.0)
    out, lse = qsa_attention(**x)
    counts = (x["sel"] >= 0).sum(1)
    assert torch.allclose(lse[:, 0], counts.float().log2(), atol=1e-5)
    ones = qsa_attention(**(x | {"v_cache": torch.ones_like(x["v_cache"])}))[0]
    assert ones[counts > 0].eq(1.0).all()
    assert out[counts > 0].abs().max() <= x["v_cache"].abs().max()


@pytest.mark.parametrize("world", [2, 4])
def test_shards_merge_to_the_whole(world: int) -> None:
    x = arguments(gate=torch.randn(20, 4, 32))
    whole, whole_lse = qsa_attention(**x)
    parts, logs = [], []
    for rank in range(world):
        shard = {name: x[name][:, rank::world].contiguous() for name in ("k_cache", "v_cache")}
        local = qsa_localize(x["sel"], rank, world)
        part, lse = qsa_attention(**(x | shard | {"sel": local, "gate": None, "partial": True}))
        parts.append(part)
        logs.append(lse)
    merged = attention_merge(torch.stack(parts), torch.stack(logs), x["gate"], "f32")
    assert torch.allclose(merged, whole, atol=2e-6)
    top = torch.stack(logs).amax(0)
    assert torch.allclose(torch.logsumexp(torch.stack(logs) / LOG2E, 0) * LOG2E, whole_lse, atol=1e-4)
    assert (top <= whole_lse + 1e-5).all()


def test_a_partial_result_is_float32_and_takes_no_gate() -> None:
    x = arguments(torch.float16, partial=True)
    out, lse = qsa_attention(**x)
    full, full_lse = qsa_attention(**(x | {"partial": False}))
    assert out.dtype == torch.float32
    assert same_bits(out.half(), full)
    assert same_bits(lse, full_lse)
    with pytest.raises(ValueError, match="partial=True takes no gate"):
        qsa_attention(**(x | {"gate": x["q"]}))


def test_the_gate_multiplies_the_rounded_result() -> None:
    x = arguments(torch.float16)
    gate = torch.randn(20, 4, 32).half()
    plain = qsa_attention(**x)[0]
    got = qsa_attention(**(x | {"gate": gate}))[0]
    assert same_bits(got, (plain.float() * sigmoid(gate.float())).half())
