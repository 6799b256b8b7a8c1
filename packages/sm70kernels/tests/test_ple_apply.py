import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels.ops.ple_apply import ple_apply
from sm70kernels.testing import DTYPES, clone, conforms, rounds_as_stated, same_bits

S, E, KW, DILATION, HL, SLOTS = 4, 24, 4, 3, 9, 6


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).sum() / len(x) + eps).sqrt() * (1 + weight)


def naive(
    state: Tensor,
    e: Tensor,
    key_w: Tensor,
    value_w: Tensor,
    norm_key: Tensor,
    norm_query: Tensor,
    norm_conv: Tensor,
    conv_w: Tensor,
    dilation: int,
    history: Tensor,
    slot: Tensor,
    start: Tensor,
    rows: Tensor,
    fresh: Tensor,
    keep_slot: Tensor,
    keep_at: Tensor,
    kind: str,
    write: bool,
    eps: float,
    h: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """One request after the other, one row after the other, one stream after the other."""
    streams, hidden = state.shape[1:]
    c_all = torch.zeros(state.shape[0], streams * hidden, dtype=torch.float64)
    for i in range(slot.shape[0]):
        if slot[i] < 0 or rows[i] == 0:
            continue
        first = i * (state.shape[0] // slot.shape[0]) if kind == "decode" else int(start[i])
        past = [torch.zeros_like(c) if fresh[i] else c.clone() for c in history[slot[i]]]
        for m in range(first, first + int(rows[i])):
            key, value = h((key_w * e[m]).sum(1)), h((value_w * e[m]).sum(1))
            gated = torch.zeros(streams, hidden, dtype=torch.float64)
            for s in range(streams):
                query = norm(state[m, s], norm_query[s], eps)
                score = float((norm(key[s * hidden : (s + 1) * hidden], norm_key[s], eps) * query).sum()) / math.sqrt(hidden)
                root = math.copysign(math.sqrt(max(abs(score), 1e-6)), score) if score else 0.0
                gated[s] = value / (1 + math.exp(-root))
            c_all[m] = h(torch.cat([norm(gated[s], norm_conv[s], eps) for s in range(streams)]))
            past.append(c_all[m])
            conv = torch.zeros(streams * hidden, dtype=torch.float64)
            for tap in range(conv_w.shape[1]):
                conv += conv_w[:, tap] * past[-1 - dilation * (conv_w.shape[1] - 1 - tap)]
            state[m] += gated + (conv / (1 + (-conv).exp())).view(streams, hidden)
        for taken, target in [*zip(keep_at[i].tolist(), keep_slot[i].tolist(), strict=True), (int(rows[i]), int(slot[i]))]:
            if write and target >= 0 and 1 <= taken <= rows[i]:
                history[target] = torch.stack(past[taken : taken + history.shape[1]])
    return c_all


def _with_live_requests(arguments: dict[str, Any]) -> None:
    arguments |= dict(slot=torch.arange(4).int(), rows=torch.full((4,), 4).int(), fresh=torch.zeros(4).int(), kind="decode", write=True)
    arguments["keep_slot"] = torch.arange(4, 16).view(4, 3).int()


test_matches_naive = conforms(ple_apply, naive, examples=12)
test_matches_naive_with_the_models_taps = conforms(ple_apply, naive, examples=6, dims=dict(S=S, KW=KW, DIL=DILATION))
test_rounding_points = rounds_as_stated(ple_apply, naive, dict(N=4, M=16, KW=KW, DIL=DILATION), change=_with_live_requests)


def case(requests: int, width: int, dtype: torch.dtype = torch.float32, kind: str = "decode", **given: Any) -> dict[str, Any]:
    """`requests` x `width` rows of live requests in slots 0, 1, ..; a prefill slice starts where the one before it ends."""
    made = ple_apply.make(dict(N=requests, M=requests * width, KS=0, S=S, E=E, PE=32, KW=KW, DIL=DILATION, SL=SLOTS), 11, dtype)
    integers = dict(
        slot=torch.arange(requests).int(),
        start=(torch.arange(requests) * width).int(),
        rows=torch.full((requests,), width).int(),
        fresh=torch.zeros(requests).int(),
    )
    return made | integers | dict(kind=kind, write=True) | given


def request(arguments: dict[str, Any], i: int, first: int = 0, last: int | None = None) -> dict[str, Any]:
    """Request i alone, its rows first .. last-1; the history is a copy."""
    width = arguments["h"].shape[0] // arguments["slot"].shape[0]
    last = width if last is None else last
    mine = slice(i * width + first, i * width + last)
    alone = clone(arguments | {name: arguments[name][i : i + 1] for name in ("slot", "start", "rows", "fresh", "keep_slot", "keep_at")})
    alone.update({name: arguments[name][mine].clone() for name in ("h", "e")})
    alone["start"], alone["rows"] = torch.zeros(1).int(), torch.full((1,), last - first).int()
    return alone


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "width"), [("decode", 1), ("decode", 5), ("prefill", 5), ("prefill", 70)])
def test_a_request_alone_has_the_bits_it_has_among_others(kind: str, width: int, dtype: torch.dtype) -> None:
    together = case(4, width, dtype, kind)
    parts = [request(together, i) for i in range(4)]
    c = ple_apply(**together)
    for i, alone in enumerate(parts):
        mine = slice(i * width, (i + 1) * width)
        assert same_bits(ple_apply(**alone), c[mine])
        assert same_bits(alone["h"], together["h"][mine])
        assert same_bits(alone["history"][i], together["history"][i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "width", "cuts"), [("decode", 5, [0, 1, 2, 3, 4, 5]), ("decode", 8, [0, 5, 8]), ("prefill", 150, [0, 64, 128, 150])]
)
def test_steps_have_the_bits_of_one_call(kind: str, width: int, cuts: list[int], dtype: torch.dtype) -> None:
    """Decode one row at a time is verify of all rows; slices cut anywhere on the grid are one slice."""
    whole = case(1, width, dtype, kind, fresh=torch.ones(1).int())
    history, h, c = whole["history"].clone(), [], []
    for first, last in pairwise(cuts):
        part = request(whole, 0, first, last) | dict(history=history)
        part["fresh"] = torch.tensor([int(first == 0)]).int()
        c.append(ple_apply(**part))
        h.append(part["h"])
    assert same_bits(ple_apply(**whole), torch.cat(c))
    assert same_bits(whole["h"], torch.cat(h))
    assert same_bits(whole["history"], history)


