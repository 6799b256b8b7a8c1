"""qsa_prepare against its definition: norm, rounding, rotation of the first dimensions, for every head in turn."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels import qsa_prepare
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent, same_bits


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = 1 / math.sqrt(sum(float(value) ** 2 for value in x) / len(x) + eps)
    return torch.tensor([float(value) * scale * (1 + float(w)) for value, w in zip(x, weight, strict=True)], dtype=torch.float64)


def roped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y, half = x.clone(), len(cos)
    for i in range(half):
        y[i] = x[i] * cos[i] - x[i + half] * sin[i]
        y[i + half] = x[i + half] * cos[i] + x[i] * sin[i]
    return y


def naive(
    qkvg: Tensor,
    iqk: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    iq_weight: Tensor,
    eps: float,
    kv_heads: int,
    h: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, ...]:
    m, d, di = len(qkvg), len(q_weight), len(iq_weight)
    heads = qkvg.shape[1] // (2 * d) - kv_heads
    q, gate, k, v = (qkvg.new_zeros(m, n, d) for n in (heads, heads, kv_heads, kv_heads))
    iq, ik = iqk.new_zeros(m, iqk.shape[1] // di - 1, di), iqk.new_zeros(m, di)
    for r in range(m):
        for j in range(heads):
            at = 2 * j * d
            q[r, j] = roped(h(normed(qkvg[r, at : at + d], q_weight, eps)), cos[r], sin[r])
            gate[r, j] = qkvg[r, at + d : at + 2 * d]
        for j in range(kv_heads):
            at = (2 * heads + j) * d
            k[r, j] = roped(h(normed(qkvg[r, at : at + d], k_weight, eps)), cos[r], sin[r])
            v[r, j] = qkvg[r, at + kv_heads * d : at + (kv_heads + 1) * d]
        for j in range(iq.shape[1]):
            iq[r, j] = roped(h(normed(iqk[r, j * di : (j + 1) * di], iq_weight, eps)), cos[r], sin[r])
        ik[r] = iqk[r, -di:]
    return q, gate, k, v, iq, ik


test_matches_naive = conforms(qsa_prepare, naive, examples=5, dims={"D": 24, "DI": 16})
test_rounding_points = rounds_as_stated(qsa_prepare, naive, dict(M=20))
test_rows = rows_independent(qsa_prepare)

SIZES = {"M": 3, "HQ": 4, "HK": 2, "D": 24, "HI": 4, "DI": 16, "RH": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gate_value_and_index_key_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    arguments = qsa_prepare.make(SIZES, dtype=dtype)
    _, gate, _, v, _, ik = qsa_prepare(**arguments)
    heads = arguments["qkvg"].view(3, 12, 24)
    assert same_bits(gate, heads[:, 1:8:2].contiguous())
    assert same_bits(v, heads[:, 10:].contiguous())
    assert same_bits(ik, arguments["iqk"][:, -16:].contiguous())


def test_no_rotation_leaves_the_norm_and_a_quarter_turn_swaps_the_halves() -> None:
    arguments = qsa_prepare.make(SIZES)
    flat, turned = dict(arguments), dict(arguments)
    flat |= {"cos": torch.ones(3, 4), "sin": torch.zeros(3, 4)}
    turned |= {"cos": torch.zeros(3, 4), "sin": torch.ones(3, 4)}
    q0, q1 = qsa_prepare(**flat)[0], qsa_prepare(**turned)[0]
    assert torch.equal(q1[..., :4], -q0[..., 4:8])
    assert torch.equal(q1[..., 4:8], q0[..., :4])
    assert torch.equal(q1[..., 8:], q0[..., 8:])


def test_zero_vectors_stay_zero_and_bad_rows_stay_alone() -> None:
    arguments = qsa_prepare.make(SIZES)
    clean = qsa_prepare(**arguments)
    arguments["qkvg"][0], arguments["iqk"][0] = 0.0, 0.0
    arguments["qkvg"][1, 5] = float("nan")
    got = qsa_prepare(**arguments)
    assert not any(out[0].any() for out in got)
    assert got[0][1, 0].isnan().any()
    assert all(same_bits(a[2], b[2]) for a, b in zip(got, clean, strict=True))


def test_the_norm_is_rounded_before_the_rotation() -> None:
    """With cos = 1, sin = 1/2 in float16, rotating the unrounded norm gives other values for some of many elements."""
    arguments = qsa_prepare.make({**SIZES, "M": 20}, dtype=torch.float16)
    arguments |= {"cos": torch.ones(20, 4).half(), "sin": torch.full((20, 4), 0.5).half()}
    x = arguments["qkvg"].view(20, 12, 24)[:, 0].double()
    norm = x / (x.square().mean(-1, keepdim=True) + arguments["eps"]).sqrt() * (1 + arguments["q_weight"].double())
    rounded = norm.half().double()
    expected = (rounded[:, :4] - rounded[:, 4:8] / 2).half()
    got = qsa_prepare(**arguments)[0][:, 0, :4]
    assert torch.equal(got, expected)
    assert not torch.equal(got, (norm[:, :4] - norm[:, 4:8] / 2).half())
