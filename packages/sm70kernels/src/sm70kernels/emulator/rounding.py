"""Correct rounding in every mode: sums, products and fused products of float32 and float64, narrowing to float32 and float16.

A result is held as an unevaluated sum s + e of two doubles (s the nearest double, e the exact rest), from which any rounding to
fewer bits follows without a second rounding. Source of two_sum and two_product: Knuth, TAOCP 2, 4.2.2; Dekker 1971. Source of the fused
product of doubles: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd" (2008).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import helper

Array = NDArray[Any]

NAN32 = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]
NAN16 = np.array([0x7FFF], np.uint16).view(np.float16)[0]
"""The NaN that arithmetic of the GPU produces, whatever NaN went in."""

TINY32 = np.float32(2.0**-126)

OVERFLOW = {np.float16: 65520.0, np.float32: 2.0**128 - 2.0**103, np.dtype("f2"): 65520.0, np.dtype("f4"): 2.0**128 - 2.0**103}
"""Magnitude from which a number is rounded to infinity, by the type it is rounded to."""

HALVES = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
HALVES[np.isnan(HALVES)] = NAN32
"""Every float16 as float32: a table is faster than the conversion."""


@helper
def canonical(value: Array) -> Array:
    """Replace the NaNs of a freshly computed float32 array by the canonical one, in place."""
    if value.size and math.isnan(value.max()):
        value[np.isnan(value)] = NAN32
    return value


@helper
def canonical_half(value: Array) -> Array:
    """Replace the NaNs of a freshly computed float16 array by the canonical one, in place."""
    bits = value.view(np.uint16) & np.uint16(0x7FFF)
    if value.size and bits.max() > 0x7C00:
        value[bits > np.uint16(0x7C00)] = NAN16
    return value


@helper
def flush(value: Array) -> Array:
    """Subnormal float32 numbers become zero of the same sign."""
    return np.where(np.abs(value) < TINY32, np.copysign(np.float32(0), value), value)


@helper
def flush_half(value: Array) -> Array:
    """Subnormal float16 numbers become zero of the same sign."""
    return np.where(np.abs(value) < np.float16(2.0**-14), np.copysign(np.float16(0), value), value)


@helper
def saturate(value: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes +0."""
    kind = value.dtype.type
    return np.where(value > 0, np.minimum(value, kind(1)), kind(0))


