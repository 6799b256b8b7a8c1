import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels import experts
from sm70kernels.banks import FORMATS, Int8, Nvfp4, bank_bytes, dequantise, pack
from sm70kernels.banks_inputs import random_weights
from sm70kernels.inputs import Draw
from sm70kernels.op import ContractError
from sm70kernels.ops.moe_qpn import moe_qpn, pack13
from sm70kernels.testing import DTYPES, clone, conforms, rounds_as_stated, rows_independent, same_bits

from .moe_definition import large, naive


@pytest.fixture(autouse=True, params=["dense", "one expert at a time", "grouped"])
def _every_form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test in each form the reference may take for a bank: all experts in one product, one by one, only the chosen ones.

    Kernels have one form, so their tests run once.
    """
    if request.param != "dense" and any(name in request.node.name for name in ("emulator", "gpu", "kernel")):
        pytest.skip("a kernel has one form")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "one expert at a time":
            patch.setattr(experts, "batched", lambda *shape: False)
        if request.param == "grouped":
            patch.setattr(experts, "DENSE_WEIGHTS", 0)
        yield


def _with_a_strong_shared_expert(arguments: dict[str, Any]) -> None:
    """Half of the rows have no routes, so that the roundings of the shared expert show; its gate logit is large enough to be rounded."""
    generator, hidden, wide = torch.Generator().manual_seed(5), arguments["x"].shape[1], 2 * arguments["w2"].shape[2]
    arguments["ids"][::2] = -1
    arguments |= dict(shared13=torch.randn(wide, hidden, generator=generator).half(), shared2=arguments["w2"][:, 0].contiguous())
    arguments["shared_gate"] = torch.randn(1, hidden, generator=generator).half()


test_matches_naive = conforms(moe_qpn, naive, large=large, examples=5)
test_rows = rows_independent(moe_qpn)
test_rounding_points = rounds_as_stated(moe_qpn, naive, dict(M=20), change=_with_a_strong_shared_expert)


def case(m: int = 20, dtype: torch.dtype = torch.float32, shared: bool = True, seed: int = 3) -> dict[str, Any]:
    """Arguments with valid ids: X=8, K=4, E=40, I=20, J=8."""
    made = moe_qpn.make(dict(M=m, K=4, X=8, E=40, I=20, J=8), seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    made["ids"] = torch.randint(0, 8, (m, 4), generator=generator).int()
    made["shared13"] = torch.randn(16, 40, generator=generator).to(dtype) if shared else None
    made["shared2"] = torch.randn(40, 8, generator=generator).to(dtype) if shared else None
    made["shared_gate"] = torch.randn(1, 40, generator=generator).to(dtype) if shared else None
    return made


def one_row(arguments: dict[str, Any], row: int) -> dict[str, Any]:
    return arguments | {name: arguments[name][row : row + 1].contiguous() for name in ("x", "ids", "weights")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_keep_their_bits_across_tiles_and_routings(dtype: torch.dtype) -> None:
    a = case(64, dtype)
    a["ids"][:, 1] = 5  # one expert fills several decode tiles
    out = moe_qpn(**a)
    for row in (0, 15, 16, 47, 63):
        assert same_bits(moe_qpn(**one_row(a, row)), out[row : row + 1])
    crowd = clone(a)
    crowd["ids"][:] = 2  # another routing of all the others
    crowd["ids"][40] = a["ids"][40]
    assert same_bits(moe_qpn(**crowd)[40], out[40])


def test_invalid_ids_contribute_nothing_whatever_their_weight() -> None:
    a = case(shared=False)
    a["ids"][3] = torch.tensor([-1, 8, 2, 100_000])
    a["weights"][3] = torch.tensor([math.nan, math.inf, 0.5, 1.0])
    a["ids"][4] = torch.tensor([-1, 8, -5, 9])
    a["weights"][4] = math.nan
    out = moe_qpn(**a)
    only = one_row(a, 3)
    only["ids"], only["weights"] = torch.tensor([[2]], dtype=torch.int32), torch.tensor([[0.5]])
    assert same_bits(out[3:4], moe_qpn(**only))
    assert same_bits(out[4], torch.zeros(40))  # +0, not -0


def test_an_invalid_id_leaves_the_first_and_last_expert_alone() -> None:
    """Invalid ids stand next to valid ones that a clamped id would fall on, whose expert counts once, or is broken and not chosen."""
    a = case(shared=False)
    a["ids"][:], only = torch.tensor([7, 9, 0, -1]), case(shared=False)
    only["ids"], only["weights"] = torch.tensor([[7, 0]] * 20, dtype=torch.int32), a["weights"][:, ::2].contiguous()
    assert torch.allclose(moe_qpn(**a), moe_qpn(**only), rtol=1e-6)
    a["ids"][:], only["ids"][:] = torch.tensor([3, 9, 4, -1]), torch.tensor([3, 4])
    a["w13"][[0, 7]] = math.inf
    assert torch.allclose(moe_qpn(**a), moe_qpn(**only), rtol=1e-6)


def test_a_row_without_routes_keeps_its_shared_expert() -> None:
    a = case()
    a["ids"][:] = -1
    expected = naive(**{name: item.double() if isinstance(item, Tensor) and name != "ids" else item for name, item in a.items()})
    assert torch.allclose(moe_qpn(**a).double(), expected, atol=1e-4)
    assert (expected != 0).all()


def test_duplicate_ids_are_routes_of_their_own() -> None:
    a = case(shared=False)
    a["ids"][:] = 6
    a["weights"][:] = torch.tensor([0.25, 0.5, 0.125, 0.125])
    once = a | dict(ids=a["ids"][:, :1].contiguous(), weights=torch.ones(20, 1))
    assert torch.allclose(moe_qpn(**a), moe_qpn(**once), rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_broken_row_touches_no_other_row(bad: float) -> None:
    a = case()
    clean = moe_qpn(**a)
    a["x"][7, 3] = bad
    dirty = moe_qpn(**a)
    assert not torch.isfinite(dirty[7]).all()
    dirty[7] = clean[7]
    assert same_bits(dirty, clean)


def test_a_nan_weight_stays_in_its_row_and_a_zero_weight_counts_as_zero() -> None:
    a = case()
    a["weights"][2] = 0.0
    clean = moe_qpn(**a)
    a["weights"][9, 1] = math.nan
    dirty = moe_qpn(**a)
    assert torch.isnan(dirty[9]).all()
    dirty[9] = clean[9]
    assert same_bits(dirty, clean)
    bare = case(shared=False)
    bare["weights"][2] = 0.0
    assert torch.equal(moe_qpn(**bare)[2], torch.zeros(40))


def test_a_broken_expert_reaches_only_the_rows_that_chose_it() -> None:
    a = case()
    a["w13"][5] = math.nan
    out = moe_qpn(**a)
    assert torch.equal(torch.isnan(out).any(1), (a["ids"] == 5).any(1))


@pytest.mark.parametrize("gate", [-math.inf, -60000.0, 60000.0, math.inf], ids=str)
def test_silu_is_stable_and_overflow_stays_infinite(gate: float) -> None:
    """x is one-hot, so that w13 holds the gate and up of each route; up is 2: 60000 * 2 overflows float16."""
    a = case(1, torch.float16, shared=False)
    a["x"].zero_()[0, 0] = 1.0
    a["ids"][:], a["weights"][:] = 0, 1.0
    scale = math.copysign(4.0, gate) if math.isinf(gate) else 1.0
    a["x"] *= abs(scale)
    a["w13"][0].zero_()
    a["w13"][0, :20, 0] = 60000.0 * math.copysign(1.0, gate)  # times 4 it overflows to the infinity under test
    a["w13"][0, 20:, 0] = 2.0
    a["w2"][:, 0] = 1.0
    out = moe_qpn(**a)
    assert torch.equal(out, torch.full_like(out, math.inf if gate > 0 else 0.0))


@pytest.mark.parametrize(("sign", "share"), [(1.0, 1.0), (-1.0, 0.0)])
def test_an_infinite_shared_gate_opens_or_shuts(sign: float, share: float) -> None:
    a = case(dtype=torch.float16)
    a["x"].abs_().add_(1.0)
    a["ids"][:] = -1
    a["shared_gate"][:] = 60000.0 * sign
    ungated = a | dict(shared_gate=torch.full_like(a["shared_gate"], 0.0))  # sigmoid(0) = 1/2, exact
    assert torch.allclose(moe_qpn(**a).float(), moe_qpn(**ungated).float() * 2 * share, rtol=1e-3)


def test_no_rows() -> None:
    assert moe_qpn(**case(0)).shape == (0, 40)


def test_a_shared_expert_given_in_part_is_refused() -> None:
    with pytest.raises(ContractError, match="shared2"):
        moe_qpn(**(case() | dict(shared2=None)))
    with pytest.raises(ContractError, match="shared_gate"):
        moe_qpn(**(case(shared=False) | dict(shared_gate=torch.zeros(1, 40))))


# Packed banks and the kernel.


def packed_case(m: int = 20, format: str = "int4", shared: bool = True, seed: int = 3, slots: int = 4, **sizes: int) -> dict[str, Any]:
    """Arguments with valid ids and packed banks: X=8, E=64, I=J=32 unless `sizes` says otherwise."""
    dims = dict(M=m, K=slots, X=8, E=64, I=32, J=32, PHASE=0) | sizes
    dims |= dict(B13=bank_bytes(format, 2 * dims["I"], dims["E"]), B2=bank_bytes(format, dims["E"], dims["I"]))
    made = moe_qpn.make(dims, seed, torch.float16) | dict(format=format, phase=None)
    draw = Draw("packed13", (), torch.uint8, dims, torch.Generator().manual_seed(seed), {})
    for name, n, k, packing in (("packed13", 2 * dims["I"], dims["E"], pack13), ("packed2", dims["E"], dims["I"], pack)):
        made[name] = torch.stack([packing(random_weights(draw, format, n, k, 0)) for _ in range(8)])
    made["ids"] = torch.randint(0, 8, (m, slots), generator=draw.generator).int()
    for name, shape in (("shared13", (2 * dims["I"], dims["E"])), ("shared2", (dims["E"], dims["I"])), ("shared_gate", (1, dims["E"]))):
        made[name] = (draw.normal(*shape) * 0.2).half() if shared else None
    return made


def emulated(**arguments: Any) -> Tensor:
    return moe_qpn.emulate(**arguments)[0]


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for the order of float32 sums: at most a few of float16's last places of the largest value."""
    return bool(torch.allclose(a.float(), b.float(), rtol=0, atol=float(b.float().abs().max()) * 2.0**-9))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shared", [True, False])
