"""Floating-point arithmetic of f32 and f64: add sub mul fma mad div rcp sqrt rsqrt ex2 lg2 sin cos abs neg min max copysign testp.

Rounded forms are exact in every mode. Approximate forms are computed in double precision and rounded once, so they are at least
as accurate as the hardware, whose error bounds PTX gives; they are not its bits. Source: PTX ISA 8.7, section 9.7.3.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import HELPERS, Emitter, expect, form, handles, helper
from sm70kernels.emulator.rounding import NAN32, canonical, flush
from sm70kernels.emulator.syntax import Instruction

Array = NDArray[Any]

ROUNDINGS = frozenset({"rn", "rz", "rm", "rp"})
MODES = "rn rz rm rp ftz sat"

HELPERS.update(minimum=np.minimum, maximum=np.maximum, bitwise_count=np.bitwise_count, sqrt=np.sqrt)


def operand(e: Emitter, i: Instruction, place: int, kind: str, ftz: bool) -> str:
    text = e.value(i.operands[place], kind)
    return f"flush({text})" if ftz else text


def rounding(i: Instruction, modifiers: frozenset[str]) -> str:
    found = modifiers & ROUNDINGS
    if len(found) > 1:
        raise i.unknown("two rounding modes")
    return next(iter(found), "rn")


def finish(e: Emitter, i: Instruction, kind: str, text: str, modifiers: frozenset[str]) -> None:
    """Assign a result: flushed, saturated and with canonical NaNs as the modifiers and the type ask for."""
    if "ftz" in modifiers:
        text = f"flush({text})"
    if "sat" in modifiers:
        text = f"saturate({text})"
    elif kind == "f32":
        text = f"canonical({text})"
    e.set(i.operands[0], kind, text)


@handles("add", "sub", "mul", kinds="float")
def emit_sum_or_product(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, MODES)
    expect(i, 3)
    if kind == "f64" and modifiers & {"ftz", "sat"}:
        raise i.unknown("no .ftz or .sat of f64")
    a, b = (operand(e, i, place, kind, "ftz" in modifiers) for place in (1, 2))
    mode = rounding(i, modifiers)
    if i.base == "mul" and "ftz" in modifiers:
        text = f"multiply_flushed({a}, {b}, None, {mode!r})"
    elif mode == "rn":
        text = f"({a} {dict(add='+', sub='-', mul='*')[i.base]} {b})"
    elif kind == "f64":
        text = f"directed_double({i.base!r}, {a}, {b}, {mode!r})"
    elif i.base == "mul":
        text = f"multiply_single({a}, {b}, {mode!r})"
    else:
        text = f"add_single({a}, {'-' if i.base == 'sub' else ''}{b}, {mode!r})"
    finish(e, i, kind, text, modifiers)


@handles("fma", "mad", kinds="float")
def emit_fma(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, MODES)
    expect(i, 4)
    if not modifiers & ROUNDINGS or (kind == "f64" and modifiers & {"ftz", "sat"}):
        raise i.unknown("fma needs a rounding mode, and f64 has no .ftz or .sat")
    values = ", ".join(operand(e, i, place, kind, "ftz" in modifiers) for place in (1, 2, 3))
    name = "multiply_flushed" if "ftz" in modifiers else f"fma_{'single' if kind == 'f32' else 'double'}"
    finish(e, i, kind, f"{name}({values}, {rounding(i, modifiers)!r})", modifiers)


@helper
def divide_approximately(a: Array, b: Array) -> Array:
    """div.approx: a (1/b), which is a signed zero (or NaN for infinite a) for divisors beyond 2^126."""
    size = np.abs(b)
    inverse = np.where((size > np.float32(2.0**126)) & np.isfinite(b), np.copysign(np.float32(0), b), np.float32(1))
    return np.where(inverse == 0, a * inverse, a / b)


@handles("div", kinds="float")
def emit_division(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "rn rz rm rp ftz approx full")
    expect(i, 3)
    ways = modifiers & (ROUNDINGS | {"approx", "full"})
    if len(ways) != 1 or (kind == "f64" and modifiers & {"ftz", "approx", "full"}):
        raise i.unknown("div is .approx, .full or rounded; f64 only rounded, without .ftz")
    way = next(iter(ways))
    a, b = (operand(e, i, place, kind, "ftz" in modifiers) for place in (1, 2))
    if way == "approx":
        text = f"divide_approximately({a}, {b})"
    elif way in ("rn", "full"):
        text = f"({a} / {b})"
    else:
        text = f"divide_single({a}, {b}, {way!r})" if kind == "f32" else f"directed_double('div', {a}, {b}, {way!r})"
    finish(e, i, kind, text, modifiers)


def _flush_double(a: Array) -> Array:
    return np.where(np.abs(a) < 2.0**-1022, np.copysign(0.0, a), a)


def _upper_word(a: Array) -> Array:
    return (a.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


@helper
def inverse_double(a: Array) -> Array:
    """rcp.approx.ftz.f64: the upper word of 1/a, the lower word zero, subnormals flushed."""
    return _flush_double(_upper_word(1.0 / _flush_double(a)))


@helper
def gross_inverse_root(a: Array) -> Array:
    """rsqrt.approx.ftz.f64: the upper word of the inverse root, the lower word zero, subnormals flushed."""
    return _upper_word(1.0 / np.sqrt(_flush_double(a)))


@helper
def inverse_root_double(a: Array) -> Array:
    """rsqrt.approx.f64."""
    return np.asarray(1.0 / np.sqrt(a))


@handles("rcp", "sqrt", "rsqrt", kinds="float")
def emit_root(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "rn rz rm rp ftz approx")
    expect(i, 2)
    ways = modifiers & (ROUNDINGS | {"approx"})
    if len(ways) != 1 or (i.base == "rsqrt" and ways != {"approx"}):
        raise i.unknown("one of .approx and the rounding modes is needed (rsqrt: .approx)")
    way = next(iter(ways))
    if kind == "f64" and way == "approx":
        if i.base == "sqrt" or (i.base == "rcp" and "ftz" not in modifiers):
            raise i.unknown("the approximate forms of f64 are rcp.approx.ftz and rsqrt.approx{.ftz}")
        name = "inverse_double" if i.base == "rcp" else "gross_inverse_root" if "ftz" in modifiers else "inverse_root_double"
        e.set(i.operands[0], kind, f"{name}({e.value(i.operands[1], kind)})")
        return
    if kind == "f64" and "ftz" in modifiers:
        raise i.unknown("no .ftz of this form of f64")
    a = operand(e, i, 1, kind, "ftz" in modifiers)
    one = e.constant("1.0", kind)
    if i.base == "rsqrt":
        text = f"function_single('rsqrt', {a})"
    elif i.base == "rcp" and way in ("rn", "approx"):
        text = f"({one} / {a})"
    elif i.base == "rcp":
        text = f"divide_single({one}, {a}, {way!r})" if kind == "f32" else f"directed_double('div', {one}, {a}, {way!r})"
    else:
        text = f"sqrt({a})" if way in ("rn", "approx") else f"root({a}, {way!r})"
    finish(e, i, kind, text, modifiers)


@helper
def function_single(name: str, a: Array) -> Array:
    """A special function of float32 through float64. sin and cos of infinities are NaN; lg2 and rsqrt of negative numbers too."""
    x = a.astype(np.float64)
    if name == "rsqrt":
        result = 1.0 / np.sqrt(x)
    elif name == "ex2":
        result = np.exp2(x)
    elif name == "lg2":
        result = np.log2(x)
    else:
        result = np.sin(x) if name == "sin" else np.cos(x)
    return np.asarray(result).astype(np.float32)


@handles("ex2", "lg2", "sin", "cos", kinds="float")
def emit_function(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "approx ftz")
    expect(i, 2)
    if kind != "f32" or "approx" not in modifiers:
        raise i.unknown(f"{i.base} is {i.base}.approx.f32")
    finish(e, i, kind, f"function_single({i.base!r}, {operand(e, i, 1, kind, 'ftz' in modifiers)})", modifiers)


@handles("abs", "neg", kinds="float")
def emit_sign(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "ftz")
    dst, _ = expect(i, 2)
    if kind == "f64" and modifiers:
        raise i.unknown("no .ftz of f64")
    a = operand(e, i, 1, kind, "ftz" in modifiers)
    e.set(dst, kind, f"abs({a})" if i.base == "abs" else f"-{a}")


@helper
def extreme(a: Array, b: Array, largest: bool) -> Array:
    """min or max: a number beats NaN, -0 is less than +0, two NaNs give the canonical one."""
    result = np.fmax(a, b) if largest else np.fmin(a, b)
    equal = a == b
    if equal.any():
        kind = np.dtype(f"u{a.dtype.itemsize}")
        x, y = a.view(kind), b.view(kind)
        result = np.where(equal, ((x & y) if largest else (x | y)).view(a.dtype), result)
    return canonical(result) if a.dtype == np.float32 else result


@handles("min", "max", kinds="float")
def emit_extreme(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "ftz")
    expect(i, 3)
    if kind == "f64" and modifiers:
        raise i.unknown("no .ftz of f64")
    a, b = (operand(e, i, place, kind, "ftz" in modifiers) for place in (1, 2))
    e.set(i.operands[0], kind, f"extreme({a}, {b}, {i.base == 'max'})")


@handles("copysign", kinds="float")
def emit_copysign(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a, b = expect(i, 3)
    e.set(dst, kind, f"copysign({e.value(b, kind)}, {e.value(a, kind)})")


@helper
def has_property(a: Array, name: str) -> Array:
    """testp; zero counts as normal, as it does on the hardware."""
    smallest = np.finfo(a.dtype).tiny
    size = np.abs(a)
    tests: dict[str, Array] = {
        "finite": np.isfinite(a), "infinite": np.isinf(a), "number": ~np.isnan(a), "notanumber": np.isnan(a),
        "normal": np.isfinite(a) & ((size >= smallest) | (a == 0)), "subnormal": (size < smallest) & (a != 0),
    }  # fmt: skip
    return tests[name]


@handles("testp", kinds="float")
def emit_property(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "finite infinite number notanumber normal subnormal")
    dst, a = expect(i, 2)
    if len(modifiers) != 1:
        raise i.unknown("testp names one property")
    e.set(dst, "pred", f"has_property({e.value(a, kind)}, {next(iter(modifiers))!r})")


HELPERS.update(copysign=np.copysign, NAN32=NAN32, flush=flush)
