"""Comparisons, selections and moves: setp, set, selp, slct, mov with packing, and the special registers."""

import operator

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from .harness import Row, check, entry, ids
from .operands import bits_of, signed
from .softfloat import FORMATS

ORDER = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
ALIASES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
INTEGERS = {
    **dict.fromkeys(("b16", "b32", "b64"), ("eq", "ne")),
    **dict.fromkeys(("s16", "s32", "s64"), tuple(ORDER)),
    **dict.fromkeys(("u16", "u32", "u64"), (*ORDER, *ALIASES)),
}
FLOATING = (*ORDER, *(f"{name}u" for name in ORDER if name != "ne"), "neu", "num", "nan")
COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def compare(kind: str, test: str, a: int, b: int, ftz: bool = False) -> int:
    """The comparison `test` of two bit patterns of `kind`; names ending in u also hold when an operand is NaN."""
    if kind not in FORMATS:
        width = bits_of(kind)
        x, y = (signed(a, width), signed(b, width)) if kind[0] == "s" else (a, b)
        return int(ORDER[ALIASES.get(test, test)](x, y))
    form = FORMATS[kind]
    p, q = (form.value(form.flush(x) if ftz else x) for x in (a, b))
    unordered = p != p or q != q
    if test in ("num", "nan"):
        return int(unordered == (test == "nan"))
    if unordered:
        return int(test.endswith("u") and test not in ORDER)
    return int(ORDER[test if test in ORDER else test[:-1]](p, q))


SETP = [(test, kind) for kind, tests in INTEGERS.items() for test in tests]
SETP += [(test, kind) for kind in ("f16", "f32", "f64") for test in FLOATING]


@pytest.mark.parametrize(("test", "kind"), SETP)
def test_setp_compares(test: str, kind: str) -> None:
    check(Row(f"setp.{test}.{kind} %d, %a, %b;", "pred", f"{kind} {kind}", lambda a, b: compare(kind, test, a, b)))


@pytest.mark.parametrize("kind", ["f16", "f32"])
@pytest.mark.parametrize("test", ["eq", "lt", "neu"])
def test_setp_ftz_takes_subnormal_numbers_for_zero(test: str, kind: str) -> None:
    check(Row(f"setp.{test}.ftz.{kind} %d, %a, %b;", "pred", f"{kind} {kind}", lambda a, b: compare(kind, test, a, b, ftz=True)))


@pytest.mark.parametrize("join", COMBINE)
@pytest.mark.parametrize("kind", ["s32", "f32", "u16"])
def test_setp_joins_its_comparison_and_its_complement_with_a_predicate(join: str, kind: str) -> None:
    def formula(a: int, b: int, c: int) -> tuple[int, int]:
        t = compare(kind, "lt", a, b)
        return COMBINE[join](t, c), COMBINE[join](1 - t, c)

    check(Row(f"setp.lt.{join}.{kind} %d|%q, %a, %b, %c;", "pred pred", f"{kind} {kind} pred", formula))
    flipped = Row(f"setp.lt.{join}.{kind} %d|%q, %a, %b, !%c;", "pred pred", f"{kind} {kind} pred", lambda a, b, c: formula(a, b, 1 - c))
    check(flipped)


def test_setp_writes_the_complement_beside_the_comparison() -> None:
    check(Row("setp.le.f32 %d|%q, %a, %b;", "pred pred", "f32 f32", lambda a, b: ((t := compare("f32", "le", a, b)), 1 - t)))


@pytest.mark.parametrize("test", ["eq", "ltu", "ge", "nan"])
def test_setp_of_half_pairs_gives_one_predicate_a_half(test: str) -> None:
    def formula(a: int, b: int) -> tuple[int, int]:
        return compare("f16", test, a & 0xFFFF, b & 0xFFFF), compare("f16", test, a >> 16, b >> 16)

    check(Row(f"setp.{test}.f16x2 %d|%q, %a, %b;", "pred pred", "f16x2 f16x2", formula))


TRUE = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000}


@pytest.mark.parametrize("kind", ["s16", "u32", "s64", "f32", "f64"])
@pytest.mark.parametrize("result", TRUE)
def test_set_writes_all_ones_or_the_number_one(result: str, kind: str) -> None:
    check(Row(f"set.ge.{result}.{kind} %d, %a, %b;", result, f"{kind} {kind}", lambda a, b: TRUE[result] * compare(kind, "ge", a, b)))


@pytest.mark.parametrize("join", COMBINE)
def test_set_joins_with_a_predicate(join: str) -> None:
    def formula(a: int, b: int, c: int) -> int:
        return 0xFFFFFFFF * COMBINE[join](compare("s32", "lt", a, b), c)

    check(Row(f"set.lt.{join}.u32.s32 %d, %a, %b, %c;", "u32", "s32 s32 pred", formula))


