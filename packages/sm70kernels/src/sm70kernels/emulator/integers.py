"""Integer arithmetic: add sub mul mad (with carry chains) div rem abs neg min max sad dp4a dp2a mul24 mad24.

Source: PTX ISA 8.7, sections 9.7.1 and 9.7.2.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import Emitter, expect, form, handles, helper
from sm70kernels.emulator.syntax import Instruction

Array = NDArray[Any]

CARRY = "%cc.cf"
"""Pseudo-register of the carry flag."""

UNSIGNED = {"s8": "u8", "s16": "u16", "s32": "u32", "s64": "u64", "b16": "u16", "b32": "u32", "b64": "u64"}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
BITS = {"u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64}


def unsigned(type_name: str) -> str:
    """The unsigned type of the same width: sums, differences and low products are the same bits."""
    return UNSIGNED.get(type_name, type_name)


@helper
def saturate_s32(value: Array) -> Array:
    """Clamp 64-bit values to the range of s32."""
    return np.clip(value, -(2**31), 2**31 - 1).astype(np.int32)


@helper
def high_u64(a: Array, b: Array) -> Array:
    """Upper 64 bits of the unsigned 128-bit product."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a & mask, a >> half, b & mask, b >> half
    middle = a_high * b_low + ((a_low * b_low) >> half)
    carry = (middle & mask) + a_low * b_high
    result: Array = a_high * b_high + (middle >> half) + (carry >> half)
    return result


@helper
def high_s64(a: Array, b: Array) -> Array:
    """Upper 64 bits of the signed 128-bit product."""
    x, y = a.view(np.uint64), b.view(np.uint64)
    result: Array = high_u64(x, y) - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return result.view(np.int64)


@helper
def divide(a: Array, b: Array) -> Array:
    """Quotient truncated towards zero; all ones for a zero divisor, as the hardware gives."""
    if a.dtype.kind == "u":
        quotient: Array = a // np.where(b == 0, a.dtype.type(1), b)
    else:
        kind = np.dtype(f"u{a.dtype.itemsize}")
        size = np.abs(a).view(kind) // np.where(b == 0, kind.type(1), np.abs(b).view(kind))
        quotient = np.where((a < 0) != (b < 0), -size.view(a.dtype), size.view(a.dtype))
    return np.where(b == 0, ~a.dtype.type(0), quotient)


