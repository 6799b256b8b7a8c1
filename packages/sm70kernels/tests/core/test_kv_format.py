"""The cache formats, reference and kernel header, against definitions over numbers: every float16, every code."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sm70kernels import kv_format
from sm70kernels.cuda import _headers
from sm70kernels.emulator import emulate
from sm70kernels.nvrtc import compile_source

from ..kv_codes import MAGNITUDES, e4m3_value, encode_i8

SCALES = [1.0, 0.37, 2.0**-9, 300.0, 1e-30, 0.0, -1.5, math.inf, math.nan]

ENTRIES = """
#include "kv_format.cuh"
extern "C" __global__ void encode_e4m3_all(const __half* x, float scale, unsigned char* codes) {
    const int at = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    float value[8];
    widen(load8(x + at), value);
    *reinterpret_cast<uint2*>(codes + at) = encode8_e4m3(value, scale);
}
extern "C" __global__ void decode_e4m3_all(const unsigned char* codes, float scale, __half* exact, __half* scaled) {
    const int at = threadIdx.x * 8;
    const Half8 value = decode8_e4m3(*reinterpret_cast<const uint2*>(codes + at));
    store8(exact + at, value);
    store8(scaled + at, scaled8(value, scale));
}
extern "C" __global__ void encode_i8_all(const __half* x, const unsigned* largest, signed char* codes, float* scales) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    float value[8];
    widen(load8(x + row * 8), value);
    scales[row] = scale_i8(largest[row]);
    *reinterpret_cast<uint2*>(codes + row * 8) = encode8_i8(value, scales[row]);
}
extern "C" __global__ void decode_i8_all(const signed char* codes, float scale, __half* exact, __half* scaled) {
    const int at = threadIdx.x * 8;
    const Half8 value = decode8_i8(*reinterpret_cast<const uint2*>(codes + at));
    store8(exact + at, value);
    store8(scaled + at, scaled8(value, scale));
}
"""


@cache
def ptx() -> str:
    return compile_source(ENTRIES, headers=_headers()).ptx


def every_half() -> NDArray[np.float16]:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16)


def by_midpoints(quotients: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The nearest E4M3 codes: how many midpoints of neighbours lie below, a tie counting when the code above is even."""
    magnitude = np.abs(quotients.astype(np.float64))
    codes = np.zeros(magnitude.shape, np.uint8)
    for code in range(1, len(MAGNITUDES)):
        middle = (MAGNITUDES[code - 1] + MAGNITUDES[code]) / 2
        codes += (magnitude > middle) | ((magnitude == middle) & (code % 2 == 0))
    codes |= np.where(np.signbit(quotients), 0x80, 0).astype(np.uint8)
    codes[np.isnan(quotients)] = 0x7F
    return codes


@pytest.mark.parametrize("scale", SCALES)
def test_every_half_gets_the_nearest_e4m3_code_under_any_scale(scale: float) -> None:
    x, factor = every_half(), np.float32(scale)
    with np.errstate(all="ignore"):
        # Operands of 11 and 24 digits: a float64 quotient rounded once more is the float32 quotient.
        expected = by_midpoints((x.astype(np.float64) / float(factor)).astype(np.float32))
    assert np.array_equal(kv_format.encode_e4m3(x.astype(np.float32), factor), expected)
    codes = np.full(1 << 16, 0xEE, np.uint8)
    emulate(ptx(), "encode_e4m3_all", 32, 256, x, scale, codes)
    assert np.array_equal(codes, expected)


def test_e4m3_saturates_rounds_ties_to_even_and_keeps_the_sign_of_zero() -> None:
    x = np.array([448, 464, 65504, math.inf, -math.inf, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 17, 19, -0.0, math.nan], np.float32)
    expected = [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x01, 0x00, 0x02, 0x58, 0x5A, 0x80, 0x7F]
    assert kv_format.encode_e4m3(x, np.float32(1)).tolist() == expected
    assert kv_format.encode_e4m3(-x[-1:], np.float32(1)).tolist() == [0x7F]


@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-20, 1e5, 1e38, 0.0, math.nan])
@pytest.mark.parametrize("kind", ["e4m3", "i8"])
def test_every_code_decodes_exactly_and_its_product_is_rounded_once(kind: str, scale: float) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = [e4m3_value(code) if kind == "e4m3" else code - 256 * (code > 127) for code in codes.tolist()]
    with np.errstate(all="ignore"):
        products = np.array(values, np.float32) * np.float32(scale)
        expected = products.astype(np.float16)
    if kind == "e4m3":
        found = kv_format.decode_e4m3(codes, np.float32(scale))
    else:
        found = kv_format.decode_i8(codes.view(np.int8), np.array(scale, np.float32))
    assert np.array_equal(found, products, equal_nan=True)
    exact, scaled = np.full(256, 7, np.float16), np.full(256, 7, np.float16)
    emulate(ptx(), f"decode_{kind}_all", 1, 32, codes, scale, exact, scaled)
    assert np.array_equal(exact, np.array(values, np.float16), equal_nan=True)
    assert np.array_equal(scaled, expected, equal_nan=True)


def rows_of_8() -> torch.Tensor:
    """Ordinary rows, then zeros, subnormals, float16's largest, quotients that are ties, an infinity and a NaN."""
    ties = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5])
    odd = torch.stack([torch.zeros(8), torch.full((8,), 6e-8), torch.linspace(-65504, 65504, 8), ties, -ties, ties * 64])
    bad = torch.randn(2, 8)
    bad[0, 3], bad[1, 7] = math.inf, math.nan
    return torch.cat([torch.randn(56, 8) * torch.logspace(-6, 4, 56)[:, None], odd, bad]).half()


def test_int8_rows_have_the_scale_and_codes_of_the_definition() -> None:
    x = rows_of_8()
    expected = [encode_i8(row) for row in x.tolist()]
    codes, scales = np.array([row for row, _ in expected], np.int8), np.array([scale for _, scale in expected], np.float32)
    found_codes, found_scales = kv_format.encode_i8(x.float().numpy())
    assert np.array_equal(found_codes, codes)
    assert np.array_equal(found_scales, scales, equal_nan=True)
    assert np.isnan(scales[-2:]).all()
    largest = x.float().abs().view(torch.int32).max(1).values.numpy().view(np.uint32)
    kernel_codes, kernel_scales = np.full(codes.shape, 77, np.int8), np.zeros(len(x), np.float32)
    emulate(ptx(), "encode_i8_all", 2, 32, x.numpy(), largest, kernel_codes, kernel_scales)
    assert np.array_equal(kernel_codes, codes)
    assert np.array_equal(kernel_scales, scales, equal_nan=True)


def test_int8_codes_are_clamped_where_the_quotient_reaches_beyond_them() -> None:
    x = np.array([[1000, -1000, 127.5, -128.5, 126.5, 0, 0, 0]], np.float16)
    codes, scales = np.zeros((1, 8), np.int8), np.zeros(1, np.float32)
    emulate(ptx(), "encode_i8_all", 1, 1, x, np.float32(127).reshape(1).view(np.uint32), codes, scales)
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [[127, -128, 127, -128, 126, 0, 0, 0]]
