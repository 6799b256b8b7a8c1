import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels.ops.gdn_replay import gdn_replay
from sm70kernels.ops.gdn_step import gdn_step
from sm70kernels.testing import clone, conforms, same_bits


def naive(
    state: Tensor,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slot: Tensor,
    accepted: Tensor,
    snapshot_slot: Tensor,
    snapshot_at: Tensor,
) -> None:
    L, N, _, C = qkv.shape
    _, _, HV, V, K = state.shape
    HK = (C - HV * V) // (2 * K)
    for layer in range(L):
        for i in range(N):
            if slot[i] < 0:
                continue
            for j in range(HV):
                h = j * HK // HV
                S = state[layer, slot[i], j].clone()
                for t in range(int(accepted[i])):
                    row = qkv[layer, i, t]
                    k, v = row[(HK + h) * K : (HK + h + 1) * K], row[2 * HK * K + j * V :][:V]
                    k = k / math.sqrt(float(k @ k) + 1e-6)
                    x = float(a[layer, i, t, j] + dt_bias[layer, j])
                    S = S * math.exp(-math.exp(float(A_log[layer, j])) * (x if x > 20 else math.log1p(math.exp(x))))
                    S = S + torch.outer((v - S @ k) / (1 + math.exp(-float(b[layer, i, t, j]))), k)
                    if snapshot_slot[i] >= 0 and snapshot_at[i] == t + 1:
                        state[layer, snapshot_slot[i], j] = S
                if accepted[i] > 0:
                    state[layer, slot[i], j] = S


test_matches_naive = conforms(gdn_replay, naive, examples=12)

SIZES = {"L": 3, "N": 8, "T": 5, "SL": 20, "HK": 2, "HV": 4, "V": 32, "K": 32}


def call(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Request i runs in slot i, accepts i % 6 rows and asks for no snapshot."""
    made = gdn_replay.make(SIZES, seed, dtype)
    made["slot"] = torch.arange(8, dtype=torch.int32)
    made["accepted"] = made["slot"] % 6
    made["snapshot_slot"] = torch.full_like(made["slot"], -1)
    made["snapshot_at"] = torch.zeros_like(made["slot"])
    return made


def stepped(made: dict[str, Any], rows: Tensor) -> Tensor:
    """The pool as gdn_step(write=True) leaves it after `rows` of each request's rows."""
    pool: Tensor = made["state"].clone()
    for layer in range(pool.shape[0]):
        inputs = [made[name][layer] for name in ("qkv", "a", "b", "A_log", "dt_bias")]
        gdn_step(*inputs, pool[layer], made["slot"], rows, True)
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_the_states_gdn_step_would_have_stored(dtype: torch.dtype) -> None:
    made = call(dtype)
    expected = stepped(made, made["accepted"])
    gdn_replay(**made)
    assert same_bits(made["state"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_snapshot_before_and_at_the_last_accepted_row(dtype: torch.dtype) -> None:
    made = call(dtype)
    made["snapshot_slot"] = torch.tensor([10, 11, 12, 13, -1, 15, 16, 17], dtype=torch.int32)
    made["snapshot_at"] = torch.tensor([1, 1, 1, 3, 2, 2, 1, 0], dtype=torch.int32)
    before, at, end = made["state"].clone(), stepped(made, made["snapshot_at"]), stepped(made, made["accepted"])
    gdn_replay(**made)
    assert same_bits(made["state"][:, :8], end[:, :8])
    for i, target in ((1, 11), (2, 12), (3, 13), (5, 15)):
        assert same_bits(made["state"][:, target], at[:, i])
    for target in (10, 16, 17, 8, 9, 14, 18, 19):  # accepted 0 (requests 0 and 6), snapshot_at 0 (request 7), slots of nobody
        assert same_bits(made["state"][:, target], before[:, target])


@pytest.mark.parametrize("accepted", [1, 2, 5])
def test_a_snapshot_is_the_state_single_steps_pass_through(accepted: int) -> None:
    """Every request accepts the same rows and keeps the state after each of them in turn, as one call a row would leave it."""
    made = call()
    made["accepted"].fill_(accepted)
    states, pool = [], made["state"].clone()
    for t in range(accepted):
        for layer in range(pool.shape[0]):
            row = [made[name][layer, :, t : t + 1].contiguous() for name in ("qkv", "a", "b")]
            gdn_step(*row, made["A_log"][layer], made["dt_bias"][layer], pool[layer], made["slot"], torch.ones_like(made["slot"]), True)
        states.append(pool[:, :8].clone())
    for at in range(1, accepted + 1):
        kept = clone(made) | {"snapshot_slot": made["slot"] + 10, "snapshot_at": torch.full_like(made["slot"], at)}
        gdn_replay(**kept)
        assert same_bits(kept["state"][:, 10:18], states[at - 1])
        assert same_bits(kept["state"][:, :8], states[-1])


def test_two_steps_in_a_row_equal_one_long_one() -> None:
    made = call()
    made["accepted"].fill_(5)
    expected = stepped(made, made["accepted"])
    first, second = made | {"accepted": torch.full((8,), 2, dtype=torch.int32)}, made | {"accepted": torch.full((8,), 3, dtype=torch.int32)}
    second |= {name: made[name][:, :, 2:].contiguous() for name in ("qkv", "a", "b")}
    gdn_replay(**first)
    gdn_replay(**second)
    assert same_bits(made["state"], expected)


def test_nothing_accepted_or_no_slot_stores_nothing() -> None:
    made = call()
    made["accepted"][:4], made["slot"][4:] = 0, -1
    made["snapshot_slot"], made["snapshot_at"] = made["snapshot_slot"] + 11 + made["slot"].clamp(min=0), made["snapshot_at"] + 1
    before = made["state"].clone()
    gdn_replay(**made)
    assert same_bits(made["state"], before)


def test_rejected_rows_and_foreign_slots_are_not_read() -> None:
    made = call()
    poisoned = clone(made)
    for i, n in enumerate(made["accepted"].tolist()):
        for name in ("qkv", "a", "b"):
            poisoned[name][:, i, n:] = float("nan")
    poisoned["state"][:, 8:] = float("nan")
    gdn_replay(**made)
    gdn_replay(**poisoned)
    assert same_bits(made["state"][:, :8], poisoned["state"][:, :8])


def test_a_request_does_not_depend_on_the_batch() -> None:
    made = call()
    together = clone(made)
    gdn_replay(**together)
    for i in range(8):
        one = clone(made) | {name: made[name][:, i : i + 1].contiguous() for name in ("qkv", "a", "b")}
        one |= {name: made[name][i : i + 1].clone() for name in ("slot", "accepted", "snapshot_slot", "snapshot_at")}
        gdn_replay(**one)
        assert same_bits(one["state"][:, i], together["state"][:, i])


def test_more_rows_than_were_recorded_are_refused() -> None:
    made = call()
    made["accepted"][3] = 6
    before = made["state"].clone()
    with pytest.raises(ValueError, match="accepted 6 of T=5"):
        gdn_replay(**made)
    assert same_bits(made["state"], before)
