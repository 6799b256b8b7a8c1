"""Integer arithmetic: every type of every instruction against Python's unbounded integers, wrapped to the register."""

import pytest

from .harness import Row, check, ids
from .operands import operands, signed

SIGNED, UNSIGNED = ("s16", "s32", "s64"), ("u16", "u32", "u64")
TYPES = (*UNSIGNED, *SIGNED)


def number(kind: str, bits: int) -> int:
    width = int(kind[1:])
    bits &= (1 << width) - 1
    return signed(bits, width) if kind[0] == "s" else bits


def wrap(kind: str, value: int) -> int:
    return value & ((1 << int(kind[1:])) - 1)


def clamp(value: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, value)) & 0xFFFFFFFF


def quotient(a: int, b: int) -> int:
    """Rounded toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def rows_of(kind: str) -> list[Row]:
    """The rows every type has."""
    width = int(kind[1:])

    def low(function):  # type: ignore[no-untyped-def]
        return lambda *bits: wrap(kind, function(*(number(kind, x) for x in bits)))

    def high(function):  # type: ignore[no-untyped-def]
        return lambda a, b, c=0: wrap(kind, (function(number(kind, a), number(kind, b)) >> width) + number(kind, c))

    two, three = f"{kind} {kind}", f"{kind} {kind} {kind}"
    return [
        Row(f"add.{kind} %d, %a, %b;", kind, two, low(lambda a, b: a + b)),
        Row(f"sub.{kind} %d, %a, %b;", kind, two, low(lambda a, b: a - b)),
        Row(f"mul.lo.{kind} %d, %a, %b;", kind, two, low(lambda a, b: a * b)),
        Row(f"mul.hi.{kind} %d, %a, %b;", kind, two, high(lambda a, b: a * b)),
        Row(f"mad.lo.{kind} %d, %a, %b, %c;", kind, three, low(lambda a, b, c: a * b + c)),
        Row(f"mad.hi.{kind} %d, %a, %b, %c;", kind, three, high(lambda a, b: a * b)),
        Row(f"min.{kind} %d, %a, %b;", kind, two, low(min)),
        Row(f"max.{kind} %d, %a, %b;", kind, two, low(max)),
        Row(f"sad.{kind} %d, %a, %b, %c;", kind, three, low(lambda a, b, c: c + abs(a - b))),
    ]


def signed_rows(kind: str) -> list[Row]:
    return [
        Row(f"abs.{kind} %d, %a;", kind, kind, lambda a: wrap(kind, abs(number(kind, a)))),
        Row(f"neg.{kind} %d, %a;", kind, kind, lambda a: wrap(kind, -number(kind, a))),
    ]


def wide_rows(kind: str) -> list[Row]:
    """Products of twice the width."""
    double = f"{kind[0]}{2 * int(kind[1:])}"

    def formula(a: int, b: int, c: int = 0) -> int:
        return wrap(double, number(kind, a) * number(kind, b) + number(double, c))

    return [
        Row(f"mul.wide.{kind} %d, %a, %b;", double, f"{kind} {kind}", formula),
        Row(f"mad.wide.{kind} %d, %a, %b, %c;", double, f"{kind} {kind} {double}", formula),
    ]


def rows_of_24(kind: str) -> list[Row]:
    """Products of the low 24 bits of each operand: bits 0-31 or 16-47."""

    def product(a: int, b: int) -> int:
        x, y = a & 0xFFFFFF, b & 0xFFFFFF
        return signed(x, 24) * signed(y, 24) if kind == "s32" else x * y

    return [
        Row(f"mul24.lo.{kind} %d, %a, %b;", kind, f"{kind} {kind}", lambda a, b: wrap(kind, product(a, b))),
        Row(f"mul24.hi.{kind} %d, %a, %b;", kind, f"{kind} {kind}", lambda a, b: wrap(kind, product(a, b) >> 16)),
        Row(f"mad24.lo.{kind} %d, %a, %b, %c;", kind, f"{kind} {kind} {kind}", lambda a, b, c: wrap(kind, product(a, b) + c)),
        Row(f"mad24.hi.{kind} %d, %a, %b, %c;", kind, f"{kind} {kind} {kind}", lambda a, b, c: wrap(kind, (product(a, b) >> 16) + c)),
    ]


def s32(bits: int) -> int:
    return signed(bits, 32)


SATURATING = [
    Row("add.sat.s32 %d, %a, %b;", "s32", "s32 s32", lambda a, b: clamp(s32(a) + s32(b))),
    Row("sub.sat.s32 %d, %a, %b;", "s32", "s32 s32", lambda a, b: clamp(s32(a) - s32(b))),
    Row("mad.hi.sat.s32 %d, %a, %b, %c;", "s32", "s32 s32 s32", lambda a, b, c: clamp((s32(a) * s32(b) >> 32) + s32(c))),
    Row(
        "mad24.hi.sat.s32 %d, %a, %b, %c;",
        "s32",
        "s32 s32 s32",
        lambda a, b, c: clamp((signed(a & 0xFFFFFF, 24) * signed(b & 0xFFFFFF, 24) >> 16) + s32(c)),
    ),
]

ARITHMETIC = [row for kind in TYPES for row in rows_of(kind)]
ARITHMETIC += [row for kind in SIGNED for row in signed_rows(kind)]
ARITHMETIC += [row for kind in ("u16", "s16", "u32", "s32") for row in wide_rows(kind)]
ARITHMETIC += rows_of_24("u32") + rows_of_24("s32") + SATURATING


@pytest.mark.parametrize("row", ARITHMETIC, ids=ids(ARITHMETIC))
def test_integer_arithmetic_is_exact_and_wraps(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("kind", TYPES)
def test_division_truncates_toward_zero_and_the_remainder_has_the_sign_of_the_dividend(kind: str) -> None:
    smallest = 1 << (int(kind[1:]) - 1) if kind[0] == "s" else None

    def defined(a: int, b: int) -> bool:
        return b != 0 and not (a == smallest and number(kind, b) == -1)

    rows = [row for row in operands([kind, kind]) if defined(*row)]
    check(Row(f"div.{kind} %d, %a, %b;", kind, f"{kind} {kind}", lambda a, b: wrap(kind, quotient(number(kind, a), number(kind, b)))), rows)

    def remainder(a: int, b: int) -> int:
        x, y = number(kind, a), number(kind, b)
        return wrap(kind, x - quotient(x, y) * y)

    check(Row(f"rem.{kind} %d, %a, %b;", kind, f"{kind} {kind}", remainder), rows)


@pytest.mark.parametrize("kind", TYPES)
def test_a_division_without_a_defined_result_disturbs_no_other_lane(kind: str) -> None:
    lowest = 1 << (int(kind[1:]) - 1)
    rows = [(7, 0), (lowest, wrap(kind, -1)), (0, 0), (6, 3)] * 8

    def keep_defined(a: int, b: int) -> int:
        return 2 if (a, b) == (6, 3) else 0

    text = "{ .reg .pred %good; setp.eq.KIND %good, %b, 3; OP %d, %a, %b; selp.bBITS %d, %d, 0, %good; }"
    text = text.replace("KIND", kind).replace("BITS", kind[1:])
    check(Row(text.replace("OP", f"div.{kind}"), kind, f"{kind} {kind}", keep_defined), rows)


def carries(width: int) -> list[Row]:
    """Chains through the carry flag, each compared with one wide sum, difference or product."""
    kind, mask = f"u{width}", (1 << width) - 1
    pair = f"{kind} {kind}"

    def split(value: int) -> tuple[int, int]:
        return value & mask, value >> width & mask

    add, sub = f"add.cc.{kind} %d, %a, %b;", f"sub.cc.{kind} %d, %a, %b;"
    four, three = f"{pair} {pair}", f"{pair} {kind}"
    return [
        Row(f"{add} addc.{kind} %q, 0, 0;", pair, pair, lambda a, b: split(a + b)),
        Row(f"{add} addc.{kind} %q, %c, %e;", pair, four, lambda a, b, c, e: split((a | c << width) + (b | e << width))),
        Row(f"{sub} subc.{kind} %q, %c, %e;", pair, four, lambda a, b, c, e: split((a | c << width) - (b | e << width))),
        Row(
            f"{add} addc.cc.{kind} %q, %c, %e; addc.{kind} %d2, 0, 0;",
            three,
            four,
            lambda a, b, c, e: (*split(t := (a | c << width) + (b | e << width)), t >> 2 * width),
        ),
        Row(
            f"{sub} subc.cc.{kind} %q, %c, %e; subc.{kind} %d2, 0, 0;",
            three,
            four,
            lambda a, b, c, e: (*split(t := (a | c << width) - (b | e << width)), t >> 2 * width & mask),
        ),
        Row(
            f"mad.lo.cc.{kind} %d, %a, %b, %c; madc.hi.{kind} %q, %a, %b, %e;",
            pair,
            four,
            lambda a, b, c, e: split(a * b + (c | e << width)),
        ),
        Row(
            f"mad.lo.cc.{kind} %d, %a, %b, %c; madc.hi.cc.{kind} %q, %a, %b, %e; addc.{kind} %d2, 0, 0;",
            three,
            four,
            lambda a, b, c, e: (*split(t := a * b + (c | e << width)), t >> 2 * width),
        ),
        Row(
            f"mad.hi.cc.{kind} %d, %a, %b, %c; madc.lo.cc.{kind} %q, %a, %b, %e; addc.{kind} %d2, 0, 0;",
            three,
            four,
            lambda a, b, c, e: ((t := (a * b >> width) + c) & mask, (u := (a * b & mask) + e + (t >> width)) & mask, u >> width),
        ),
    ]


CARRIES = carries(32) + carries(64)


@pytest.mark.parametrize("row", CARRIES, ids=ids(CARRIES))
def test_the_carry_flag_joins_words(row: Row) -> None:
    check(row)


def test_signed_carry_chains_are_the_unsigned_ones() -> None:
    check(Row("add.cc.s32 %d, %a, %b; addc.s32 %q, 0, 0;", "u32 u32", "s32 s32", lambda a, b: ((a + b) & 0xFFFFFFFF, a + b >> 32)))


def lanes_of(bits: int, width: int, sign: bool) -> list[int]:
    parts = [bits >> at & ((1 << width) - 1) for at in range(0, 32, width)]
    return [signed(part, width) for part in parts] if sign else parts


@pytest.mark.parametrize("b_kind", ["u32", "s32"])
@pytest.mark.parametrize("a_kind", ["u32", "s32"])
def test_dot_products_of_packed_bytes(a_kind: str, b_kind: str) -> None:
    def four(a: int, b: int, c: int) -> int:
        pairs = zip(lanes_of(a, 8, a_kind == "s32"), lanes_of(b, 8, b_kind == "s32"), strict=True)
        return (c + sum(x * y for x, y in pairs)) & 0xFFFFFFFF

    kinds = f"{a_kind} {b_kind} s32"
    check(Row(f"dp4a.{a_kind}.{b_kind} %d, %a, %b, %c;", "s32", kinds, four))
    for half, first in (("lo", 0), ("hi", 2)):

        def two(a: int, b: int, c: int, first: int = first) -> int:
            words, bytes_ = lanes_of(a, 16, a_kind == "s32"), lanes_of(b, 8, b_kind == "s32")[first : first + 2]
            return (c + sum(x * y for x, y in zip(words, bytes_, strict=True))) & 0xFFFFFFFF

        check(Row(f"dp2a.{half}.{a_kind}.{b_kind} %d, %a, %b, %c;", "s32", kinds, two))
