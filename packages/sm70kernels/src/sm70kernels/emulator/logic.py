"""Bits: and or xor not cnot lop3 shl shr shf bfe bfi bfind brev clz popc prmt fns.

Source: PTX ISA 8.7, sections 9.7.1.14 to 9.7.1.22 and 9.7.8 (logic and shift), 9.7.9.7 (prmt).
"""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import CODES, Emitter, expect, form, handles, helper
from sm70kernels.emulator.syntax import WIDTHS, Instruction

Array = NDArray[Any]

OPERATORS = {"and": "&", "or": "|", "xor": "^"}

TWO_INPUTS = {0: "0", 1: "~(x | y)", 2: "~x & y", 3: "~x", 4: "x & ~y", 5: "~y", 6: "x ^ y", 7: "~(x & y)", 8: "x & y",
              9: "~(x ^ y)", 10: "y", 11: "~x | y", 12: "x", 13: "x | ~y", 14: "x | y", 15: "1"}  # fmt: skip
"""Function of two bits by its truth table: bit 2x+y of the key."""


def lookup_expression(table: int) -> str:
    """Return a short expression in a, b, c of the three-input function whose value is bit 4a+2b+c of `table`; "0" and "1" if constant."""

    def two(key: int, x: str, y: str) -> str:
        return "".join({"x": x, "y": y}.get(char, char) for char in TWO_INPUTS[key])

    best = ""
    for x, y, z in permutations("abc"):
        weights = {"a": 4, "b": 2, "c": 1}

        def half(of_x: int, x: str = x, y: str = y, z: str = z, weights: dict[str, int] = weights) -> int:
            bits = ((weights[x] * of_x + weights[y] * v + weights[z] * w, 2 * v + w) for v in (0, 1) for w in (0, 1))
            return sum(((table >> place) & 1) << key for place, key in bits)

        low, high = half(0), half(1)
        if low == high:
            text = two(low, y, z)
        elif low == 15 - high:
            text = f"{x} ^ ({two(low, y, z)})" if low not in (0, 15) else (x if low == 0 else f"~{x}")
        elif low == 0:
            text = f"{x} & ({two(high, y, z)})"
        elif high == 15:
            text = f"{x} | ({two(low, y, z)})"
        elif high == 0:
            text = f"~{x} & ({two(low, y, z)})"
        elif low == 15:
            text = f"~{x} | ({two(high, y, z)})"
        else:
            text = f"({x} & ({two(high, y, z)})) | (~{x} & ({two(low, y, z)}))"
        operators = sum(map(text.count, "&|^~"))
        if not best or operators < sum(map(best.count, "&|^~")):
            best = text
    return best


@helper
def shift_left(a: Array, count: Array) -> Array:
    """a << count, zero from the width on."""
    width = a.dtype.itemsize * 8
    return np.where(count < width, a << np.minimum(count, width - 1).astype(a.dtype), a.dtype.type(0))


@helper
def shift_right(a: Array, count: Array) -> Array:
    """a >> count, filled with zeros or, for signed types, with the sign."""
    width = a.dtype.itemsize * 8
    shifted: Array = a >> np.minimum(count, width - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(count < width, shifted, a.dtype.type(0))


@helper
def funnel(low: Array, high: Array, count: Array, left: bool, wrap: bool) -> Array:
    """shf: the upper (left) or lower word of high:low shifted by count, wrapped to 0..31 or clamped to 32."""
    amount = (count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))).astype(np.uint64)
    word = (high.astype(np.uint64) << np.uint64(32)) | low
    return ((word << amount) >> np.uint64(32) if left else word >> amount).astype(np.uint32)


def _ones(count: Array, kind: Any) -> Array:
    """Mask of the lowest `count` bits, count of any size."""
    width = kind.itemsize * 8
    most = kind.type(2**width - 1)
    return np.where(count >= width, most, (kind.type(1) << np.minimum(count, width - 1).astype(kind)) - kind.type(1))