@pytest.mark.parametrize("test", ["eq", "ne", "lt", "leu", "gtu", "nan"])
def test_set_of_halves(test: str) -> None:
    def single(true: int) -> object:
        return lambda a, b: true * compare("f16", test, a, b)

    def pair(true: int) -> object:
        return lambda a, b: true * compare("f16", test, a & 0xFFFF, b & 0xFFFF) | true * compare("f16", test, a >> 16, b >> 16) << 16

    check(Row(f"set.{test}.f16.f16 %d, %a, %b;", "b16", "f16 f16", single(0x3C00)))
    check(Row(f"set.{test}.u32.f16 %d, %a, %b;", "u32", "f16 f16", single(0xFFFFFFFF)))
    check(Row(f"set.{test}.f16x2.f16x2 %d, %a, %b;", "b32", "f16x2 f16x2", pair(0x3C00)))
    check(Row(f"set.{test}.ftz.f16x2.f16x2 %d, %a, %b;", "b32", "f16x2 f16x2", flushed_pair(test)))


@pytest.mark.parametrize("test", ["eq", "leu"])
def test_set_of_half_pairs_to_integer_masks(test: str) -> None:
    def pair(a: int, b: int) -> int:
        return 0xFFFF * compare("f16", test, a & 0xFFFF, b & 0xFFFF) | 0xFFFF0000 * compare("f16", test, a >> 16, b >> 16)

    check(Row(f"set.{test}.u32.f16x2 %d, %a, %b;", "u32", "f16x2 f16x2", pair))


def flushed_pair(test: str) -> object:
    def half(a: int, b: int) -> int:
        return 0x3C00 * compare("f16", test, a, b, ftz=True)

    return lambda a, b: half(a & 0xFFFF, b & 0xFFFF) | half(a >> 16, b >> 16) << 16


SELECT = [
    Row(f"selp.{kind} %d, %a, %b, %c;", f"b{kind[1:]}", f"b{kind[1:]} b{kind[1:]} pred", lambda a, b, c: a if c else b)
    for kind in ("b16", "s16", "u16", "b32", "s32", "u32", "f32", "b64", "s64", "u64", "f64")
]
SELECT += [
    Row(f"slct.{kind}.s32 %d, %a, %b, %c;", f"b{kind[1:]}", f"b{kind[1:]} b{kind[1:]} s32", lambda a, b, c: b if c >> 31 else a)
    for kind in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
]
SELECT += [
    Row(
        f"slct{ftz}.u32.f32 %d, %a, %b, %c;",
        "u32",
        "u32 u32 f32",
        lambda a, b, c, ftz=ftz: a if compare("f32", "ge", c, 0, bool(ftz)) else b,
    )
    for ftz in ("", ".ftz")
]


@pytest.mark.parametrize("row", SELECT, ids=ids(SELECT))
def test_selections(row: Row) -> None:
    check(row)


MOVES = [
    Row("mov.b16 %d, %a;", "b16", "b16", lambda a: a),
    Row("mov.u32 %d, %a;", "b32", "b32", lambda a: a),
    Row("mov.f32 %d, %a;", "b32", "b32", lambda a: a),
    Row("mov.b64 %d, %a;", "b64", "b64", lambda a: a),
    Row("mov.f64 %d, %a;", "b64", "b64", lambda a: a),
    Row("mov.b32 %d, {%a, %b};", "b32", "b16 b16", lambda a, b: a | b << 16),
    Row("mov.b32 {%d, %q}, %a;", "b16 b16", "b32", lambda a: (a & 0xFFFF, a >> 16)),
    Row("mov.b32 {_, %d}, %a;", "b16", "b32", lambda a: a >> 16),
    Row("mov.b64 %d, {%a, %b};", "b64", "b32 b32", lambda a, b: a | b << 32),
    Row("mov.b64 {%d, %q}, %a;", "b32 b32", "b64", lambda a: (a & 0xFFFFFFFF, a >> 32)),
    Row("mov.b64 {%d, _}, %a;", "b32", "b64", lambda a: a & 0xFFFFFFFF),
    Row("mov.b64 %d, {%a, %b, %c, %e};", "b64", "b16 b16 b16 b16", lambda a, b, c, e: a | b << 16 | c << 32 | e << 48),
    Row("mov.b64 {%d, %q, %d2, %d3}, %a;", "b16 b16 b16 b16", "b64", lambda a: tuple(a >> s & 0xFFFF for s in (0, 16, 32, 48))),
    Row("mov.f32 %d, 0f3FB8AA3B;", "b32", "b32", lambda a: 0x3FB8AA3B),
    Row("mov.f64 %d, 0d400921FB54442D18;", "b64", "b32", lambda a: 0x400921FB54442D18),
    Row("mov.b16 %d, -1024;", "b16", "b16", lambda a: 0xFC00),
    Row("mov.u64 %d, 0xFEDCBA9876543210;", "b64", "b32", lambda a: 0xFEDCBA9876543210),
    Row("mov.s32 %d, -7;", "b32", "b32", lambda a: 0xFFFFFFF9),
    Row("mov.f32 %d, 1.5;", "b32", "b32", lambda a: 0x3FC00000),
    Row("@%a mov.u32 %d, %b; @!%a mov.u32 %d, %c;", "b32", "pred b32 b32", lambda p, b, c: b if p else c),
    Row(
        "{ .reg .b32 %t; { .reg .b32 %t; mov.u32 %t, 9; } mov.u32 %t, %a; { .reg .b32 %t; mov.u32 %t, 8; } mov.u32 %d, %t; }",
        "b32",
        "b32",
        lambda a: a,
    ),
]


