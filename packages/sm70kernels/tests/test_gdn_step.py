import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels.ops.gdn_step import gdn_step
from sm70kernels.testing import clone, conforms, same_bits


def softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def token(M: Tensor, qkv: Tensor, a: float, b: float, A_log: float, dt_bias: float, j: int, HK: int, HV: int) -> tuple[Tensor, Tensor]:
    """One token of value head j, in the notation of the paper: M [K, V] -> (next M, o [V])."""
    K, V = M.shape
    h = j // (HV // HK)
    q, k = qkv[h * K : h * K + K], qkv[(HK + h) * K : (HK + h) * K + K]
    v = qkv[2 * HK * K + j * V : 2 * HK * K + j * V + V]
    q = q / math.sqrt(float((q * q).sum()) + 1e-6) / math.sqrt(K)
    k = k / math.sqrt(float((k * k).sum()) + 1e-6)
    M = M * math.exp(-math.exp(A_log) * softplus(a + dt_bias))
    delta = sigmoid(b) * (v - M.T @ k)
    M = M + torch.outer(k, delta)
    return M, M.T @ q


def naive(
    qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, slot: Tensor, rows: Tensor, write: bool
) -> Tensor:
    N, T, _ = qkv.shape
    _, HV, V, K = state.shape
    HK = (qkv.shape[2] - HV * V) // (2 * K)
    o = torch.zeros(N, T, HV, V, dtype=torch.float64)
    for i in range(N):
        if slot[i] < 0:
            continue
        for j in range(HV):
            M = state[slot[i], j].T.clone()
            for t in range(int(rows[i])):
                M, o[i, t, j] = token(M, qkv[i, t], float(a[i, t, j]), float(b[i, t, j]), float(A_log[j]), float(dt_bias[j]), j, HK, HV)
            if write:
                state[slot[i], j] = M.T
    return o


test_matches_naive = conforms(gdn_step, naive, examples=12)

SIZES = {"N": 16, "T": 4, "SL": 20, "HK": 2, "HV": 4, "V": 32, "K": 32}


def batch(dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int) -> dict[str, Any]:
    """All requests active with all rows; request i in slot i."""
    made = gdn_step.make(SIZES | sizes, seed, dtype)
    made["slot"] = torch.arange(made["qkv"].shape[0], dtype=torch.int32)
    made["rows"] = torch.full_like(made["slot"], made["qkv"].shape[1])
    made["write"] = True
    return made


def pick(call: dict[str, Any], index: list[int]) -> dict[str, Any]:
    """The call with only the given requests, in the given order."""
    return clone(call) | {name: call[name][index].contiguous() for name in ("qkv", "a", "b", "slot", "rows")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_request_does_not_depend_on_the_batch_or_its_place(dtype: torch.dtype) -> None:
    for widths in ({}, {"V": 8, "K": 16}, {"V": 24, "K": 40, "HK": 1, "HV": 3}):
        call = batch(dtype, **widths)
        call["rows"] = torch.randint(0, 5, (16,), generator=torch.Generator().manual_seed(1)).int()
        together = clone(call)
        o = gdn_step(**together)
        for index in ([0], [7], [15], [3, 9, 1], list(range(15, -1, -1)), [*range(5, 16)]):
            some = pick(call, index)
            assert same_bits(gdn_step(**some), o[index])
            for i in index:
                assert same_bits(some["state"][i], together["state"][i])


def test_a_row_does_not_depend_on_how_many_follow() -> None:
    call = batch()
    whole = clone(call)
    o = gdn_step(**whole)
    apart, parts = clone(call), []
    for t in range(4):
        one = apart | {name: call[name][:, t : t + 1].contiguous() for name in ("qkv", "a", "b")}
        parts.append(gdn_step(**one | {"rows": torch.ones(16, dtype=torch.int32)}))
    assert same_bits(torch.cat(parts, 1), o)
    assert same_bits(apart["state"], whole["state"])


def test_padding_and_write_leave_states_alone() -> None:
    call = batch()
    call["slot"][3], call["rows"][5], call["slot"][0] = -1, 0, 19
    call["state"][17:19] = float("nan")
    before = call["state"].clone()
    o = gdn_step(**call)
    assert not o[3].any()
    assert not o[5].any()
    unchanged = [s for s in range(20) if same_bits(before[s], call["state"][s])]
    assert unchanged == [0, 3, 5, 16, 17, 18]
    call["state"], call["write"] = before.clone(), False
    assert same_bits(gdn_step(**call), o)
    assert same_bits(call["state"], before)


def test_nan_stays_in_its_request() -> None:
    call = batch()
    clean = gdn_step(**clone(call))
    call["qkv"][2, 1:] = float("nan")
    o = gdn_step(**call)
    others = [i for i in range(16) if i != 2]
    assert same_bits(o[others], clean[others])
    assert same_bits(o[2, 0], clean[2, 0])
    assert o[2, 1:].isnan().all()


def test_edges_of_gates_and_heads() -> None:
    call = batch(N=6, T=1)
    call["state"][0] = 1e4
    call["A_log"].zero_()
    call["a"][0], call["a"][1], call["a"][2] = 40.0, -torch.inf, torch.inf  # linear branch of softplus, no decay, nothing left
    call["b"][3], call["b"][4] = -torch.inf, torch.inf  # no write, full write
    call["qkv"][5] = 0.0  # zero q, k and v
    expected = clone(call)
    o = gdn_step(**call)
    assert o.isfinite().all()
    assert call["state"][:6].isfinite().all()
    wide: dict[str, Any] = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in expected.items()}
    wide["a"][2] = 1e3
    truth = naive(**wide)
    torch.testing.assert_close(o.double(), truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(call["state"].double(), wide["state"], rtol=1e-5, atol=1e-5)


def test_channels_that_hold_no_whole_key_head_are_refused() -> None:
    call = batch(N=1)
    with pytest.raises(ValueError, match=r"C"):
        gdn_step(**call | {"qkv": call["qkv"][..., :-1].contiguous()})


def test_no_requests() -> None:
    call = pick(batch(), [])
    assert gdn_step(**call).shape == (0, 4, 4, 32)


def test_the_epsilon_of_short_heads_is_added_to_their_sum_of_squares() -> None:
    """q and k of length near 1e-3: 1e-6 halves their square there, and a mean instead of the sum would leave nothing of them."""
    call = batch(N=2)
    call["qkv"] *= 2e-4
    wide: dict[str, Any] = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in clone(call).items()}
    o, truth = gdn_step(**call), naive(**wide)
    torch.testing.assert_close(o.double(), truth, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(call["state"].double(), wide["state"], rtol=1e-4, atol=1e-6)
