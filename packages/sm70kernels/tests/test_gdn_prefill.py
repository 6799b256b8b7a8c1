import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels.ops.gdn_prefill import gdn_prefill
from sm70kernels.ops.gdn_step import gdn_step
from sm70kernels.testing import clone, conforms, same_bits


def naive(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slot: Tensor,
    start: Tensor,
    rows: Tensor,
    fresh: Tensor,
    keep_slot: Tensor,
    keep_at: Tensor,
) -> Tensor:
    """The recurrent form, one token at a time."""
    M, C = qkv.shape
    _, HV, V, K = state.shape
    HK = (C - HV * V) // (2 * K)
    o = torch.zeros(M, HV, V, dtype=torch.float64)
    for i in range(slot.shape[0]):
        if slot[i] < 0 or rows[i] == 0:
            continue
        for j in range(HV):
            h = j * HK // HV
            S = torch.zeros(V, K, dtype=torch.float64) if fresh[i] else state[slot[i], j].clone()
            for m in range(int(start[i]), int(start[i] + rows[i])):
                q, k, v = qkv[m, h * K :][:K], qkv[m, (HK + h) * K :][:K], qkv[m, 2 * HK * K + j * V :][:V]
                q, k = q / math.sqrt(float(q @ q) + 1e-6), k / math.sqrt(float(k @ k) + 1e-6)
                x = float(a[m, j] + dt_bias[j])
                S = S * math.exp(-math.exp(float(A_log[j])) * (x if x > 20 else math.log1p(math.exp(x))))
                S = S + torch.outer((v - S @ k) / (1 + math.exp(-float(b[m, j]))), k)
                o[m, j] = S @ q / math.sqrt(K)
                for target, at in zip(keep_slot[i], keep_at[i], strict=True):
                    if target >= 0 and at == m + 1 - start[i]:
                        state[target, j] = S
            state[slot[i], j] = S
    return o


test_matches_naive = conforms(gdn_prefill, naive, examples=6)

SIZES = {"M": 320, "N": 1, "KS": 0, "SL": 3, "HK": 2, "HV": 4, "V": 32, "K": 32}


