"""Logic, shifts, bit fields, permutations and counts against per-bit definitions."""

import random

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from .harness import Row, check, entry, ids
from .operands import operands, signed


def logic(width: int) -> list[Row]:
    kind, mask = f"b{width}", (1 << width) - 1
    pair = f"{kind} {kind}"
    return [
        Row(f"and.{kind} %d, %a, %b;", kind, pair, lambda a, b: a & b),
        Row(f"or.{kind} %d, %a, %b;", kind, pair, lambda a, b: a | b),
        Row(f"xor.{kind} %d, %a, %b;", kind, pair, lambda a, b: a ^ b),
        Row(f"not.{kind} %d, %a;", kind, kind, lambda a: a ^ mask),
        Row(f"cnot.{kind} %d, %a;", kind, kind, lambda a: int(a == 0)),
    ]


def shifts(width: int) -> list[Row]:
    """A distance beyond the width clamps to it: zeros, or copies of the sign."""
    kinds = f"b{width} amount"

    def right(a: int, n: int) -> int:
        return a >> n

    def arithmetic(a: int, n: int) -> int:
        return (signed(a, width) >> n) & ((1 << width) - 1)

    return [
        Row(f"shl.b{width} %d, %a, %b;", f"b{width}", kinds, lambda a, n: a << min(n, width) & ((1 << width) - 1)),
        Row(f"shr.b{width} %d, %a, %b;", f"b{width}", kinds, right),
        Row(f"shr.u{width} %d, %a, %b;", f"u{width}", kinds, right),
        Row(f"shr.s{width} %d, %a, %b;", f"s{width}", kinds, arithmetic),
    ]


def funnel(left: bool, clamp: bool) -> Row:
    """shf: 64 bits b:a shifted, the high word of a left shift, the low word of a right shift."""

    def formula(a: int, b: int, n: int) -> int:
        n = min(n, 32) if clamp else n & 31
        both = b << 32 | a
        return (both << n >> 32 if left else both >> n) & 0xFFFFFFFF

    return Row(f"shf.{'l' if left else 'r'}.{'clamp' if clamp else 'wrap'}.b32 %d, %a, %b, %c;", "b32", "b32 b32 amount", formula)


def extract(kind: str) -> Row:
    """bfe: bits a[b .. b + c), sign-extended for signed types from the last bit inside the register."""
    width = int(kind[1:])

    def formula(a: int, position: int, length: int) -> int:
        fill = a >> min(position + length - 1, width - 1) & 1 if kind[0] == "s" and length else 0
        bits = [a >> (position + i) & 1 if i < length and position + i < width else fill for i in range(width)]
        return sum(bit << i for i, bit in enumerate(bits))

    return Row(f"bfe.{kind} %d, %a, %b, %c;", kind, f"{kind} field field", formula)


def insert(width: int) -> Row:
    """bfi: the low bits of a replace b[c .. c + e)."""

    def formula(a: int, b: int, position: int, length: int) -> int:
        for i in range(min(length, width)):
            if position + i < width:
                b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
        return b

    return Row(f"bfi.b{width} %d, %a, %b, %c, %e;", f"b{width}", f"b{width} b{width} field field", formula)


def find(kind: str, shift: bool) -> Row:
    """bfind: place of the highest bit that differs from the sign, or how far it is from the top."""
    width = int(kind[1:])

    def formula(a: int) -> int:
        if kind[0] == "s" and a >> (width - 1):
            a ^= (1 << width) - 1
        place = a.bit_length() - 1
        return 0xFFFFFFFF if place < 0 else width - 1 - place if shift else place

    return Row(f"bfind{'.shiftamt' if shift else ''}.{kind} %d, %a;", "u32", kind, formula)


def counts(width: int) -> list[Row]:
    kind = f"b{width}"
    return [
        Row(f"popc.{kind} %d, %a;", "u32", kind, lambda a: f"{a:b}".count("1")),
        Row(f"clz.{kind} %d, %a;", "u32", kind, lambda a: len(f"{a:0{width}b}") - len(f"{a:0{width}b}".lstrip("0"))),
        Row(f"brev.{kind} %d, %a;", kind, kind, lambda a: int(f"{a:0{width}b}"[::-1], 2)),
    ]


