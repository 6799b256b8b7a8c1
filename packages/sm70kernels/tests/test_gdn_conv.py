import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels.ops.gdn_conv import gdn_conv
from sm70kernels.testing import clone, conforms, rounds_as_stated, same_bits


def naive(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    slot: Tensor,
    start: Tensor,
    rows: Tensor,
    fresh: Tensor,
    keep_slot: Tensor,
    keep_at: Tensor,
    kind: str,
    write: bool,
) -> Tensor:
    y = torch.zeros_like(x)
    taps = weight.shape[1]
    for i in range(slot.shape[0]):
        s, count = int(slot[i]), int(rows[i])
        if s < 0:
            continue
        first = i * (x.shape[0] // slot.shape[0]) if kind == "decode" else int(start[i])
        for c in range(x.shape[1]):
            seen = [0.0 if fresh[i] else float(v) for v in window[s, :, c]]
            for t in range(first, first + count):
                seen.append(float(x[t, c]))
                total = sum(float(weight[c, j]) * seen[len(seen) - taps + j] for j in range(taps))
                y[t, c] = total / (1.0 + math.exp(-total))
            for taken, target in [*zip(keep_at[i].tolist(), keep_slot[i].tolist(), strict=True), (count, s)]:
                if write and target >= 0 and 1 <= taken <= count:
                    window[target, :, c] = torch.tensor(seen[taken : taken + taps - 1], dtype=window.dtype)
    return y


test_matches_naive = conforms(gdn_conv, naive, examples=12)
test_rounding_points = rounds_as_stated(gdn_conv, naive, dict(M=24, N=4))

SIZES = {"M": 40, "N": 10, "KS": 0, "SL": 12, "C": 20, "KW": 4}
NOTHING = (torch.zeros(1, 0, dtype=torch.int32),) * 2
"""keep_slot and keep_at of a call with one request that keeps nothing."""


def vector(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode(seed: int = 0, **changed: Any) -> dict[str, Any]:
    """Ten requests of four rows, all active, in slots 0 .. 9."""
    made = gdn_conv.make(SIZES, seed)
    made |= {"slot": torch.arange(10, dtype=torch.int32), "rows": torch.full((10,), 4, dtype=torch.int32)}
    return made | {"fresh": torch.zeros(10, dtype=torch.int32), "kind": "decode", "write": True} | changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_request_alone_has_the_bits_it_has_in_any_batch(dtype: torch.dtype) -> None:
    call = decode()
    call = {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}
    call["rows"] = torch.randint(0, 5, (10,), generator=torch.Generator().manual_seed(3)).int()
    together = clone(call)
    y = gdn_conv(**together)
    for i in range(10):
        one = clone(call) | {"x": call["x"][4 * i : 4 * i + 4].contiguous()}
        one |= {name: call[name][i : i + 1].clone() for name in ("slot", "start", "rows", "fresh", "keep_slot", "keep_at")}
        assert same_bits(gdn_conv(**one), y[4 * i : 4 * i + 4])
        assert same_bits(one["window"][i], together["window"][i])


def test_prefill_cut_anywhere_equals_whole_and_equals_decode() -> None:
    x = torch.randn(90, 20, generator=torch.Generator().manual_seed(5))
    weight, empty = torch.randn(20, 4), torch.full((2, 3, 20), float("nan"))

    def run(cuts: list[int], kind: str) -> tuple[Tensor, Tensor]:
        window, parts = empty.clone(), []
        for first, last in zip([0, *cuts], [*cuts, 90], strict=True):
            new = vector(int(first == 0))
            parts.append(gdn_conv(x[first:last], weight, window, vector(1), vector(0), vector(last - first), new, *NOTHING, kind, True))
        return torch.cat(parts), window[1]

    whole = run([], "prefill")
    for cuts in ([64], [1, 2, 3], [2, 66], [89]):
        assert same_bits(run(cuts, "prefill"), whole)
    assert same_bits(run([7, 8, 40], "decode"), whole)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_short_sequences_shift_the_window(count: int) -> None:
    window = torch.arange(3.0).view(1, 3, 1).expand(1, 3, 20).contiguous()
    x = 10.0 + torch.arange(float(count)).view(-1, 1).expand(count, 20).contiguous()
    gdn_conv(x, torch.randn(20, 4), window, vector(0), vector(0), vector(count), vector(0), *NOTHING, "prefill", True)
    assert window[0, :, 0].tolist() == ([0.0, 1.0, 2.0] + [10.0 + t for t in range(count)])[-3:]


def test_only_active_written_slots_change() -> None:
    call = decode(slot=vector(3, -1, 0, 1, -1, 7, 8, 9, 10, 11), rows=vector(4, 4, 0, 2, 0, 1, 3, 4, 4, 4))
    before = call["window"].clone()
    y = gdn_conv(**call)
    changed = {s for s in range(12) if not torch.equal(before[s], call["window"][s])}
    assert changed == {3, 1, 7, 8, 9, 10, 11}
    y = y.view(10, 4, 20)
    assert not y[1].any()
    assert not y[2].any()
    assert not y[4].any()
    assert not y[3, 2:].any()
    assert y[3, :2].all()
    call = decode(write=False)
    before = call["window"].clone()
    gdn_conv(**call)
    assert torch.equal(before, call["window"])


def test_a_fresh_request_does_not_read_its_slot() -> None:
    clean, dirty = decode(fresh=torch.ones(10, dtype=torch.int32)), decode(fresh=torch.ones(10, dtype=torch.int32))
    dirty["window"].fill_(float("nan"))
    assert same_bits(gdn_conv(**clean), gdn_conv(**dirty))
    assert same_bits(clean["window"][:10], dirty["window"][:10])


def test_nan_stays_in_its_request() -> None:
    call = decode()
    call["x"][4:8] = float("nan")
    y = gdn_conv(**call).view(10, 4, 20)
    assert y[1].isnan().all()
    assert not y[[0, *range(2, 10)]].isnan().any()


def test_decode_rows_that_are_no_rectangle_are_refused() -> None:
    call = decode()
    with pytest.raises(ValueError, match="M=39 is not a multiple of slot axis 0: N=10"):
        gdn_conv(**call | {"x": call["x"][:39]})


def test_negative_zeros_have_the_same_sign_in_one_row_and_in_many() -> None:
    """Four products of -0 sum to +0, whether a request verifies one row or four."""
    x, weight, window = torch.full((4, 20), -0.0), torch.ones(20, 4), torch.full((1, 3, 20), -0.0)
    for kind in ("decode", "prefill"):
        many = gdn_conv(x, weight, window, vector(0), vector(0), vector(4), vector(0), *NOTHING, kind, False)
        one = gdn_conv(x[:1], weight, window, vector(0), vector(0), vector(1), vector(0), *NOTHING, kind, False)
        assert same_bits(many[:1], one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("absent", [(), (0, 3)], ids=["all active", "some inactive"])
def test_kept_windows_are_those_of_calls_that_end_there(kind: str, absent: tuple[int, ...], dtype: torch.dtype) -> None:
    made = gdn_conv.make(SIZES | {"M": 48, "N": 6, "SL": 40, "KS": 4}, 7, dtype)
    made |= {
        "slot": torch.arange(6).int(),
        "start": (torch.arange(6) * 8).int(),
        "rows": vector(8, 5, 1, 8, 2, 7),
        "fresh": vector(0, 1, 0, 0, 1, 0),
    }
    made |= {"kind": kind, "write": True, "keep_slot": torch.arange(10, 34).view(6, 4).int()}
    made["keep_at"] = torch.tensor([0, 1, 2, 5]).int().expand(6, 4).contiguous()
    made["keep_slot"][:, 2] = torch.where(torch.arange(6) == 5, -1, made["keep_slot"][:, 2])
    for i, name in zip(absent, ("slot", "rows"), strict=False):
        made[name][i] = {"slot": -1, "rows": 0}[name]
    kept, plain = clone(made), clone(made) | {"keep_slot": torch.full_like(made["keep_slot"], -1)}
    assert same_bits(gdn_conv(**kept), gdn_conv(**plain))
    expected = plain["window"]
    for i in range(6):
        for target, at in zip(made["keep_slot"][i].tolist(), made["keep_at"][i].tolist(), strict=True):
            if target >= 0 and 1 <= at <= made["rows"][i] and made["slot"][i] >= 0:
                ended = clone(plain) | {"window": made["window"].clone(), "rows": made["rows"].clamp(max=at)}
                gdn_conv(**ended)
                expected[target] = ended["window"][i]
    assert same_bits(kept["window"], expected)


def test_without_write_nothing_is_kept() -> None:
    call = decode(write=False, keep_slot=vector(11).expand(10, 1).contiguous(), keep_at=vector(2).expand(10, 1).contiguous())
    before = call["window"].clone()
    gdn_conv(**call)
    assert same_bits(call["window"], before)
    gdn_conv(**call | {"kind": "prefill"})
    assert same_bits(call["window"], before)