@helper
def extract_bits(a: Array, position: Array, length: Array) -> Array:
    """bfe: `length` bits from `position`; beyond the word come zeros or, for signed types, the field's sign bit."""
    kind = np.dtype(f"u{a.dtype.itemsize}")
    width = kind.itemsize * 8
    position, length = position & np.uint32(255), length & np.uint32(255)
    bits = a.view(kind)
    keep = _ones(np.minimum(length, np.where(position < width, np.uint32(width) - position, np.uint32(0))), kind)
    field = shift_right(bits, position) & keep
    if a.dtype.kind == "u":
        return field
    last = np.minimum(position + length - np.uint32(1), np.uint32(width - 1))
    sign = (length > 0) & ((bits >> last.astype(kind)) & kind.type(1)).astype(bool)
    return np.where(sign, field | ~keep, field).view(a.dtype)


@helper
def insert_bits(a: Array, b: Array, position: Array, length: Array) -> Array:
    """bfi: b with `length` bits from `position` replaced by a's lowest."""
    position, length = position & np.uint32(255), length & np.uint32(255)
    mask = shift_left(_ones(length, b.dtype), position)
    result: Array = (b & ~mask) | (shift_left(a, position) & mask)
    return result


@helper
def bit_length(a: Array) -> Array:
    """Number of bits up to the highest one: 0 for 0. Unsigned 32- or 64-bit input, int32 result."""
    if a.dtype.itemsize <= 4:
        return np.frexp(a.astype(np.float64))[1].astype(np.int32)
    high = (a >> np.uint64(32)).astype(np.uint32)
    low = bit_length(a.astype(np.uint32))
    return np.where(high != 0, bit_length(high) + np.int32(32), low)


@helper
def find_bit(a: Array, shift_amount: bool) -> Array:
    """bfind: place of the highest bit that differs from the sign, all ones when there is none."""
    kind = np.dtype(f"u{a.dtype.itemsize}")
    bits = a if a.dtype.kind == "u" else np.where(a < 0, ~a, a).view(kind)
    place = bit_length(bits) - np.int32(1)
    if shift_amount:
        place = np.where(place < 0, place, np.int32(kind.itemsize * 8 - 1) - place)
    return place.view(np.uint32)


@helper
def reverse_bits(a: Array) -> Array:
    """brev."""
    width = a.dtype.itemsize * 8
    for step, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
        part, by = a.dtype.type(mask & (2**width - 1)), a.dtype.type(step)
        a = ((a >> by) & part) | ((a & part) << by)
    return a.byteswap()


@helper
def permute_bytes(a: Array, b: Array, selector: Array, mode: str = "") -> Array:
    """prmt: four bytes chosen from b:a by nibbles of the selector (whose bit 3 replicates the sign), or by one of the modes."""
    word = (b.astype(np.uint64) << np.uint64(32)) | a
    result: Array = np.zeros(1, np.uint32)
    for place in range(4):
        if mode:
            low = selector & np.uint32(3)
            modes: dict[str, Callable[[Array, Any], Array]] = {
                "f4e": lambda s, p: s + p, "b4e": lambda s, p: (s - p) & 7, "rc8": lambda s, p: s, "ecl": np.maximum,
                "ecr": np.minimum, "rc16": lambda s, p: ((s & 1) << 1) + (p & 1),
            }  # fmt: skip
            index = modes[mode](low, np.uint32(place))
            sign = None
        else:
            nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
            index, sign = nibble & np.uint32(7), nibble & np.uint32(8)
        byte = ((word >> (index.astype(np.uint64) << np.uint64(3))) & np.uint64(255)).astype(np.uint32)
        if sign is not None:
            byte = np.where(sign != 0, np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)), byte)
        result = result | (byte << np.uint32(8 * place))
    return result


@helper
def permute_constant(a: Array, b: Array, nibbles: tuple[int, int, int, int]) -> Array:
    """prmt with a selector known beforehand."""
    sources = tuple(np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in (a, b))
    out = np.empty((max(a.size, b.size), 4), np.uint8)
    for place, nibble in enumerate(nibbles):
        byte = sources[(nibble & 7) >> 2][:, nibble & 3]
        out[:, place] = byte if nibble < 8 else (byte.view(np.int8) >> np.int8(7)).view(np.uint8)
    return out.view(np.uint32).reshape(-1)


