"""include/convert.cuh over every code, against the definitions of the number formats written out in Python."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import sm70kernels
from sm70kernels.cuda import compile_source
from sm70kernels.emulator import emulate

INCLUDE = Path(sm70kernels.__file__).parent / "include"

SOURCE = """
#include "convert.cuh"
extern "C" __global__ void convert(const unsigned* words, __half2* out, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    __half2 pair[PAIRS];
    FUNCTION(words[i], pair);
    for (int j = 0; j < PAIRS; ++j) out[i * PAIRS + j] = pair[j];
}
"""

E8M0_SOURCE = """
#include "convert.cuh"
extern "C" __global__ void convert(float* wide, __half* narrow) {
    const int code = blockIdx.x * blockDim.x + threadIdx.x;
    wide[code] = e8m0_float(code);
    narrow[code] = e8m0_half(code);
}
"""


def minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Value of a sign-exponent-mantissa code with the usual bias and subnormals, and no infinities or NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    mantissa, exponent = code % 2**mantissa_bits, code // 2**mantissa_bits % 2**exponent_bits
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (2**mantissa_bits + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)


def e5m2(code: int) -> float:
    if code >> 2 & 31 == 31:
        return math.nan if code & 3 else math.copysign(math.inf, -1.0 if code & 0x80 else 1.0)
    return minifloat(code, 5, 2)


def int4(code: int) -> float:
    return float(code)


def int8(code: int) -> float:
    return float(code - 256 if code > 127 else code)


def e4m3_without_nan(code: int) -> float:
    return minifloat(code, 4, 3)  # 0x7f continues the row of numbers: 480


def e2m1(code: int) -> float:
    return minifloat(code, 2, 1)


def nibbles(codes: Sequence[int]) -> int:
    """Eight codes of consecutive k in a word: the even ones in the low half, the odd ones in the high half."""
    word = 0
    for k, code in enumerate(codes):
        word |= code << (4 * (k // 2) + (16 if k % 2 else 0))
    return word


def bytes_of(codes: Sequence[int]) -> int:
    """Four codes of consecutive k in a word: of each pair the first is in the low half."""
    word = 0
    for k, code in enumerate(codes):
        word |= code << (8 * (k // 2) + (16 if k % 2 else 0))
    return word


def run(function: str, words: list[int], pairs: int) -> NDArray[np.float16]:
    """Decode every word: [words, 2 · pairs]."""
    headers = {path.name: path.read_text() for path in INCLUDE.glob("*.cuh")}
    image = compile_source(SOURCE, {"FUNCTION": function, "PAIRS": pairs}, headers=headers)
    assert image.warnings == ""
    out = np.zeros((len(words), 2 * pairs), np.float16)
    emulate(image.ptx, "convert", -(-len(words) // 128), 128, np.array(words, np.uint32), out, len(words))
    return out


def same(got: NDArray[np.float16], expected: list[list[float]]) -> None:
    """Equal values, signs of zeros and NaN included."""
    wanted = np.array(expected, np.float64)
    assert np.array_equal(got.astype(np.float64), wanted, equal_nan=True)
    assert np.array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(wanted)[~np.isnan(wanted)])


def neighbours(codes: int, width: int) -> list[list[int]]:
    """Rows of `width` codes in which every code takes every place, between pseudo-random others."""
    generator = np.random.default_rng(7)
    rows = []
    for place in range(width):
        for code in range(codes):
            row = generator.integers(0, codes, width).tolist()
            row[place] = code
            rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("function", "definition", "factor"),
    [("int4_pairs", int4, 1.0), ("e2m1_pairs", e2m1, 1.0), ("e2m1_pairs_scaled", e2m1, 2.0**-14)],
)
def test_every_nibble_at_every_place_has_its_value(function: str, definition: Callable[[int], float], factor: float) -> None:
    rows = neighbours(16, 8)
    same(run(function, [nibbles(row) for row in rows], 4), [[definition(code) * factor for code in row] for row in rows])


@pytest.mark.parametrize(
    ("function", "definition", "factor"),
    [
        ("int8_pairs", int8, 1.0),
        ("e4m3_pairs", e4m3_without_nan, 1.0),
        ("e4m3_pairs_scaled", e4m3_without_nan, 2.0**-8),
        ("e5m2_pairs", e5m2, 1.0),
    ],
)
def test_every_byte_at_every_place_has_its_value(function: str, definition: Callable[[int], float], factor: float) -> None:
    rows = neighbours(256, 4)
    same(run(function, [bytes_of(row) for row in rows], 2), [[definition(code) * factor for code in row] for row in rows])


def test_every_power_of_two_code_has_its_value_as_far_as_the_type_reaches() -> None:
    image = compile_source(E8M0_SOURCE, headers={path.name: path.read_text() for path in INCLUDE.glob("*.cuh")})
    wide, narrow = np.zeros(256, np.float32), np.zeros(256, np.float16)
    emulate(image.ptx, "convert", 2, 128, wide, narrow)
    for code in range(255):
        value = 2.0 ** (code - 127)
        assert wide[code] == value, code
        expected = 0.0 if value < 2.0**-24 else math.inf if value > 2.0**15 else value
        assert narrow[code] == expected, code
    assert np.isnan(wide[255])
    assert np.isnan(narrow[255])
