"""Packed weight banks: the layout byte by byte, exact round trips, what each format means, and what packing refuses."""

import dataclasses
import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from sm70kernels.banks import FORMATS, BankError, Fp8, Int4, Int8, Nvfp4, Weights, bank_bytes, dequantise, layout, pack, unpack
from sm70kernels.testing import same_bits

from ..packed_codes import half, matrix, weight

SIZES = [(40, 96, 0), (1, 32, 0), (32, 160, 0), (33, 64, 0), (96, 32, 0)]


def random_weights(format: str, n: int, k: int, phase: int = 0, seed: int = 0) -> Weights:
    """Every code, scale and zero point that a format has, except those that packing refuses."""
    generator = torch.Generator().manual_seed(seed)

    def integers(lo: int, hi: int, *shape: int) -> Tensor:
        return torch.randint(lo, hi + 1, shape, generator=generator)

    def codes8(*shape: int) -> Tensor:
        codes = integers(0, 255, *shape).to(torch.uint8)
        return torch.where(codes & 0x7F == 0x7F, 0, codes)

    if format == "int4":
        scale = torch.randn(n, k // 32, generator=generator).half()
        return Int4.from_zeros(integers(0, 15, n, k).to(torch.uint8), scale, integers(0, 255, n, k // 32).to(torch.uint8))
    if format == "nvfp4":
        return Nvfp4(integers(0, 15, n, k).to(torch.uint8), codes8(n, k // 16), torch.rand(n, generator=generator) * 0.008)
    if format == "fp8":
        return Fp8(codes8(n, k), torch.randn(n, (phase + k + 127) // 128, generator=generator), phase)
    return Int8(integers(-128, 127, n, k).to(torch.int8), torch.randn(n, generator=generator))


def equal(a: Weights, b: Weights) -> bool:
    """Equal bit for bit."""
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)]
    return type(a) is type(b) and all(same_bits(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(format=st.sampled_from(FORMATS), n=st.integers(0, 70), groups=st.integers(0, 6), phase=st.sampled_from([0, 32, 64, 96]),
                  seed=st.integers(0, 1000))  # fmt: skip
def test_unpacking_returns_what_was_packed_bit_for_bit(format: str, n: int, groups: int, phase: int, seed: int) -> None:
    phase = phase if format == "fp8" else 0
    k = groups * {"int4": 32, "nvfp4": 16, "fp8": 8, "int8": 8}[format]
    packed = random_weights(format, n, k, phase, seed)
    bank = pack(packed)
    assert bank.dtype is torch.uint8
    assert bank.shape == (bank_bytes(format, n, k, phase),)
    assert equal(unpack(bank, format, n, k, phase), packed)


@pytest.mark.parametrize("format", FORMATS)
def test_every_byte_lies_where_the_layout_says(format: str) -> None:
    for n, k, phase in [*SIZES, *([(40, 160, 96), (8, 32, 64)] if format == "fp8" else [])]:
        packed = random_weights(format, n, k, phase)
        bank = pack(packed)
        w = packed.dequantise()
        raw = bytes(bank.tolist())
        for row in range(n):
            for column in range(k):
                expected = weight(raw, format, n, k, phase, row, column)
                assert w[row, column] == torch.tensor(expected).float(), (row, column)
        assert torch.equal(torch.from_numpy(matrix(bank.numpy(), format, n, k, phase)).float(), w)
        assert torch.equal(dequantise(bank, format, n, k, phase), w)


@pytest.mark.parametrize("format", FORMATS)
def test_padding_decodes_to_zero(format: str) -> None:
    bank = pack(random_weights(format, 33, 48 if format != "int4" else 64))
    every = matrix(bank.numpy(), format, 64, 64, 0)
    assert not every[33:].any()
    if format != "int4":
        assert not every[:, 48:].any()
    assert every[:33].any()


def test_planes_are_aligned_and_sizes_let_experts_stack() -> None:
    for format in FORMATS:
        for n in (1, 32, 33, 320, 4120):
            for k in (32, 160, 1536, 2560):
                assert all(plane.offset % 16 == 0 for plane in layout(format, n, k).values())
                assert bank_bytes(format, n, k) % 64 == 0
    experts = [pack(random_weights("int4", 40, 64, seed=seed)) for seed in range(3)]
    stacked = torch.stack(experts)
    assert torch.equal(dequantise(stacked[2], "int4", 40, 64), random_weights("int4", 40, 64, seed=2).dequantise())


def test_bits_a_weight_are_those_of_the_formats() -> None:
    bits = {format: bank_bytes(format, 2560, 2560) * 8 / 2560**2 for format in FORMATS}
    assert bits == {"int4": 5.0, "nvfp4": 4.5 + 32 / 2560, "fp8": 8.25, "int8": 8 + 32 / 2560}


def test_int4_weights_are_one_fused_operation_on_the_rounded_bias() -> None:
    """h(q s - h(z s)) differs from h((q - z) s) in many places, and from two roundings in some."""
    packed = random_weights("int4", 64, 128, seed=5)
    assert isinstance(packed, Int4)
    w = packed.dequantise()
    for row in range(64):
        for column in range(128):
            scale, bias = float(packed.scale[row, column // 32]), float(packed.bias[row, column // 32])
            assert float(w[row, column]) == half(int(packed.codes[row, column]) * scale + bias)


def test_zero_negative_and_subnormal_scales_are_numbers_like_any_other() -> None:
    codes = torch.arange(16).repeat(4, 2).to(torch.uint8)
    scale = torch.tensor([[0.0], [-0.5], [2.0**-24], [3 * 2.0**-24]]).half()
    w = Int4.from_zeros(codes, scale, torch.full((4, 1), 8, dtype=torch.uint8)).dequantise()
    assert not w[0].any()
    assert torch.equal(w[1:], (codes[1:].float() - 8) * scale[1:].float())


def test_zero_points_of_eight_bits_are_accepted() -> None:
    codes, scale = torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1).half()
    assert (Int4.from_zeros(codes, scale, torch.tensor([[200]], dtype=torch.uint8)).dequantise() == -200).all()


def test_nvfp4_halves_with_different_global_scales_keep_them() -> None:
    codes, scale = torch.full((2, 16), 2, dtype=torch.uint8), torch.full((2, 1), 0x38, dtype=torch.uint8)  # 1.0 and 1.0
    w = dequantise(pack(Nvfp4(codes, scale, torch.tensor([0.5, 0.0]))), "nvfp4", 2, 16)
    assert (w[0] == 0.5).all()
    assert not w[1].any()


def test_a_slice_of_an_fp8_matrix_takes_the_scales_of_the_blocks_it_lies_in() -> None:
    """Both borders of 128 lie inside the slice, along rows and along k."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 0x7F, (320, 320), generator=generator).to(torch.uint8)
    scale = torch.rand(3, 3, generator=generator)
    full = codes.view(torch.float8_e4m3fn).float() * scale.repeat_interleave(128, 0)[:320].repeat_interleave(128, 1)[:, :320]
    for row, column in ((0, 0), (160, 160), (100, 96), (127, 32)):
        cut = codes[row : row + 160, column : column + 160].contiguous()
        packed = Fp8.from_blocks(cut, scale, row, column)
        assert packed.phase == column % 128
        w = dequantise(pack(packed), "fp8", 160, 160, packed.phase) if len(cut) == 160 else packed.dequantise()
        assert torch.equal(w, full[row : row + 160, column : column + 160])


CODES = torch.zeros(2, 64, dtype=torch.uint8)
HALVES = torch.ones(2, 2).half()
REFUSED: list[tuple[Any, str]] = [
    (lambda: Int4(CODES + 16, HALVES, HALVES), r"int4: codes\[0, 0\]: expected 0..15, got 16"),
    (lambda: Int4(CODES, HALVES * math.nan, HALVES), r"int4: scale\[0, 0\]: expected a finite number, got nan"),
    (lambda: Int4(CODES, HALVES, HALVES * math.inf), r"int4: bias\[0, 0\]: .* got inf"),
    (lambda: Int4(CODES[:, :40], HALVES, HALVES), "K=40 is not a multiple of the group of 32"),
    (lambda: Int4(CODES, HALVES[:, :1], HALVES), r"int4: scale: expected torch.float16 \[2, 2\], got torch.float16 \[2, 1\]"),
    (lambda: Int4(CODES + 15, HALVES * 5000, HALVES), r"int4: w of group \[0, 0\]: .* got 75001.0"),
    (lambda: Int4.from_zeros(CODES, HALVES * 4400, CODES[:, :2] + 15), r"int4: zero · scale of group \[0, 0\]: .* got 66000.0"),
    (lambda: Int4.from_zeros(CODES, HALVES * math.inf, CODES[:, :2]), r"int4: scale\[0, 0\]: .* got inf"),
    (lambda: Nvfp4(CODES, CODES[:, :4] + 0x7F, torch.ones(2)), r"nvfp4: scale\[0, 0\]: .* this code is NaN, got 127"),
    (lambda: Nvfp4(CODES, CODES[:, :4], torch.tensor([1.0, math.inf])), r"nvfp4: rows\[1\]: .* got inf"),
    (lambda: Nvfp4(CODES, CODES[:, :4] + 0x50, torch.ones(2)), r"nvfp4: scale · global of group \[0, 0\]: .*3.998.*, got 8.0"),
    (lambda: Nvfp4(CODES[:, :40], CODES[:, :2], torch.ones(2)), "K=40 is not a multiple of the group of 16"),
    (lambda: Fp8(CODES + 0xFF, torch.ones(2, 1)), r"fp8: codes\[0, 0\]: .* got 255"),
    (lambda: Fp8(CODES, torch.full((2, 1), 2.0**121)), r"fp8: scale\[0, 0\]: .* below 2\^120"),
    (lambda: Fp8(CODES, torch.ones(2, 1), 16), "phase 16: expected one of 0, 32, 64, 96"),
    (lambda: Fp8.from_blocks(CODES, torch.ones(1, 1), 127, 0), r"fp8: scale of 2 rows from 127 .* at least \[2, 1\] blocks"),
    (lambda: Int8(CODES.view(torch.int8), torch.tensor([1.0, math.nan])), r"int8: scale\[1\]: .* got nan"),
    (lambda: Int8(CODES, torch.ones(2)), r"int8: codes: expected torch.int8 \[N, K\], got torch.uint8"),
    (lambda: layout("int3", 2, 32), "no bank format 'int3'; there are int4, nvfp4, fp8, int8"),
    (lambda: layout("int4", 2, 32, 32), "int4: phase 32"),
    (lambda: unpack(CODES.flatten(), "int4", 2, 64), r"int4 of 2 x 64: expected a bank of u8 \[1280\], got torch.uint8 \[128\]"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_packed_is_refused_with_its_place_and_value(make: Any, message: str) -> None:
    with pytest.raises(BankError, match=message):
        make()