ROWS = [row for width in (16, 32, 64) for row in (*logic(width), *shifts(width))]
ROWS += [funnel(left, clamp) for left in (True, False) for clamp in (True, False)]
ROWS += [extract(kind) for kind in ("u32", "s32", "u64", "s64")] + [insert(32), insert(64)]
ROWS += [find(kind, shift) for kind in ("u32", "s32", "u64", "s64") for shift in (False, True)] + counts(32) + counts(64)
ROWS += [
    Row("and.pred %d, %a, %b;", "pred", "pred pred", lambda a, b: a & b),
    Row("or.pred %d, %a, %b;", "pred", "pred pred", lambda a, b: a | b),
    Row("xor.pred %d, %a, %b;", "pred", "pred pred", lambda a, b: a ^ b),
    Row("not.pred %d, %a;", "pred", "pred", lambda a: 1 - a),
    Row("mov.pred %d, %a;", "pred", "pred", lambda a: a),
]


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_bit_operations_match_their_per_bit_definition(row: Row) -> None:
    check(row)


@pytest.mark.parametrize(
    "row",
    [
        Row("shl.b32 %d, %a, 5;", "b32", "b32", lambda a: a << 5 & 0xFFFFFFFF),
        Row("and.b64 %d, %a, -8;", "b64", "b64", lambda a: a >> 3 << 3),
    ],
)
def test_literal_operands(row: Row) -> None:
    check(row)


def test_lop3_computes_all_256_truth_tables() -> None:
    """One kernel holds the 256 instructions; result t of a lane is the sum of the minterms that table t names."""
    rows = [(0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA), *random.Random(3).sample(operands(["b32", "b32", "b32"]), 31)]
    body = ["mov.u32 %r7, %tid.x;"]
    for register, name in (("%r0", "a"), ("%r1", "b"), ("%r2", "c"), (None, "out")):
        body += [f"ld.param.u64 %l0, [{name}];", f"mul.wide.u32 %l1, %r7, {4 if register else 1024};", "add.u64 %l0, %l0, %l1;"]
        body += [f"ld.global.u32 {register}, [%l0];"] if register else []
    for table in range(256):
        body += [f"lop3.b32 %r3, %r0, %r1, %r2, {table:#x};", f"st.global.u32 [%l0+{4 * table}], %r3;"]
    out = np.zeros((32, 256), np.uint32)
    columns = [np.array(column, np.uint32) for column in zip(*rows, strict=True)]
    emulate(entry("u64 a, u64 b, u64 c, u64 out", "\n".join(body)), "probe", 1, 32, *columns, out)
    for (a, b, c), got in zip(rows, out.tolist(), strict=True):
        terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) & 0xFFFFFFFF for i in range(8)]
        assert got == [sum(term for i, term in enumerate(terms) if table >> i & 1) for table in range(256)]


def byte(a: int, b: int, index: int) -> int:
    return (b << 32 | a) >> 8 * index & 255


def test_prmt_takes_every_selector() -> None:
    rows = [(0x83C2A190, 0x07E6D5F4, selector) for selector in range(1 << 16)]

    def formula(a: int, b: int, selector: int) -> int:
        result = 0
        for i in range(4):
            nibble = selector >> 4 * i & 15
            picked = byte(a, b, nibble & 7)
            result |= (picked if nibble < 8 else 255 * (picked >> 7)) << 8 * i
        return result

    check(Row("prmt.b32 %d, %a, %b, %c;", "b32", "b32 b32 b32", formula), rows)


MODES = {
    "f4e": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)],
    "b4e": [(0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)],
    "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
    "ecl": [(0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
    "rc16": [(0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)],
}


@pytest.mark.parametrize("mode", MODES)
def test_prmt_modes_pick_the_bytes_of_the_manuals_table(mode: str) -> None:
    """The table lists, for selectors 0 to 3, the bytes from the lowest of the result up; higher bits of the selector are ignored."""
    rows = [(0x83C2A190, 0x07E6D5F4, selector | junk) for selector in range(4) for junk in (0, 4, 0xFFF0)]

    def formula(a: int, b: int, selector: int) -> int:
        return sum(byte(a, b, index) << 8 * i for i, index in enumerate(MODES[mode][selector & 3]))

    check(Row(f"prmt.b32.{mode} %d, %a, %b, %c;", "b32", "b32 b32 b32", formula), rows)
