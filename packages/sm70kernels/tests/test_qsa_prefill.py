"""qsa_prefill against its definition: a softmax over the valid tokens of each row's selection, for rows from the limit on."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import prefill_attention, qsa_attention, qsa_prefill
from sm70kernels.testing import conforms, rows_independent, same_bits

LOG2E = math.log2(math.e)


def naive(
    q: Tensor,
    sel: Tensor,
    position: Tensor,
    request: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    scale: float,
    limit: int,
    gate: Tensor | None,
    partial: bool,
    out: Tensor,
    lse: Tensor,
    h: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    page, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for m, last in enumerate(position.tolist()):
        if last < max(0, limit):
            continue
        for j in range(q.shape[1]):
            peaks, sums, means = [], [], []  # of each block of 64 columns
            for b in range(0, sel.shape[1], 64):
                cells = [(int(block_table[request[m], t // page]), t % page) for t in sel[m, b : b + 64].tolist() if t >= 0]
                if cells:
                    k, v = (torch.stack([cache[block, at, j // group] for block, at in cells]) for cache in (k_cache, v_cache))
                    scores = (k @ q[m, j]) * scale * LOG2E
                    p = 2 ** (scores - scores.max())
                    peaks.append(scores.max())
                    sums.append(p.sum())
                    means.append(h(p) @ v)
            out[m, j], lse[m, j] = 0.0, -math.inf
            if peaks:
                weights = [2 ** (peak - max(peaks)) for peak in peaks]
                total = torch.stack([w * s for w, s in zip(weights, sums, strict=True)]).sum()
                o = torch.stack([w * o for w, o in zip(weights, means, strict=True)]).sum(0) / total
                lse[m, j] = max(peaks) + torch.log2(total)
                out[m, j] = o if partial else h(o)
        if gate is not None:
            out[m] *= 1 / (1 + torch.exp(-gate[m]))


test_matches_naive = conforms(qsa_prefill, naive, examples=4, dims={"HQ": 2})
test_rows = rows_independent(qsa_prefill, examples=6)

SIZES = {"M": 70, "HQ": 4, "HK": 2, "D": 32, "W": 150, "B": 40, "P": 64, "N": 4, "PT": 6}


def arguments(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    made = qsa_prefill.make(SIZES, dtype=dtype) | {"gate": None, "partial": False, "limit": 0}
    made |= {"out": torch.zeros(70, 4, 32, dtype=dtype), "position": torch.arange(400, 470, dtype=torch.int32)}
    made["block_table"] = torch.arange(24, dtype=torch.int32).view(4, 6) + 7
    return made | changes


def run(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x = x | {"out": x["out"].clone(), "lse": x["lse"].clone()}
    qsa_prefill(**x)
    return x["out"], x["lse"]


def test_rows_below_the_limit_and_padding_are_left_alone() -> None:
    x = arguments(limit=440)
    x["position"][50] = -1
    x["out"], x["lse"] = torch.full((70, 4, 32), 7.0), torch.full((70, 4), 7.0)
    out, lse = run(x)
    sparse = x["position"] >= 440
    assert out[~sparse].eq(7.0).all()
    assert lse[~sparse].eq(7.0).all()
    assert not out[sparse].eq(7.0).any()
    assert same_bits(out[sparse], run(x | {"limit": 0})[0][sparse])
    nothing = run(x | {"limit": 1000})
    assert same_bits(nothing, (x["out"], x["lse"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("short", [1, 64, 65])
def test_longer_neighbours_change_no_bit(short: int, dtype: torch.dtype) -> None:
    sel = torch.randperm(384)[:150].sort().values.int().repeat(70, 1)
    mixed = sel.clone()
    mixed[::2, short:] = -1
    few = sel.clone()
    few[:, short:] = -1
    x = arguments(dtype)
    got, alone = run(x | {"sel": mixed}), run(x | {"sel": few})
    for a, b in zip(got, alone, strict=True):
        assert same_bits(a[::2].contiguous(), b[::2].contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_memory_nobody_selected_may_hold_anything(dtype: torch.dtype) -> None:
    x = arguments(dtype)
    clean = run(x)
    owned = torch.zeros(40 * 64, dtype=torch.bool)
    for m in range(70):
        for t in x["sel"][m].tolist():
            if t >= 0:
                owned[int(x["block_table"][x["request"][m], t // 64]) * 64 + t % 64] = True
    poison = {name: torch.where(owned.view(40, 64, 1, 1), x[name], math.nan) for name in ("k_cache", "v_cache")}
    assert same_bits(clean, run(x | poison))


def test_it_is_close_to_the_decode_route_and_to_dense_attention() -> None:
    """The routes are different tiles of the same formulas; a selection of every token is dense attention."""
    x = arguments(gate=torch.randn(70, 4, 32), request=torch.zeros(70, dtype=torch.int32), position=torch.arange(70, dtype=torch.int32))
    token = torch.arange(150, dtype=torch.int32).expand(70, 150)
    x["sel"] = torch.where(token <= x["position"].unsqueeze(1), token, -1)
    out, lse = run(x)
    decode = {name: x[name] for name in ("q", "sel", "k_cache", "v_cache", "block_table", "request", "scale", "gate", "partial")}
    for other, other_lse in (qsa_attention(**decode), _dense(x)):
        assert torch.allclose(out, other, atol=2e-6)
        assert torch.allclose(lse, other_lse, atol=1e-5)


def _dense(x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x = {name: item for name, item in x.items() if name != "sel"} | {"limit": 1000, "rank": 0, "world": 1}
    x |= {"out": torch.zeros(70, 4, 32), "lse": torch.zeros(70, 4)}
    prefill_attention(**x)
    return x["out"], x["lse"]


def test_rows_without_tokens_are_zero() -> None:
    x = arguments(sel=torch.full((70, 150), -1, dtype=torch.int32), out=torch.full((70, 4, 32), 7.0))
    out, lse = run(x)
    assert not out.any()
    assert lse.eq(-math.inf).all()


def test_wrong_calls_are_refused() -> None:
    x = arguments(torch.float16)
    with pytest.raises(ValueError, match=r"out: expected torch\.float32 for partial=True, got torch\.float16"):
        run(x | {"partial": True})
    with pytest.raises(ValueError, match="partial=True takes no gate"):
        run(x | {"partial": True, "gate": x["q"], "out": x["out"].float()})