@helper
def half_to_single(value: Array) -> Array:
    """float16 -> float32, exactly."""
    return HALVES[value.view(np.uint16)]


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return (s, e) with s = fl(a + b) and s + e = a + b exactly; e is 0 where s is not finite."""
    s = a + b
    part = s - a
    e = (a - (s - part)) + (b - part)
    return s, np.where(np.isfinite(s), e, 0.0)


def _step(value: Array, upwards: Array) -> Array:
    infinity = value.dtype.type(np.inf)
    result: Array = np.nextafter(value, np.where(upwards, infinity, -infinity))
    return result


def narrow(s: Array, e: Array | float, mode: str, kind: Any) -> Array:
    """Round s + e to float32 or float16 (`kind`). mode: rn, rz, rm, rp."""
    nearest = s.astype(kind)
    with np.errstate(all="ignore"):
        rest = s - nearest.astype(np.float64)
    if mode == "rn":
        if np.isscalar(e):
            return nearest
        other = _step(nearest, rest > 0)
        gap = np.abs(other.astype(np.float64) - nearest.astype(np.float64))
        halfway = np.where(np.isinf(nearest), np.abs(s) == OVERFLOW[kind], np.abs(rest) * 2 == gap)
        wrong = halfway & (((rest > 0) & (e > 0)) | ((rest < 0) & (np.asarray(e) < 0)))
        return np.where(wrong, other, nearest)
    residue = np.where(rest != 0, rest, e)
    residue = np.where(np.isnan(residue) | np.isinf(s), 0.0, residue)
    down = residue < 0 if mode == "rm" else (residue < 0) & (s > 0) if mode == "rz" else np.zeros_like(residue, bool)
    up = residue > 0 if mode == "rp" else (residue > 0) & (s < 0) if mode == "rz" else np.zeros_like(residue, bool)
    result = np.where(down, _step(nearest, np.zeros_like(down)), nearest)
    return np.where(up, _step(nearest, np.ones_like(up)), result)


@helper
def add_single(a: Array, b: Array, mode: str) -> Array:
    """Sum of float32 rounded in a directed mode; an exact zero sum is -0 in mode rm, as IEEE 754 has it."""
    s, e = two_sum(a.astype(np.float64), b.astype(np.float64))
    result = narrow(s, e, mode, np.float32)
    if mode == "rm":
        result = np.where((s == 0) & (e == 0) & (np.signbit(a) | np.signbit(b)), np.float32(-0.0), result)
    return result


@helper
def multiply_single(a: Array, b: Array, mode: str) -> Array:
    """Product of float32 rounded in a directed mode."""
    return narrow(a.astype(np.float64) * b.astype(np.float64), 0.0, mode, np.float32)


@helper
def fma_single(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """a * b + c of float32 with one rounding."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact: 48 bits
    addend = c.astype(np.float64)
    if mode != "rn":
        s, e = two_sum(product, addend)
        result = narrow(s, e, mode, np.float32)
        if mode == "rm":
            result = np.where((s == 0) & (e == 0) & (np.signbit(product) | np.signbit(addend)), np.float32(-0.0), result)
        return result
    s = product + addend
    result = s.astype(np.float32)
    # The second rounding is wrong only from halfway between two float32, or into the subnormal range.
    doubt = (s.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    doubt |= (result.view(np.uint32) & np.uint32(0x7F800000)) == 0
    if doubt.any():
        shape = np.broadcast_shapes(product.shape, addend.shape)
        where = np.nonzero(doubt)
        s, e = two_sum(np.broadcast_to(product, shape)[where], np.broadcast_to(addend, shape)[where])
        result[where] = narrow(s, e, "rn", np.float32)
    return result


@helper
def multiply_flushed(a: Array, b: Array, c: Array | None, mode: str) -> Array:
    """a * b or a * b + c of float32 for .ftz, not flushed yet: what rounds to the smallest normal number only because subnormals are
    coarse becomes zero, since the hardware flushes what is below it at 24 bits."""
    if c is None:
        result = np.asarray(a * b) if mode == "rn" else multiply_single(a, b, mode)
    else:
        result = fma_single(a, b, c, mode)
    doubt = np.abs(result) == TINY32
    if doubt.any():
        s, e = two_sum(a.astype(np.float64) * b.astype(np.float64), np.zeros(1) if c is None else c.astype(np.float64))
        fine = narrow(s * 2.0**64, e * 2.0**64, mode, np.float32)
        result = np.where(doubt & (np.abs(fine) < np.float32(2.0**-62)), np.copysign(np.float32(0), result), result)
    return result


@helper
def multiply_flushed_half(a: Array, b: Array, c: Array | None) -> Array:
    """The same of float16."""
    exact = a.astype(np.float64) * b.astype(np.float64)
    exact = exact if c is None else exact + c.astype(np.float64)
    result = exact.astype(np.float16)
    fine = (exact * 2.0**8).astype(np.float16)
    doubt = (np.abs(result) == np.float16(2.0**-14)) & (np.abs(fine) < np.float16(2.0**-6))
    return np.where(doubt, np.copysign(np.float16(0), result), result)


@helper
def fma_half(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float16 with one rounding: the sum fits a double, or what is lost cannot matter."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)


def _exact(value: Fraction, mode: str, zero: float) -> float:
    """Round a rational to float64; `zero` is the result for 0."""
    if value == 0:
        return zero
    try:
        nearest = value.numerator / value.denominator
    except OverflowError:
        nearest = math.inf if value > 0 else -math.inf
    if mode == "rn":
        return nearest
    above = nearest == math.inf or (nearest != -math.inf and Fraction(nearest) > value)
    below = nearest == -math.inf or (nearest != math.inf and Fraction(nearest) < value)
    if above and (mode == "rm" or (mode == "rz" and value > 0)):
        return math.nextafter(nearest, -math.inf)
    if below and (mode == "rp" or (mode == "rz" and value < 0)):
        return math.nextafter(nearest, math.inf)
    return nearest


def exactly(formula: Callable[..., Fraction], mode: str, plain: Array, *arguments: Array) -> Array:
    """Round `formula` of rationals element by element; `plain` is the result where it or an argument is not finite, or zero's sign."""
    result = plain.copy()
    flat = [np.broadcast_to(a, plain.shape).ravel() for a in arguments]
    for place in np.nonzero(np.logical_and.reduce([np.isfinite(a) for a in flat]))[0]:
        values = [Fraction(float(a[place])) for a in flat]
        try:
            result.ravel()[place] = _exact(formula(*values), mode, float(plain.ravel()[place]))
        except ZeroDivisionError:
            continue
    return result


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return (p, e) with p = fl(a b) and p + e = a b exactly, for magnitudes far from the ends of the range."""
    p = a * b
    a_high = a * 134217729.0 - (a * 134217729.0 - a)
    b_high = b * 134217729.0 - (b * 134217729.0 - b)
    a_low, b_low = a - a_high, b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low


@helper
def fma_double(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """a * b + c of float64 with one rounding."""
    plain = np.asarray(a * b + c)
    if mode == "rm":
        plain = np.where((plain == 0) & (np.signbit(a * b) | np.signbit(c)), -0.0, plain)
    if mode != "rn":
        return exactly(lambda x, y, z: x * y + z, mode, plain, a, b, c)
    high, low = two_product(a, b)
    t, t_rest = two_sum(c, low)
    v, v_rest = two_sum(high, t)
    w, w_rest = two_sum(t_rest, v_rest)
    even = (w.view(np.uint64) & np.uint64(1)) == 0  # round w to odd: towards the rest, unless the last bit is set
    w = np.where((w_rest != 0) & even, _step(w, w_rest > 0), w)
    result = np.asarray(v + w)
    sizes = [np.broadcast_to(np.frexp(x)[1], plain.shape) for x in (a, b, c)]
    plainly = (np.abs(sizes[0] + sizes[1]) < 900) & (np.abs(sizes[2]) < 900) & (np.abs(sizes[0]) < 900) & (np.abs(sizes[1]) < 900)
    usable = plainly & np.isfinite(plain) & (plain != 0)
    if usable.all():
        return result
    rest = ~usable
    result[rest] = exactly(lambda x, y, z: x * y + z, "rn", plain[rest], *(np.broadcast_to(x, plain.shape)[rest] for x in (a, b, c)))
    return result


@helper
def directed_double(name: str, a: Array, b: Array, mode: str) -> Array:
    """Sum, difference, product or quotient of float64 in a directed mode."""
    formulas: dict[str, tuple[Any, Callable[..., Fraction]]] = {
        "add": (np.add, lambda x, y: x + y), "sub": (np.subtract, lambda x, y: x - y),
        "mul": (np.multiply, lambda x, y: x * y), "div": (np.divide, lambda x, y: x / y),
    }  # fmt: skip
    ufunc, formula = formulas[name]
    plain = np.asarray(ufunc(a, b))
    if mode == "rm" and name in ("add", "sub"):
        second = np.signbit(b) != (name == "sub")
        plain = np.where((plain == 0) & (np.signbit(a) | second), -0.0, plain)
    return exactly(formula, mode, plain, a, b)


@helper
def divide_single(a: Array, b: Array, mode: str) -> Array:
    """Quotient of float32 in a directed mode, from the sign of the exact remainder."""
    q = a / b
    rest = a.astype(np.float64) - q.astype(np.float64) * b.astype(np.float64)
    rest = np.where(np.isfinite(a) & np.isfinite(b) & (b != 0), np.where(b < 0, -rest, rest), 0.0)
    return _direct(q, rest, mode)


@helper
def root(a: Array, mode: str) -> Array:
    """Square root in a directed mode, from the sign of the exact remainder."""
    r = np.sqrt(a)
    if a.dtype == np.float32:
        rest = a.astype(np.float64) - r.astype(np.float64) ** 2
    else:
        rest = exactly(lambda x, y: Fraction((x - y * y > 0) - (x - y * y < 0)), "rn", np.zeros(a.shape), a, r)
    return _direct(r, np.where(np.isfinite(a) & (a > 0), rest, 0.0), mode)


def _direct(nearest: Array, rest: Array, mode: str) -> Array:
    down = (rest < 0) & ((mode == "rm") | ((mode == "rz") & (nearest > 0)))
    up = (rest > 0) & ((mode == "rp") | ((mode == "rz") & (nearest < 0)))
    return np.where(down | up, _step(nearest, up), nearest)