@pytest.mark.parametrize("row", MOVES, ids=ids(MOVES))
def test_moves_pack_and_unpack(row: Row) -> None:
    check(row)


SPECIAL = ["%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y"]
SPECIAL += ["%nctaid.z", "%laneid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"]


def test_special_registers_tell_each_thread_where_it_is() -> None:
    """A grid of 2 x 3 x 2 blocks of 5 x 4 x 3 threads: lanes number the threads of a block in the order x, y, z."""
    (bx, by, bz), (gx, gy, gz) = (5, 4, 3), (2, 3, 2)
    body = ["mov.u32 %r0, %tid.z;", "mad.lo.u32 %r0, %r0, 4, 0;", "mov.u32 %r1, %tid.y;", "add.u32 %r0, %r0, %r1;", "mov.u32 %r1, %tid.x;"]
    body += ["mad.lo.u32 %r0, %r0, 5, %r1;", "mov.u32 %r2, %ctaid.z;", "mov.u32 %r1, %ctaid.y;", "mad.lo.u32 %r2, %r2, 3, %r1;"]
    body += ["mov.u32 %r1, %ctaid.x;", "mad.lo.u32 %r2, %r2, 2, %r1;", "mad.lo.u32 %r0, %r2, 60, %r0;", "ld.param.u64 %l0, [out];"]
    body += [f"mul.wide.u32 %l1, %r0, {4 * len(SPECIAL)};", "add.u64 %l0, %l0, %l1;"]
    for index, name in enumerate(SPECIAL):
        body += [f"mov.u32 %r3, {name};", f"st.global.u32 [%l0+{4 * index}], %r3;"]
    out = np.zeros((gz, gy, gx, bz, by, bx, len(SPECIAL)), np.uint32)
    emulate(entry("u64 out", "\n".join(body)), "probe", (gx, gy, gz), (bx, by, bz), out)
    for z, y, x, tz, ty, tx in np.ndindex(out.shape[:-1]):
        lane = (tz * 4 + ty) * 5 + tx & 31
        masks = [1 << lane, (1 << lane) - 1, (2 << lane) - 1, 0xFFFFFFFF & (-2 << lane), 0xFFFFFFFF & (-1 << lane)]
        assert out[z, y, x, tz, ty, tx].tolist() == [tx, ty, tz, bx, by, bz, x, y, z, gx, gy, gz, lane, *masks]


def test_clocks_advance_and_the_warp_and_processor_numbers_are_in_range() -> None:
    body = """
        mov.u32 %r0, %clock; mov.u64 %l2, %clock64; mov.u64 %l4, %globaltimer; mov.u32 %r2, %warpid; mov.u32 %r3, %smid;
        mov.u32 %r1, %clock; mov.u64 %l3, %clock64; mov.u64 %l5, %globaltimer;
        setp.ge.u64 %p0, %l3, %l2; setp.ge.and.u64 %p0, %l5, %l4, %p0; setp.lt.and.u32 %p0, %r2, 64, %p0; setp.lt.and.u32 %p0, %r3, 80, %p0;
        sub.u32 %r1, %r1, %r0; setp.lt.and.u32 %p0, %r1, 0x40000000, %p0;
        selp.u32 %r4, 1, 2, %p0; mov.u32 %r5, %tid.x; ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %r5, 4; add.u64 %l0, %l0, %l1;
        st.global.u32 [%l0], %r4;"""
    out = np.zeros(96, np.uint32)
    emulate(entry("u64 out", body), "probe", 1, 96, out)
    assert (out == 1).all()