def test_packed_banks_give_what_their_weights_give_dense(format: str, shared: bool) -> None:
    a = packed_case(format=format, shared=shared)
    w13 = torch.stack([dequantise(bank, format, 64, 64) for bank in a["packed13"]])
    w13 = torch.cat([w13[:, 0::2], w13[:, 1::2]], 1)
    w2 = torch.stack([dequantise(bank, format, 64, 32) for bank in a["packed2"]], 1)
    dense = a | dict.fromkeys(("format", "width", "phase", "packed13", "packed2"))
    if format in ("int4", "nvfp4"):
        assert close(moe_qpn(**a), moe_qpn(**(dense | dict(w13=w13.half(), w2=w2.half()))))
    wide = {name: item.float() if isinstance(item, Tensor) and item.is_floating_point() else item for name, item in a.items()}
    dense = wide | dict.fromkeys(("format", "width", "phase", "packed13", "packed2")) | dict(w13=w13, w2=w2)
    assert torch.allclose(moe_qpn(**wide), moe_qpn(**dense), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch_and_routing_in_the_emulator(format: str) -> None:
    whole = packed_case(64, format)
    whole["ids"][:, 1] = 5  # one expert has 8 packs
    out = emulated(**whole)
    assert close(out, moe_qpn(**whole))
    for m in (1, 7, 8, 9, 33):
        assert same_bits(emulated(**(whole | {name: whole[name][64 - m :] for name in ("x", "ids", "weights")})), out[64 - m :]), m
    crowd = clone(whole)
    crowd["ids"][:] = 2
    crowd["ids"][40] = whole["ids"][40]
    assert same_bits(emulated(**crowd)[40], out[40])


def test_routings_of_every_kind_in_the_emulator() -> None:
    """All rows to one expert, every expert once, duplicates, invalid ids at every place, rows without any route."""
    for shared in (True, False):
        a = packed_case(17, shared=shared)
        a["ids"][0] = torch.tensor([-1, 8, 2, 100_000])
        a["ids"][1] = torch.tensor([6, 6, 6, 6])
        a["ids"][2:4] = torch.arange(8).view(2, 4).int()
        a["ids"][4] = torch.tensor([-1, -7, 8, 9])
        a["weights"][4] = math.nan
        out = emulated(**a)
        assert close(out, moe_qpn(**a))
        if not shared:
            assert same_bits(out[4], torch.zeros(64).half())  # +0, not -0
    a["ids"][:], a["weights"][4] = 3, 0.5
    assert close(emulated(**a), moe_qpn(**a))
    a["ids"][:] = -1
    assert same_bits(emulated(**a), torch.zeros(17, 64).half())


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_broken_row_or_weight_stays_alone_in_the_emulator(bad: float) -> None:
    a = packed_case(12)
    a["ids"][:, 0] = 1  # all rows share an expert's packs
    clean = emulated(**a)
    a["x"][7, 3] = bad
    a["weights"][9, 1] = bad
    a["weights"][2] = 0.0
    dirty = emulated(**a)
    assert not torch.isfinite(dirty[7]).any()
    assert not torch.isfinite(dirty[9]).any()
    for row in (0, 1, 3, 4, 5, 6, 8, 10, 11):
        assert same_bits(dirty[row], clean[row])
    assert close(dirty[2], moe_qpn(**a)[2])


def test_neither_the_order_of_warps_nor_stale_scratch_shows_in_the_emulator() -> None:
    a = packed_case(9)
    out = emulated(**a)
    stale = dict(plan=torch.full((1 + 4 * 36,), 1 << 30, dtype=torch.int32), gated=torch.full((45, 32), math.nan).half())
    for order in range(3):
        again = emulated(**a, **stale, y=torch.full((45, 64), math.inf).half(), order=order)
        assert same_bits(again, out)


@pytest.mark.parametrize("gate", [-math.inf, -60000.0, 60000.0, math.inf], ids=str)
def test_silu_is_stable_and_overflow_stays_infinite_in_the_emulator(gate: float) -> None:
    """x is one-hot and weights are 1 or 2, so that scales hold the gate and up of each route: 60000 * 2 overflows float16."""
    a = packed_case(1, "int8", shared=False)
    a["x"].zero_()[0, 0] = 4.0
    a["ids"][:], a["weights"][:] = 0, 1.0
    codes = torch.zeros(64, 64, dtype=torch.int8)
    codes[:, 0] = 1
    gates = math.copysign(60000.0 if math.isinf(gate) else 15000.0, gate)
    a["packed13"] = pack13(Int8(codes, torch.cat([torch.full((32,), gates), torch.full((32,), 0.5)])))[None].repeat(8, 1)
    a["packed2"] = pack(Int8(torch.ones(64, 32, dtype=torch.int8), torch.ones(64)))[None].repeat(8, 1)
    for out in (emulated(**a), moe_qpn(**a)):
        assert torch.equal(out, torch.full_like(out, math.inf if gate > 0 else 0.0))


def test_gate_and_up_halves_may_have_different_global_scales() -> None:
    a = packed_case(3, "nvfp4")
    draw = Draw("packed13", (), torch.uint8, {}, torch.Generator().manual_seed(1), {})
    both = random_weights(draw, "nvfp4", 64, 64, 0)
    assert isinstance(both, Nvfp4)
    scales = torch.cat([torch.full((32,), 1 / 512), torch.full((32,), 1 / 4096)])
    a["packed13"] = pack13(Nvfp4(both.codes, both.scale, scales))[None].repeat(8, 1)
    assert close(emulated(**a), moe_qpn(**a))
    a["packed13"] = pack13(Nvfp4(both.codes, both.scale, scales.flip(0)))[None].repeat(8, 1)
    assert close(emulated(**a), moe_qpn(**a))


def test_no_rows_launch_nothing_in_the_emulator() -> None:
    out, counters = moe_qpn.emulate(**packed_case(0))
    assert out.shape == (0, 64)
    assert counters == []


def test_a_pack_reads_its_experts_weights_once_in_the_emulator() -> None:
    """At the model's width: 5 rows, two of which choose the same expert, make 5 packs of the first product and 5 of the second."""
    a = packed_case(3, slots=2, shared=False, E=2560, I=160)
    a["ids"] = torch.tensor([[1, 2], [2, 3], [4, 5]], dtype=torch.int32)
    out, counters = moe_qpn.emulate(**a)
    assert close(out, moe_qpn(**a))
    for launch, bank in ((counters[1], a["packed13"]), (counters[2], a["packed2"])):
        weights = [site for site in launch.sites if site.space == "global" and "bank.cuh" in site.line]
        assert sum(site.bytes for site in weights) == 5 * bank.shape[1]
        assert sum(site.sectors for site in weights) == sum(site.minimum_sectors for site in weights) == 5 * bank.shape[1] // 32


WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(format=None), "packed banks need format and width, got None and 32"),
    (dict(width=None), "packed banks need format and width, got int4 and None"),
    (dict(format="int8"), r"packed13 axis 1: int8 \[64, 64\] takes 4352 bytes, got 2560"),
    (dict(phase=32), "phase: int4 has no blocks of k"),
    (dict(w13=torch.zeros(8, 64, 64).half(), w2=torch.zeros(64, 8, 32).half()), "w13: given beside packed13"),
    (dict(packed2=None), "packed2: missing"),
    (dict(packed13=None, packed2=None), "packed13: the kernel takes packed banks only"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_banks_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    for run in (moe_qpn, emulated)[: 1 if "width" in change else 2]:  # without a width the emulator's scratch has no size
        with pytest.raises(ContractError, match=message):
            run(**(packed_case(2) | change))


def test_the_kernels_shared_expert_is_as_wide_as_the_others() -> None:
    a = packed_case(2, E=64) | dict(shared13=torch.zeros(320, 64).half(), shared2=torch.zeros(64, 160).half())
    with pytest.raises(ContractError, match="as wide as the others, I=32, got J=160"):
        emulated(**a)