def test_what_was_returned_is_what_the_history_holds() -> None:
    a = case(2, 12)
    c = ple_apply(**a)
    for i in range(2):
        assert same_bits(a["history"][i], c[i * 12 + 3 : (i + 1) * 12])


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_without_write_the_history_stays(kind: str) -> None:
    a, b = case(3, 4, kind=kind, write=False), case(3, 4, kind=kind)
    before = a["history"].clone()
    assert same_bits(ple_apply(**a), ple_apply(**b))
    assert same_bits(a["h"], b["h"])
    assert same_bits(a["history"], before)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_fresh_reads_zeros_whatever_the_slot_holds(kind: str) -> None:
    zero, garbage = (case(2, 3, kind=kind, fresh=torch.tensor([1, 0]).int()) for _ in range(2))
    zero["history"][0] = 0.0
    garbage["history"][0] = math.nan
    assert same_bits(ple_apply(**zero), ple_apply(**garbage))
    assert same_bits((zero["h"], zero["history"]), (garbage["h"], garbage["history"]))
    assert torch.isfinite(garbage["h"]).all()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_rows_of_nobody_keep_their_state_and_touch_nothing(kind: str) -> None:
    """Request 1 is inactive, request 2 owns one row of three; the other rows hold NaN."""
    a = case(3, 3, kind=kind, slot=torch.tensor([4, -1, 2]).int(), rows=torch.tensor([3, 3, 1]).int())
    clean = clone(a)
    ple_apply(**clean)
    nobody = [3, 4, 5, 7, 8]
    a["e"][nobody], a["h"][nobody] = math.nan, math.nan
    before = a["history"].clone()
    c = ple_apply(**a)
    assert torch.isnan(a["h"][nobody]).all()
    assert same_bits(c[nobody], torch.zeros(5, S * E))
    assert same_bits(a["h"][[0, 1, 2, 6]], clean["h"][[0, 1, 2, 6]])
    assert same_bits(a["history"], clean["history"])
    for slot in (0, 1, 3, 5):
        assert same_bits(a["history"][slot], before[slot])
    assert same_bits(a["history"][2][:-1], before[2][1:])