@helper
def remainder(a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; the dividend itself for a zero divisor."""
    if a.dtype.kind == "u":
        return np.where(b == 0, a, a % np.where(b == 0, a.dtype.type(1), b))
    kind = np.dtype(f"u{a.dtype.itemsize}")
    size = (np.abs(a).view(kind) % np.where(b == 0, kind.type(1), np.abs(b).view(kind))).view(a.dtype)
    return np.where(b == 0, a, np.where(a < 0, -size, size))


@helper
def dot_bytes(a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool) -> Array:
    """dp4a: c plus the sum of four byte products."""
    x = np.ascontiguousarray(a).view(np.int8 if a_signed else np.uint8).reshape(-1, 4).astype(np.int32)
    y = np.ascontiguousarray(b).view(np.int8 if b_signed else np.uint8).reshape(-1, 4).astype(np.int32)
    result: Array = (x * y).sum(axis=1, dtype=np.int32).view(np.uint32) + c
    return result


@helper
def dot_halves(a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool, high: bool) -> Array:
    """dp2a: c plus two products of a's 16-bit halves with the low or high two bytes of b."""
    x = np.ascontiguousarray(a).view(np.int16 if a_signed else np.uint16).reshape(-1, 2).astype(np.int32)
    y = np.ascontiguousarray(b).view(np.int8 if b_signed else np.uint8).reshape(-1, 4).astype(np.int32)[:, 2 * high : 2 * high + 2]
    result: Array = (x * y).sum(axis=1, dtype=np.int32).view(np.uint32) + c
    return result


@handles("add", "sub", kinds="int")
def emit_sum(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "sat cc")
    dst, a, b = expect(i, 3)
    sign = "+" if i.base == "add" else "-"
    if "sat" in modifiers:
        if kind != "s32" or "cc" in modifiers:
            raise i.unknown("saturation exists for s32 only")
        e.set(dst, "s32", f"saturate_s32({e.value(a, 's32')}.astype(i8) {sign} {e.value(b, 's32')}.astype(i8))")
        return
    kind = unsigned(kind)
    if "cc" not in modifiers:
        e.set(dst, kind, f"{e.value(a, kind)} {sign} {e.value(b, kind)}")
        return
    x, y = e.temporary(e.value(a, kind)), e.temporary(e.value(b, kind))
    total = e.temporary(f"{x} {sign} {y}")
    e.set(dst, kind, total)
    e.assign(e.register(CARRY)[0], f"{total} < {x}" if i.base == "add" else f"{x} < {y}")


@handles("addc", "subc", kinds="int")
def emit_sum_with_carry(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "cc")
    dst, a, b = expect(i, 3)
    kind = unsigned(kind)
    code = "u4" if kind == "u32" else "u8"
    carry = e.register(CARRY)[0]
    flag = e.temporary(e.read(carry))
    x, y = e.temporary(e.value(a, kind)), e.temporary(e.value(b, kind))
    sign = "+" if i.base == "addc" else "-"
    total = e.temporary(f"{x} {sign} {y} {sign} {flag}.astype({code})")
    e.set(dst, kind, total)
    if "cc" in modifiers:
        out = f"({total} < {x}) | ({flag} & ({total} == {x}))" if i.base == "addc" else f"({x} < {y}) | ({flag} & ({x} == {y}))"
        e.assign(carry, out)


def product(e: Emitter, i: Instruction, kind: str, part: str, a: str, b: str) -> tuple[str, str]:
    """Return (expression, type) of the low, high or wide product of two values of type `kind`."""
    if part == "lo":
        return f"{a} * {b}", unsigned(kind)
    if kind in ("u64", "s64"):
        if part == "wide":
            raise i.unknown("there is no wide product of 64-bit values")
        return f"high_{kind}({a}, {b})", kind
    wide = WIDER[kind]
    code = {"u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8"}[wide]
    whole = f"{a}.astype({code}) * {b}.astype({code})"
    if part == "wide":
        return whole, wide
    narrow = {"u16": "u2", "s16": "i2", "u32": "u4", "s32": "i4"}[kind]
    return f"(({whole}) >> {e.integer(BITS[kind], wide)}).astype({narrow})", kind


def part_of(i: Instruction, modifiers: frozenset[str]) -> str:
    parts = modifiers & {"lo", "hi", "wide"}
    if len(parts) != 1:
        raise i.unknown("one of .lo, .hi and .wide is needed")
    return next(iter(parts))


@handles("mul", kinds="int")
def emit_product(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "lo hi wide")
    dst, a, b = expect(i, 3)
    part = part_of(i, modifiers)
    kind = unsigned(kind) if part == "lo" else kind
    expression, result = product(e, i, kind, part, e.value(a, kind), e.value(b, kind))
    e.set(dst, result, expression)


@handles("mad", "madc", kinds="int")
def emit_product_sum(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "lo hi wide sat cc")
    dst, a, b, c = expect(i, 4)
    part = part_of(i, modifiers)
    kind = unsigned(kind) if part == "lo" else kind
    expression, result = product(e, i, kind, part, e.value(a, kind), e.value(b, kind))
    if "sat" in modifiers:
        if (kind, part) != ("s32", "hi") or "cc" in modifiers or i.base == "madc":
            raise i.unknown("saturation exists for mad.hi.sat.s32 only")
        e.set(dst, "s32", f"saturate_s32(({expression}).astype(i8) + {e.value(c, 's32')}.astype(i8))")
        return
    plain = unsigned(result)
    view = "" if plain == result else f".view({'u' + str(BITS[result] // 8)})"
    x, y = f"({expression}){view}", e.value(c, plain)
    if "cc" not in modifiers and i.base == "mad":
        e.set(dst, plain, f"{x} + {y}")
        return
    carry = e.register(CARRY)[0]
    x, y = e.temporary(x), e.temporary(y)
    flag = e.temporary(e.read(carry)) if i.base == "madc" else None
    code = f"u{BITS[plain] // 8}"
    total = e.temporary(f"{x} + {y}" + (f" + {flag}.astype({code})" if flag else ""))
    e.set(dst, plain, total)
    if "cc" in modifiers:
        e.assign(carry, f"({total} < {x})" + (f" | ({flag} & ({total} == {x}))" if flag else ""))


@handles("mul24", "mad24", kinds="int")
def emit_product_of_24_bits(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "lo hi sat" if i.base == "mad24" else "lo hi")
    dst, a, b, *c = expect(i, 3 if i.base == "mul24" else 4)
    bad_sat = "sat" in modifiers and (kind != "s32" or "hi" not in modifiers)
    if kind not in ("u32", "s32") or len(modifiers & {"lo", "hi"}) != 1 or bad_sat:
        raise i.unknown("24-bit products are of u32 or s32, .lo or .hi; .hi of s32 may saturate")
    wide = "u8" if kind == "u32" else "i8"
    drop = e.integer(8, kind)
    x, y = (f"(({e.value(operand, kind)} << {drop}) >> {drop}).astype({wide})" for operand in (a, b))
    whole = f"{x} * {y}"
    if "hi" in modifiers:
        whole = f"({whole}) >> {e.integer(16, 'u64' if kind == 'u32' else 's64')}"
    if "sat" in modifiers:
        e.set(dst, "s32", f"saturate_s32(({whole}) + {e.value(c[0], 's32')}.astype(i8))")
        return
    result = f"({whole}).astype(u4)"
    e.set(dst, "u32", f"{result} + {e.value(c[0], 'u32')}" if c else result)


@handles("div", "rem", kinds="int")
def emit_quotient(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a, b = expect(i, 3)
    if kind not in BITS:
        raise i.unknown(f"no division of .{kind}")
    e.set(dst, kind, f"{'divide' if i.base == 'div' else 'remainder'}({e.value(a, kind)}, {e.value(b, kind)})")


@handles("abs", "neg", kinds="int")
def emit_sign(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a = expect(i, 2)
    if kind[0] != "s":
        raise i.unknown("abs and neg are of signed types")
    e.set(dst, kind, f"abs({e.value(a, kind)})" if i.base == "abs" else f"-{e.value(a, kind)}")


@handles("min", "max", kinds="int")
def emit_extreme(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a, b = expect(i, 3)
    if kind not in BITS:
        raise i.unknown(f"no {i.base} of .{kind}")
    e.set(dst, kind, f"{i.base}imum({e.value(a, kind)}, {e.value(b, kind)})")


@handles("sad", kinds="int")
def emit_absolute_difference(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a, b, c = expect(i, 4)
    x, y = e.value(a, kind), e.value(b, kind)
    plain = unsigned(kind)
    e.set(dst, plain, f"(maximum({x}, {y}) - minimum({x}, {y})).view(u{BITS[kind] // 8}) + {e.value(c, plain)}")


@handles("dp4a", "dp2a", kinds="int")
def emit_dot(e: Emitter, i: Instruction) -> None:
    modifiers, (a_kind, b_kind) = form(i, "lo hi" if i.base == "dp2a" else "", types=2)
    dst, a, b, c = expect(i, 4)
    signs = f"{a_kind == 's32'}, {b_kind == 's32'}"
    if not {a_kind, b_kind} <= {"u32", "s32"} or (i.base == "dp2a") != (len(modifiers) == 1):
        raise i.unknown("dp4a and dp2a are of u32 and s32")
    values = ", ".join(e.value(operand, "u32") for operand in (a, b, c))
    if i.base == "dp4a":
        e.set(dst, "u32", f"dot_bytes({values}, {signs})")
    else:
        e.set(dst, "u32", f"dot_halves({values}, {signs}, {'hi' in modifiers})")