def vector(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pairs(*of_each: list[int]) -> Tensor:
    return torch.tensor(of_each, dtype=torch.int32)


def prompt(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int) -> dict[str, Any]:
    """One prompt of `rows` rows in slot 1, from the state that lies there."""
    made = gdn_prefill.make(SIZES | {"M": rows} | sizes, seed, dtype)
    return made | {"slot": vector(1), "start": vector(0), "rows": vector(rows), "fresh": vector(0)}


def run(call: dict[str, Any], cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Run a prompt in slices cut at the given rows, each padded to a multiple of 64 with NaN; return o and the last state."""
    call, parts, total = clone(call), [], int(call["rows"])
    for first, last in zip([0, *cuts], [*cuts, total], strict=True):
        piece = dict(call)
        for name in ("qkv", "a", "b"):
            padded = torch.full((-(-(last - first) // 64) * 64, *call[name].shape[1:]), float("nan"), dtype=call[name].dtype)
            padded[: last - first] = call[name][first:last]
            piece[name] = padded
        piece |= {"rows": vector(last - first), "fresh": call["fresh"] if first == 0 else vector(0)}
        parts.append(gdn_prefill(**piece)[: last - first])
    return torch.cat(parts), call["state"][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_cuts_at_multiples_of_64_change_no_bit(dtype: torch.dtype) -> None:
    call = prompt(300, dtype)
    whole = run(call, [])
    for cuts in ([64], [128], [192], [256], [64, 128, 192, 256], [64, 256]):
        assert same_bits(run(call, cuts), whole), cuts


def test_a_prompt_does_not_depend_on_who_shares_the_call() -> None:
    alone = prompt(100)
    o, state = run(alone, [])
    for place in range(3):
        call = gdn_prefill.make(SIZES | {"M": 384, "N": 3, "SL": 4}, seed=9)
        call |= {"slot": vector(0, 2, 3), "start": vector(0, 128, 256), "rows": vector(128, 60, 1), "fresh": vector(0, 1, 0)}
        call |= {name: alone[name] for name in ("A_log", "dt_bias")}
        first = 128 * place
        for name in ("qkv", "a", "b"):
            call[name][first : first + 100] = alone[name]
        call["state"][int(call["slot"][place])] = alone["state"][1]
        call["rows"][place], call["fresh"][place] = 100, 0
        assert same_bits(gdn_prefill(**call)[first : first + 100], o)
        assert same_bits(call["state"][int(call["slot"][place])], state)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 129])
def test_close_to_the_recurrent_form(rows: int) -> None:
    call = prompt(rows, seed=rows, V=24, K=40)
    stepped, outputs = clone(call), []
    for m in range(rows):
        one = [stepped[name][None, m : m + 1].contiguous() for name in ("qkv", "a", "b")]
        outputs.append(gdn_step(*one, stepped["A_log"], stepped["dt_bias"], stepped["state"], vector(1), vector(1), True)[0])
    o = gdn_prefill(**call)
    torch.testing.assert_close(o, torch.cat(outputs), rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(call["state"], stepped["state"], rtol=1e-4, atol=2e-6)


def test_one_row_leaves_other_rows_and_slots_alone() -> None:
    call = prompt(64)
    call |= {"rows": vector(1), "fresh": vector(1)}
    call["qkv"][1:] = float("nan")
    call["state"].fill_(float("nan"))
    o = gdn_prefill(**call)
    assert o[0].isfinite().all()
    assert not o[1:].any()
    assert call["state"][1].isfinite().all()
    assert call["state"][[0, 2]].isnan().all()


def test_inactive_and_empty_sequences() -> None:
    call = prompt(64)
    before = call["state"].clone()
    assert not gdn_prefill(**call | {"slot": vector(-1)}).any()
    assert not gdn_prefill(**call | {"rows": vector(0), "fresh": vector(1)}).any()
    assert same_bits(call["state"], before)


@pytest.mark.parametrize("a", [-torch.inf, 30.0, 3e4, torch.inf], ids=str)
def test_no_decay_and_decay_that_underflows(a: float) -> None:
    """At -inf nothing decays; from 3e4 up a row keeps nothing of those before it; 30 is the linear branch of softplus."""
    call = prompt(130)
    call["A_log"].zero_()
    call["a"][20], call["a"][70:75], call["a"][129] = a, a, a
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in clone(call).items()}
    wide["a"].clamp_(max=1e4)
    truth = naive(**wide)
    o = gdn_prefill(**call)
    torch.testing.assert_close(o.double(), truth, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(call["state"].double(), wide["state"], rtol=1e-4, atol=2e-6)


def test_many_tiny_sequences() -> None:
    call = gdn_prefill.make(SIZES | {"M": 512, "N": 8, "SL": 8})
    call |= {"slot": torch.randperm(8).int(), "start": torch.arange(8).int() * 64, "rows": vector(1, 3, 64, 0, 2, 63, 7, 1)}
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in clone(call).items()}
    torch.testing.assert_close(gdn_prefill(**call).double(), naive(**wide), rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(call["state"].double(), wide["state"], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kept_states_are_those_of_slices_cut_there(dtype: torch.dtype) -> None:
    call = prompt(256, dtype, SL=8)
    cut, kept = clone(call), clone(call) | {"keep_slot": pairs([3, -1, 5, 0, 6, 7]), "keep_at": pairs([0, 64, 64, 128, 256, 320])}
    o = gdn_prefill(**kept)
    for rows, target in ((64, 5), (128, 0), (256, 6)):
        assert same_bits(run(cut | {"rows": vector(rows)}, [])[1], kept["state"][target]), rows
    whole = clone(call)
    assert same_bits(gdn_prefill(**whole), o)
    assert same_bits(kept["state"][1], whole["state"][1])
    assert same_bits(kept["state"][[2, 3, 4, 7]], call["state"][[2, 3, 4, 7]])


def test_each_sequence_keeps_its_own_states() -> None:
    call = gdn_prefill.make(SIZES | {"M": 448, "N": 4, "SL": 12}, seed=3)
    call |= {"slot": vector(0, -1, 2, 3), "start": vector(0, 128, 256, 384), "rows": vector(128, 128, 100, 0), "fresh": vector(0, 0, 1, 0)}
    alone = clone(call)
    before = call["state"].clone()
    call |= {"keep_slot": pairs([4, 5], [6, 7], [8, 9], [10, 11]), "keep_at": pairs([64, 128], [64, 128], [64, 128], [0, 64])}
    gdn_prefill(**call)
    for target, rows in ((4, vector(64, 0, 0, 0)), (5, vector(128, 0, 0, 0)), (8, vector(0, 0, 64, 0))):
        one = clone(alone)
        gdn_prefill(**one | {"rows": rows})
        assert same_bits(call["state"][target], one["state"][0 if rows[0] else 2])
    unused = [1, 6, 7, 9, 10, 11]
    assert same_bits(call["state"][unused], before[unused])


def test_a_state_inside_a_chunk_cannot_be_kept() -> None:
    call = prompt(200, SL=5) | {"keep_slot": pairs([0, 2, 3]), "keep_at": pairs([64, 100, 192])}
    before = call["state"].clone()
    with pytest.raises(
        ValueError, match=r"keep_at of sequence 0: 100 of 200 rows for slot 2, .* after 64 rows, or end the slice after 100"
    ):
        gdn_prefill(**call)
    assert same_bits(call["state"], before)
    with pytest.raises(ValueError, match="keep_at of sequence 0: 200 of 200 rows"):
        gdn_prefill(**call | {"keep_at": pairs([64, 128, 200])})
    gdn_prefill(**call | {"keep_at": pairs([64, 128, 201])})  # past the last row: stores nothing
    assert same_bits(call["state"][[3, 4]], before[[3, 4]])