@handles("and", "or", "xor")
def emit_logic(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a, b = expect(i, 3)
    if kind not in ("pred", "b16", "b32", "b64"):
        raise i.unknown(f"no {i.base} of .{kind}")
    e.set(dst, kind, f"{e.value(a, kind)} {OPERATORS[i.base]} {e.value(b, kind)}")


@handles("not", "cnot")
def emit_not(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a = expect(i, 2)
    if kind not in ("pred", "b16", "b32", "b64") or (i.base, kind) == ("cnot", "pred"):
        raise i.unknown(f"no {i.base} of .{kind}")
    e.set(dst, kind, f"~{e.value(a, kind)}" if i.base == "not" else f"({e.value(a, kind)} == 0).astype({CODES[kind]})")


@handles("lop3")
def emit_lookup(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a, b, c, table = expect(i, 5)
    if kind != "b32" or table.kind != "imm":
        raise i.unknown("lop3 is of b32 with an immediate table")
    text = lookup_expression(int(table.text, 0))
    if text in "01":
        e.set(dst, kind, e.constant("0" if text == "0" else "0xffffffff", kind), fresh=False)
        return
    names = {name: e.value(operand, kind) for name, operand in zip("abc", (a, b, c), strict=True)}
    e.set(dst, kind, "".join(names.get(char, char) for char in text), fresh=len(text) > 1)


@handles("shl", "shr")
def emit_shift(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a, count = expect(i, 3)
    if kind not in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64") or (i.base == "shl" and kind[0] != "b"):
        raise i.unknown(f"no {i.base} of .{kind}")
    value = e.value(a, kind)
    if count.kind == "imm" and 0 <= int(count.text.rstrip("uU"), 0) < 8 * WIDTHS[kind]:
        sign = "<<" if i.base == "shl" else ">>"
        e.set(dst, kind, f"{value} {sign} {e.constant(count.text, kind)}")
    else:
        e.set(dst, kind, f"shift_{'left' if i.base == 'shl' else 'right'}({value}, {e.value(count, 'u32')})")


@handles("shf")
def emit_funnel(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "l r wrap clamp")
    dst, low, high, count = expect(i, 4)
    if kind != "b32" or len(modifiers & {"l", "r"}) != 1 or len(modifiers & {"wrap", "clamp"}) != 1:
        raise i.unknown("shf is shf.{l,r}.{wrap,clamp}.b32")
    values = ", ".join(e.value(operand, "u32") for operand in (low, high, count))
    e.set(dst, kind, f"funnel({values}, {'l' in modifiers}, {'wrap' in modifiers})")


@handles("bfe", "bfi")
def emit_field(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, *values, position, length = expect(i, 4 if i.base == "bfe" else 5)
    if WIDTHS.get(kind, 0) < 4 or (kind[0] == "b") == (i.base == "bfe"):
        raise i.unknown(f"no {i.base} of .{kind}")
    texts = [*(e.value(operand, kind) for operand in values), e.value(position, "u32"), e.value(length, "u32")]
    e.set(dst, kind, f"{'extract' if i.base == 'bfe' else 'insert'}_bits({', '.join(texts)})")


@handles("bfind", "brev", "clz", "popc")
def emit_count(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "shiftamt" if i.base == "bfind" else "")
    dst, a = expect(i, 2)
    if WIDTHS[kind] < 4 or (kind[0] == "b") == (i.base == "bfind"):
        raise i.unknown(f"no {i.base} of .{kind}")
    value = e.value(a, kind)
    if i.base == "bfind":
        e.set(dst, "u32", f"find_bit({value}, {'shiftamt' in modifiers})")
    elif i.base == "brev":
        e.set(dst, kind, f"reverse_bits({value})")
    elif i.base == "clz":
        e.set(dst, "s32", f"i4.type({8 * WIDTHS[kind]}) - bit_length({value})")
    else:
        e.set(dst, "u32", f"bitwise_count({value}).astype(u4)")


@handles("prmt")
def emit_permute(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "f4e b4e rc8 ecl ecr rc16")
    dst, a, b, selector = expect(i, 4)
    if kind != "b32" or len(modifiers) > 1:
        raise i.unknown("prmt is of b32 with one mode at most")
    x, y = e.value(a, kind), e.value(b, kind)
    if selector.kind == "imm" and not modifiers:
        number = int(selector.text.rstrip("uU"), 0)
        nibbles = tuple((number >> 4 * place) & 15 for place in range(4))
        e.set(dst, kind, f"permute_constant({x}, {y}, {nibbles})")
    else:
        e.set(dst, kind, f"permute_bytes({x}, {y}, {e.value(selector, kind)}, {next(iter(modifiers), '')!r})")
