"""cvt between all integer and floating-point types, with every rounding mode, saturation and flushing.

Source: PTX ISA 8.7, section 9.7.9.21. A float beyond the range of an integer type gives the nearest end of the range. NaN gives 0, or
the integer with only the top bit set when the source is f64 or the destination has 64 bits.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import CODES, Emitter, expect, form, handles, helper
from sm70kernels.emulator.floats import rounding
from sm70kernels.emulator.rounding import narrow, two_sum
from sm70kernels.emulator.syntax import WIDTHS, Instruction

Array = NDArray[Any]

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@helper
def integer_to_integer(a: Array, kind: Any, saturate: bool) -> Array:
    """Extend or truncate; with `saturate` clamp to the range of `kind`."""
    if saturate:
        have, want = np.iinfo(a.dtype), np.iinfo(kind)
        low, high = max(int(have.min), int(want.min)), min(int(have.max), int(want.max))
        a = np.clip(a, a.dtype.type(low), a.dtype.type(high))
    return a.astype(kind)


@helper
def float_to_integer(a: Array, kind: Any, way: str) -> Array:
    """Round to an integral value (`way`: rni, rzi, rmi, rpi), then clamp."""
    limits = np.iinfo(kind)
    x = TO_INTEGER[way](a.astype(np.float64))
    high = x >= float(limits.max) if limits.bits == 64 else x > float(limits.max)
    low = x < float(limits.min)
    nan = np.isnan(x)
    result = np.where(high | low | nan, 0.0, x).astype(kind)
    result = np.where(high, kind.type(limits.max), np.where(low, kind.type(limits.min), result))
    if a.dtype == np.float64 or limits.bits == 64:
        top = np.array([1 << (limits.bits - 1)], f"u{kind.itemsize}").view(kind)
        result = np.where(nan, top, result)
    return result


@helper
def integer_to_float(a: Array, kind: Any, mode: str) -> Array:
    """Nearest (or directed) float of an integer."""
    if mode == "rn" and kind != np.float16:
        return a.astype(kind)
    if a.dtype.itemsize < 8:
        return narrow(a.astype(np.float64), 0.0, mode, kind) if kind != np.float64 else a.astype(kind)
    low = a & a.dtype.type(0xFFFFFFFF)
    s, e = two_sum((a - low).astype(np.float64), low.astype(np.float64))
    if kind == np.float64:
        step = {"rm": e < 0, "rp": e > 0, "rz": (e < 0) & (s > 0) | (e > 0) & (s < 0)}.get(mode)
        return s if step is None else np.where(step, np.nextafter(s, np.where(e > 0, np.inf, -np.inf)), s)
    return narrow(s, e, mode, kind)


@helper
def float_to_float(a: Array, kind: Any, mode: str) -> Array:
    """Widen exactly, or narrow in a rounding mode."""
    if a.dtype.itemsize <= kind.itemsize or mode == "rn":
        return a.astype(kind)
    return narrow(a.astype(np.float64), 0.0, mode, kind)


@helper
def integral(a: Array, way: str) -> Array:
    """Round to an integral value in the same type, keeping the sign of zero."""
    return np.asarray(TO_INTEGER[way](a))


def _flushed(text: str, kind: str) -> str:
    return f"flush({text})" if kind == "f32" else text


@handles("cvt")
def emit_conversion(e: Emitter, i: Instruction) -> None:
    modifiers, (to, source) = form(i, "rn rz rm rp rni rzi rmi rpi ftz sat", types=2)
    dst, a = expect(i, 2)
    for kind in (to, source):
        if kind in ("f16x2", "pred") or kind[0] == "b":
            raise i.unknown(f"no conversion of .{kind}")
    integral_mode = modifiers & set(TO_INTEGER)
    mode = rounding(i, modifiers)
    if len(integral_mode) > 1 or (integral_mode and modifiers & {"rn", "rz", "rm", "rp"}):
        raise i.unknown("two rounding modes")
    code = CODES[to]
    text = e.value(a, source)
    from_float, to_float = source[0] == "f", to[0] == "f"
    if "ftz" in modifiers and "f32" not in (to, source):
        raise i.unknown(".ftz concerns f32 only")
    if "ftz" in modifiers and from_float:
        text = _flushed(text, source)
    if not from_float and not to_float:
        if modifiers - {"sat"}:
            raise i.unknown("no rounding between integers")
        e.set(dst, to, f"integer_to_integer({text}, {code}, {'sat' in modifiers})")
        return
    if from_float and not to_float:
        if len(integral_mode) != 1:
            raise i.unknown("a conversion to an integer needs .rni, .rzi, .rmi or .rpi")
        e.set(dst, to, f"float_to_integer({text}, {code}, {next(iter(integral_mode))!r})")
        return
    if not from_float:
        if integral_mode or not modifiers & {"rn", "rz", "rm", "rp"}:
            raise i.unknown("a conversion of an integer to a float needs .rn, .rz, .rm or .rp")
        text = f"integer_to_float({text}, {code}, {mode!r})"
    elif to == source:
        if modifiers & {"rn", "rz", "rm", "rp"}:
            raise i.unknown("a conversion to the same type rounds to integral values only")
        text = f"integral({text}, {next(iter(integral_mode))!r})" if integral_mode else f"{text}.copy()"
    else:
        if integral_mode or (WIDTHS[to] < WIDTHS[source]) != bool(modifiers & {"rn", "rz", "rm", "rp"}):
            raise i.unknown("a narrowing conversion needs a rounding mode, a widening one has none")
        text = f"half_to_single({text})" if (source, to) == ("f16", "f32") else f"float_to_float({text}, {code}, {mode!r})"
    if "ftz" in modifiers:
        text = _flushed(text, to)
    if "sat" in modifiers:
        text = f"saturate({text})"
    elif from_float and to == "f32":
        text = f"canonical({text})"
    elif to == "f16":
        text = f"canonical_half({text})"
    e.set(dst, to, text)