def test_a_broken_request_touches_no_other() -> None:
    a, b = case(3, 2), case(3, 2)
    b["e"][2, 0] = math.inf
    ple_apply(**a)
    ple_apply(**b)
    assert torch.isnan(b["h"][2]).any()
    for rows, slots in ((slice(0, 2), 0), (slice(4, 6), 2)):
        assert same_bits(a["h"][rows], b["h"][rows])
        assert same_bits(a["history"][slots], b["history"][slots])


def test_a_zero_score_opens_the_gate_by_half() -> None:
    """With e = 0 everything vanishes; with a zero query the gate is 1/2 and, without taps, h becomes v/2."""
    a = case(1, 1)
    a["h"].zero_()
    a["conv_w"].zero_()
    ple_apply(**a)
    assert torch.allclose(a["h"][0], (a["value_w"] @ a["e"][0] / 2).expand(S, E), rtol=1e-6)
    b = case(1, 1, fresh=torch.ones(1).int())
    b["e"].zero_()
    before = b["h"].clone()
    ple_apply(**b)
    assert torch.equal(b["h"], before)


def test_no_requests_and_no_rectangle() -> None:
    assert ple_apply(**case(0, 1)).shape == (0, S * E)
    assert ple_apply(**case(0, 1, kind="prefill")).shape == (0, S * E)
    a = case(2, 2)
    a["h"], a["e"] = a["h"][:3].contiguous(), a["e"][:3].contiguous()
    with pytest.raises(ValueError, match="M=3 is not a multiple of slot axis 0: N=2"):
        ple_apply(**a)


def test_a_small_score_is_raised_to_the_floor_before_its_root() -> None:
    """A query weight of -1 + 2^-23 leaves scores near 1e-7; the root is that of 1e-6, with the score's sign."""
    a = case(1, 5)
    a["norm_query"].fill_(-1.0 + 2.0**-23)
    a["conv_w"].zero_()
    wide = {name: item.double() if isinstance(item, Tensor) and item.is_floating_point() else item for name, item in clone(a).items()}
    before = a["h"].double()
    ple_apply(**a)
    naive(*wide.values())
    value = (wide["e"] @ wide["value_w"].T)[:, None]
    share = ((a["h"].double() - before) / value - 0.5).abs()  # sigmoid(x) - 1/2 is x / 4 for a small x
    assert (share[value.abs().expand_as(share) > 0.3] - 1e-3 / 4).abs().max() < 3e-6
    torch.testing.assert_close(a["h"].double(), wide["h"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "width", "ends"), [("decode", 8, [0, 1, 5, 8]), ("prefill", 70, [0, 3, 64, 70])])
def test_kept_histories_are_those_of_calls_that_end_there(kind: str, width: int, ends: list[int], dtype: torch.dtype) -> None:
    """Request 1 is inactive and request 2 has no rows; request 3 ends before the last pair, whose third slot is none."""
    a = case(4, width, dtype, kind, slot=torch.tensor([0, -1, 2, 3]).int(), rows=torch.tensor([width, width, 0, width - 1]).int())
    a["history"] = torch.randn(24, *a["history"].shape[1:], generator=torch.Generator().manual_seed(1)).to(dtype)
    plain, expected = clone(a), clone(a)
    a["keep_at"] = torch.tensor(ends).int().expand(4, 4).contiguous()
    a["keep_slot"] = torch.arange(4, 20).view(4, 4).int()
    a["keep_slot"][3, 2] = -1
    without = clone(a) | dict(write=False)
    result = ple_apply(**expected)
    for i in (0, 3):
        for target, at in zip(a["keep_slot"][i].tolist(), ends, strict=True):
            if target >= 0 and 1 <= at <= a["rows"][i]:
                ended = request(plain, i, 0, at)
                ple_apply(**ended)
                expected["history"][target] = ended["history"][int(a["slot"][i])]
    before = without["history"].clone()
    ple_apply(**without)
    assert same_bits(without["history"], before)
    assert same_bits(ple_apply(**a), result)
    assert same_bits((a["h"], a["history"]), (expected["h"], expected["history"]))
