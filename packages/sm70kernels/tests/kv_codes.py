"""The storage codes of the K/V cache, written from their definitions alone: one number at a time, in Python's float64."""

import math

import numpy as np


def e4m3_value(code: int) -> float:
    """Sign, four exponent bits with bias 7, three mantissa bits; no infinity, and all ones is NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


MAGNITUDES = [e4m3_value(code) for code in range(0x7F)]


def single(x: float) -> float:
    """The float32 nearest to x; float32 operands have so few digits that rounding a float64 quotient again rounds it correctly."""
    with np.errstate(all="ignore"):
        return float(np.float32(x))


def quotient(x: float, scale: float) -> float:
    """x / scale in float32, with IEEE's results where Python raises."""
    if scale == 0:
        return math.nan if x == 0 or math.isnan(x) else math.copysign(math.inf, x) * math.copysign(1, scale)
    return single(x / scale)


def nearest_e4m3(x: float) -> int:
    """The code whose value is nearest to x, the even one of two; the largest beyond them all; 0x7f for NaN."""
    if math.isnan(x):
        return 0x7F
    magnitude = min(abs(x), MAGNITUDES[-1])
    code = min(range(0x7F), key=lambda c: (abs(MAGNITUDES[c] - magnitude), c & 1))
    return code | (0x80 if math.copysign(1, x) < 0 else 0)


def encode_i8(row: list[float]) -> tuple[list[int], float]:
    """The codes and the scale of one row."""
    if not all(math.isfinite(x) for x in row):
        return [0] * len(row), math.nan
    scale = max(single(max(abs(x) for x in row) / 127), single(1e-6))
    return [max(-128, min(127, round(quotient(x, scale)))) for x in row], scale  # round() takes ties to even
