"""qpn_linear against its definition: y[m,n] = h(sum over k of x[m,k] * w[n,k]), w read from the bank's bytes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sm70kernels import qpn_linear
from sm70kernels.banks import FORMATS, Fp8, Int4, Int8, Nvfp4, bank_bytes, layout, pack
from sm70kernels.op import ContractError
from sm70kernels.ops.qpn_linear import Config
from sm70kernels.testing import conforms, poison, rounds_as_stated, rows_independent, same_bits

from .packed_codes import weight, weights


def naive(x: Tensor, format: str, n: int, phase: int, bank: Tensor) -> Tensor:
    raw, (m, k) = bytes(bank.tolist()), x.shape
    y = x.new_zeros(m, n)
    for column in range(n):
        w = [weight(raw, format, n, k, phase, column, i) for i in range(k)]
        for row, values in enumerate(x.tolist()):
            y[row, column] = sum(a * b for a, b in zip(values, w, strict=True))
    return y


def large(x: Tensor, format: str, n: int, phase: int, bank: Tensor) -> Tensor:
    return x @ weights(bank, format, n, x.shape[1], phase).T


test_matches_naive = conforms(qpn_linear, naive, large=large, examples=6)
test_rows = rows_independent(qpn_linear)
test_rounding_points = rounds_as_stated(qpn_linear, naive, dict(M=20))


def case(format: str, m: int, n: int = 72, k: int = 320, phase: int = 0, seed: int = 1) -> dict[str, Any]:
    """Arguments in float16 for a bank of the given format; the largest phase of fp8 makes its first block the shortest."""
    sizes = dict(M=m, N=n, K=k, PHASE=phase, B=bank_bytes(format, n, k, phase))
    return qpn_linear.make(sizes, seed, torch.float16)


def within_the_bound(got: Tensor, arguments: dict[str, Any], splits: int) -> None:
    """Half a unit of the output's last place, and one of float32's for every truncated sum of four products on the way."""
    x, (format, n, phase) = arguments["x"].double(), (arguments[name] for name in ("format", "n", "phase"))
    w = weights(arguments["bank"], format, n, x.shape[1], phase)
    truth, magnitude = x @ w.T, x.abs() @ w.abs().T
    unit = torch.from_numpy(np.spacing(truth.abs().half().clamp(2.0**-14).numpy()).astype(np.float64))
    allowed = 0.5 * unit + (x.shape[1] / 4 + splits + 8) * 2.0**-23 * magnitude
    assert ((got.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("config", qpn_linear.configs, ids=str)
@pytest.mark.parametrize(("format", "phase"), [*((format, 0) for format in FORMATS), ("fp8", 32), ("fp8", 96)])
def test_every_configuration_is_within_the_bound_of_its_sums(format: str, phase: int, config: Config) -> None:
    for m, n, k in ((5, 40, 320), (9, 72, 96), (1, 64, 32)):
        arguments = case(format, m, n, k, phase)
        out, _ = qpn_linear.emulate(**arguments, config=config, out=poison(torch.empty(m, n, dtype=torch.float16)))
        within_the_bound(out, arguments, config.warps_k)


@pytest.mark.parametrize("config", [Config(8), Config(1, 4)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(format: str, config: Config) -> None:
    whole = case(format, 64)
    out, _ = qpn_linear.emulate(**whole, config=config)
    for m in (0, 1, 7, 8, 9, 33, 64):
        some, _ = qpn_linear.emulate(**(whole | dict(x=whole["x"][64 - m :])), config=config)
        assert same_bits(some, out[64 - m :]), m


@pytest.mark.parametrize("format", FORMATS)
def test_warps_in_any_order_give_the_same_bits(format: str) -> None:
    arguments = case(format, 9)
    out, _ = qpn_linear.emulate(**arguments)
    for order in range(3):
        assert same_bits(qpn_linear.emulate(**arguments, order=order)[0], out)


@pytest.mark.parametrize("format", FORMATS)
def test_what_surrounds_the_operands_is_not_read(format: str) -> None:
    """x lies in a wider and longer buffer of NaN; the rows that pad the bank's last tile hold whatever bits there are."""
    arguments = case(format, 5, n=40)
    out, _ = qpn_linear.emulate(**arguments)
    buffer = torch.full((9, 320 + 24), float("nan"), dtype=torch.float16)
    buffer[2:7, 8:328] = arguments["x"]
    bank = arguments["bank"].clone()
    lanes = torch.tensor([lane for lane in range(32) if lane // 4 % 4 > 0])  # quad-pair 0 has the last tile's only 8 columns
    for name, plane in layout(format, 40, 320).items():
        of_tile = plane.of(bank)[-1]
        padding = of_tile.index_select(of_tile.shape.index(32), lanes if name != "scales" else torch.arange(8, 32))
        padding.view(torch.uint8).fill_(0xFF)
        of_tile.index_copy_(of_tile.shape.index(32), lanes if name != "scales" else torch.arange(8, 32), padding)
    assert not same_bits(bank, arguments["bank"])
    dirty, _ = qpn_linear.emulate(**(arguments | dict(x=buffer[2:7, 8:328], bank=bank)))
    assert same_bits(dirty, out)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_of_infinities_and_nan_leaves_the_others_alone(format: str) -> None:
    arguments = case(format, 5, n=24, k=96)
    clean = qpn_linear(**arguments), qpn_linear.emulate(**(case(format, 5, n=40, k=96)))[0]
    for run, expected, n in ((qpn_linear, clean[0], 24), (lambda **a: qpn_linear.emulate(**a)[0], clean[1], 40)):
        broken = case(format, 5, n=n, k=96)
        broken["x"] = broken["x"].clone()
        broken["x"][1] = float("nan")
        broken["x"][3, 7] = float("inf")
        got = run(**broken)
        for row in (0, 2, 4):
            assert same_bits(got[row], expected[row])
        assert got[1].isnan().all()
        assert not torch.isfinite(got[3]).any()


def uniform(format: str, value: int, scale: float, n: int = 40, k: int = 32) -> Tensor:
    """A bank in which every code is `value` and every scale `scale`."""
    codes = torch.full((n, k), value, dtype=torch.uint8)
    if format == "int4":
        return pack(Int4.from_zeros(codes, torch.full((n, k // 32), scale).half(), torch.zeros(n, k // 32, dtype=torch.uint8)))
    if format == "nvfp4":
        return pack(Nvfp4(codes, torch.full((n, k // 16), 0x38, dtype=torch.uint8), torch.full((n,), scale)))
    if format == "fp8":
        return pack(Fp8(codes, torch.full((n, 1), scale)))
    return pack(Int8(codes.view(torch.int8), torch.full((n,), scale)))


@pytest.mark.parametrize("format", FORMATS)
def test_overflow_is_infinity_and_zero_scales_are_zero(format: str) -> None:
    x = torch.full((2, 32), 60000.0, dtype=torch.float16)
    x[1] = -60000.0
    for scale, expected in ((1.0, float("inf")), (-1.0, float("-inf")), (0.0, 0.0)):
        arguments = dict(x=x, format=format, n=40, phase=0, bank=uniform(format, 0x38 if format == "fp8" else 4, scale))
        for got in (qpn_linear(**arguments), qpn_linear.emulate(**arguments)[0]):
            assert (got[0] == expected).all()
            assert (got[1] == -expected).all()


def test_subnormal_weights_and_products_are_not_flushed() -> None:
    x = torch.full((1, 32), 2.0**-5).half()
    for format, code, scale, w in (("int4", 3, 2.0**-24, 3 * 2.0**-24), ("fp8", 1, 1.0, 2.0**-9), ("nvfp4", 1, 2.0**-23, 2.0**-24)):
        got, _ = qpn_linear.emulate(x=x, format=format, n=40, phase=0, bank=uniform(format, code, scale))
        assert (got == torch.tensor(32 * 2.0**-5 * w).half()).all(), format
        assert (got != 0).all()


def test_no_rows_launch_nothing() -> None:
    out, counters = qpn_linear.emulate(**case("int4", 0))
    assert out.shape == (0, 72)
    assert counters == []


def test_a_bank_of_another_size_and_a_phase_without_blocks_are_refused() -> None:
    arguments = case("int4", 2, n=40, k=96)
    for run in (qpn_linear, qpn_linear.emulate):
        with pytest.raises(ContractError, match=r"bank axis 0: int4 \[72, 96\] with phase 0 takes 5760 bytes, got 3840"):
            run(**(arguments | dict(n=72)))  # type: ignore[operator]
        with pytest.raises(ContractError, match="phase: int4 has no blocks of k"):
            run(**(arguments | dict(phase=32)))  # type: ignore[operator]


def test_the_kernel_refuses_what_it_cannot_read() -> None:
    arguments = case("int4", 2, n=40, k=96)
    with pytest.raises(ContractError, match="expected f16, got f32"):
        qpn_linear.emulate(**(arguments | dict(x=arguments["x"].float())))
    wide = torch.zeros(2, 100, dtype=torch.float16)
    with pytest.raises(ContractError, match="x axis 0: expected a stride of a multiple of 16 bytes, got 200"):
        qpn_linear.emulate(**(arguments | dict(x=wide[:, :96])))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(320, 2560), (2560, 160)])
def test_the_models_shapes_move_no_more_than_their_bytes(format: str, n: int, k: int) -> None:
    """Requests touch the fewest 32-byte sectors their bytes fit in, and every block reads each weight once."""
    arguments = case(format, 5, n, k)
    out, counters = qpn_linear.emulate(**arguments)
    within_the_bound(out, arguments, 8)
    weights = [site for site in counters[0].sites if site.space == "global" and "bank.cuh" in site.line]
    assert sum(site.sectors for site in weights) == sum(site.minimum_sectors for site in weights)
    assert sum(site.bytes for site in weights) >= arguments["bank"].numel()
    assert counters[0].global_bytes_read == arguments["bank"].numel() + arguments["x"].nbytes


@pytest.mark.parametrize("format", ["int4", "fp8"])
@pytest.mark.parametrize("k", [1536, 10240])
def test_long_sums_stay_within_the_bound(format: str, k: int) -> None:
    """Of fp8 the warps' slices of k begin inside blocks of 128: each scales its own part of a block's sum."""
    arguments = case(format, 3, 40, k)
    out, _ = qpn_linear.emulate(**arguments)
    within_the_bound(out, arguments, 8)
    assert same_bits(qpn_linear.emulate(**(arguments | dict(x=arguments["x"][2:])))[0], out[2:])


def test_shared_memory_is_written_and_read_without_conflicts() -> None:
    """A quarter of a warp moves 128 bytes at a time: 4 passes for 16 bytes a lane, 2 for the pairs of sums, 1 for single sums."""
    _, counters = qpn_linear.emulate(**case("int4", 17))
    passes = {"v4.u32": 4, "v2.f32": 2, "shared.f32": 1}
    shared = [site for site in counters[0].sites if site.space == "shared"]
    assert len(shared) > 20
    for site in shared:
        (width,) = (count for name, count in passes.items() if name in site.text)
        assert site.wavefronts == width * site.requests, site
