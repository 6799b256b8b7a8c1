"""qsa_compress against its definition: rows in order, each stores its raw key, a closing row pools the last `ratio` of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import qsa_compress
from sm70kernels.testing import conforms, rounds_as_stated, same_bits


def naive(
    ik: Tensor,
    position: Tensor,
    slot: Tensor,
    first: Tensor,
    key_index: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    eps: float,
    ratio: int,
    ring: Tensor,
    keys: Tensor,
    h: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    flat, half = keys.view(-1, keys.shape[2]), cos.shape[1]
    for m in range(len(ik)):
        if slot[m] < 0:
            continue
        p, mine = int(position[m]), ring[int(slot[m])]
        mine[p % len(mine)] = ik[m]  # in row order, the ring always holds the last RR raw keys of the request
        if key_index[m] >= 0:
            pooled = h(torch.stack([mine[j % len(mine)] for j in range(p - ratio + 1, p + 1)]).sum(0) / ratio)
            norm = h(pooled / math.sqrt(float(pooled.square().mean()) + eps) * (1 + weight))
            key = norm.clone()
            for i in range(half):
                key[i] = norm[i] * cos[m, i] - norm[i + half] * sin[m, i]
                key[i + half] = norm[i + half] * cos[m, i] + norm[i] * sin[m, i]
            flat[int(key_index[m])] = key


test_matches_naive = conforms(qsa_compress, naive)
test_rounding_points = rounds_as_stated(qsa_compress, naive, dict(M=20))

SIZES = {"DI": 16, "RH": 4, "SL": 3, "RR": 12, "B": 6, "PK": 8}


def run(state: dict[str, Tensor], slot: int, start: int, raw: Tensor) -> None:
    """Feed raw keys of one request from position `start`; its blocks go to the cells from slot * 16 on."""
    m = len(raw)
    position = torch.arange(start, start + m, dtype=torch.int32)
    key_index = torch.where(position % 4 == 3, slot * 16 + position // 4, -1).long()
    angle = (position // 4 * 4).float().unsqueeze(1) * torch.tensor([1.0, 0.5, 0.25, 0.125])
    weight = torch.linspace(-0.2, 0.2, 16).to(raw.dtype)
    rows: Any = (torch.full((m,), slot, dtype=torch.int32), torch.zeros(m, dtype=torch.int32))
    cos, sin = angle.cos().to(raw.dtype), angle.sin().to(raw.dtype)
    qsa_compress(raw, position, *rows, key_index, cos, sin, weight, 1e-6, 4, state["ring"], state["keys"])


def fresh(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"ring": torch.full((3, 12, 16), math.nan, dtype=dtype), "keys": torch.full((6, 8, 16), math.nan, dtype=dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cuts", [[1] * 40, [3, 5, 8, 24], [40], [39, 1], [2, 38], [7, 7, 7, 7, 7, 5]])
def test_cuts_do_not_matter(cuts: list[int], dtype: torch.dtype) -> None:
    raw = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole, cut = fresh(dtype), fresh(dtype)
    run(whole, 1, 0, raw)
    at = 0
    for count in cuts:
        run(cut, 1, at, raw[at : at + count])
        at += count
    assert not whole["keys"].view(-1, 16)[16:26].isnan().any()
    assert whole["keys"].view(-1, 16)[:16].isnan().all()
    assert same_bits(whole["keys"], cut["keys"])
    assert same_bits(whole["ring"][1], raw[28:40].roll(28, 0))
    assert same_bits(whole["ring"], cut["ring"])


def test_a_rejected_draft_leaves_no_trace() -> None:
    raw, wrong = torch.randn(16, 16), torch.randn(16, 16)
    expected, got = fresh(), fresh()
    run(expected, 0, 0, raw)
    run(got, 0, 0, raw[:6])
    run(got, 0, 6, torch.cat([raw[6:7], wrong[7:12]]))  # verify six rows, one accepted: a block closed on rejected keys
    run(got, 0, 7, torch.cat([raw[7:9], wrong[9:13]]))
    run(got, 0, 9, raw[9:])
    assert same_bits(expected["keys"].view(-1, 16)[:4], got["keys"].view(-1, 16)[:4])


def test_a_request_that_starts_after_a_prefix_hit_needs_no_older_raw_keys() -> None:
    raw = torch.randn(12, 16)
    whole, late = fresh(), fresh()
    run(whole, 2, 0, raw)
    run(late, 2, 8, raw[8:])
    assert same_bits(whole["keys"].view(-1, 16)[34], late["keys"].view(-1, 16)[34])
    assert late["ring"][2, [0, 1, 2, 3]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_requests_in_one_call_equal_requests_apart(dtype: torch.dtype) -> None:
    """INV: rows of a request have the same effect alone and at any place among other requests and padding."""
    for seed in range(6):
        batch = qsa_compress.make({"M": 20, **SIZES}, seed, dtype)
        apart = {name: batch[name].clone() for name in ("ring", "keys")}
        starts = [m for m in range(20) if batch["first"][m] == m]
        for begin, end in reversed(list(zip(starts, [*starts[1:], 20], strict=True))):
            part = {name: batch[name][begin:end] for name in ("ik", "position", "slot", "key_index", "cos", "sin")}
            qsa_compress(**(batch | part | apart | {"first": torch.zeros(end - begin, dtype=torch.int32)}))
        qsa_compress(**batch)
        assert same_bits(batch["ring"], apart["ring"])
        assert same_bits(batch["keys"], apart["keys"])


def test_padding_rows_are_neither_read_nor_stored() -> None:
    batch = qsa_compress.make({"M": 12, **SIZES}, 3)
    batch |= {"slot": torch.full((12,), -1, dtype=torch.int32), "key_index": torch.full((12,), -1), "ik": torch.full((12, 16), math.nan)}
    before = batch["ring"].clone(), batch["keys"].clone()
    qsa_compress(**batch)
    assert same_bits((batch["ring"], batch["keys"]), before)


def test_the_mean_is_rounded_before_the_norm() -> None:
    """Four float16 keys whose mean is not a float16 number, and an eps so large that the norm cannot hide it."""
    state = fresh(torch.float16)
    raw = torch.ones(4, 16).half()
    raw[3] += 2.0**-10  # mean 1 + 2^-12 rounds to 1
    run(state, 0, 0, raw)
    other = fresh(torch.float16)
    run(other, 0, 0, torch.ones(4, 16).half())
    assert same_bits(state["keys"].view(-1, 16)[0], other["keys"].view(-1, 16)[0])


def test_a_ring_shorter_than_a_block_is_refused() -> None:
    batch = qsa_compress.make({"M": 4, **SIZES, "RR": 3})
    with pytest.raises(ValueError, match="the ring holds 3 raw keys, a block needs 4"):
        qsa_compress(**batch)
