"""cvt between all pairs of types: width changes, saturation, every rounding mode, out-of-range and NaN sources."""

import math
import random

import pytest

from .harness import Row, check, ids
from .operands import bits_of, operands, signed
from .softfloat import F16, F32, FORMATS, MODES, finish, integral

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def read(kind: str, bits: int) -> int:
    width = int(kind[1:])
    bits &= (1 << width) - 1
    return signed(bits, width) if kind[0] == "s" else bits


def limits(kind: str) -> tuple[int, int]:
    width = int(kind[1:])
    return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if kind[0] == "s" else (0, (1 << width) - 1)


def write(kind: str, value: int) -> int:
    """Wrap to the type, then extend to the register: eight-bit results live in 32-bit registers here."""
    value &= (1 << int(kind[1:])) - 1
    return read(kind, value) & ((1 << bits_of(register(kind))) - 1)


def register(kind: str) -> str:
    return "b32" if kind[1:] == "8" else f"b{kind[1:]}"


def fits(of: str, to: str) -> bool:
    """Whether every value of `of` is one of `to`: then .sat is not allowed."""
    (low, high), (bottom, top) = limits(of), limits(to)
    return bottom <= low and high <= top


def between_integers(to: str, of: str, sat: bool) -> Row:
    def formula(a: int) -> int:
        value = read(of, a)
        if sat:
            low, high = limits(to)
            value = min(max(value, low), high)
        return write(to, value)

    return Row(f"cvt{'.sat' if sat else ''}.{to}.{of} %d, %a;", register(to), register(of), formula)


def from_integer(to: str, of: str, mode: str) -> Row:
    form = FORMATS[to]

    def formula(a: int) -> int:
        return form.round(form.value(0) + read(of, a), mode)

    return Row(f"cvt.{mode}.{to}.{of} %d, %a;", to, register(of), formula)


def to_integer(to: str, of: str, mode: str, ftz: bool = False) -> Row:
    """Out of range clamps. NaN gives 0, or the highest bit alone where source or result has 64 bits."""
    form = FORMATS[of]
    low, high = limits(to)

    def formula(a: int) -> int:
        value = form.value(form.flush(a) if ftz else a)
        if isinstance(value, float):
            if math.isnan(value):
                return write(to, 1 << (int(to[1:]) - 1)) if "64" in (of[1:], to[1:]) else 0
            return write(to, high if value > 0 else low)
        return write(to, min(max(integral(value, mode), low), high))

    return Row(f"cvt.{mode}{'.ftz' if ftz else ''}.{to}.{of} %d, %a;", register(to), of, formula)


def between_floats(to: str, of: str, mode: str, flags: str = "") -> Row:
    source, form, ftz, sat = FORMATS[of], FORMATS[to], ".ftz" in flags, ".sat" in flags

    def formula(a: int) -> int:
        if ftz and of == "f32":
            a = source.flush(a)
        result = form.round(source.value(a), mode or "rn", bool(a & source.minus))
        return finish(form, result, ftz and to == "f32", sat)

    return Row(f"cvt{'.' if mode else ''}{mode}{flags}.{to}.{of} %d, %a;", to, of, formula)


def to_integral(kind: str, mode: str, flags: str = "") -> Row:
    """Rounding to an integer inside a floating-point type keeps the sign of zero."""
    form = FORMATS[kind]

    def formula(a: int) -> int:
        a = form.flush(a) if ".ftz" in flags else a
        value = form.value(a)
        rounded = value if isinstance(value, float) else value * 0 + integral(value, mode)
        return finish(form, form.round(rounded, "rn", bool(a & form.minus)), sat=".sat" in flags)

    return Row(f"cvt.{mode}{flags}.{kind}.{kind} %d, %a;", kind, kind, formula)


WHOLE = ("rni", "rzi", "rmi", "rpi")
ROWS = [between_integers(to, of, False) for to in INTEGERS for of in INTEGERS]
ROWS += [between_integers(to, of, True) for to in INTEGERS for of in INTEGERS if not fits(of, to)]
ROWS += [from_integer(to, of, mode) for to in FORMATS for of in INTEGERS for mode in MODES]
ROWS += [to_integer(to, of, mode) for to in INTEGERS for of in FORMATS for mode in WHOLE]
ROWS += [to_integer(to, "f32", mode, ftz=True) for to in ("s32", "u32", "s64") for mode in WHOLE]
ROWS += [between_floats("f16", of, mode) for of in ("f32", "f64") for mode in MODES]
ROWS += [between_floats("f32", "f64", mode, flags) for mode in MODES for flags in ("", ".ftz", ".sat", ".ftz.sat")]
ROWS += [between_floats("f16", "f32", "rn", flags) for flags in (".ftz", ".sat", ".ftz.sat")]
ROWS += [
    between_floats(to, of, "", flags)
    for to, of, flags in (
        ("f32", "f16", ""),
        ("f32", "f16", ".ftz"),
        ("f32", "f16", ".sat"),
        ("f64", "f16", ""),
        ("f64", "f32", ""),
        ("f64", "f32", ".ftz"),
        ("f32", "f32", ""),
        ("f32", "f32", ".ftz"),
        ("f32", "f32", ".sat"),
        ("f32", "f32", ".ftz.sat"),
        ("f64", "f64", ""),
        ("f16", "f16", ""),
    )
]
ROWS += [to_integral(kind, mode) for kind in FORMATS for mode in WHOLE]
ROWS += [to_integral("f32", mode, flags) for mode in ("rni", "rmi") for flags in (".ftz", ".sat", ".ftz.sat")]


def sources(row: Row) -> list[tuple[int, ...]]:
    """Edge values and random ones, and for a floating-point source also quarters around small integers and the ends of integer ranges."""
    rows = operands([row.operands])
    if row.operands in FORMATS:
        form = FORMATS[row.operands]
        near = [
            sign * (whole + form.value(0) + part / (form.value(0) + 4))
            for whole in (0, 1, 2, 3, 254, 255)
            for part in range(4)
            for sign in (1, -1)
        ]
        near += [
            sign * (form.value(0) + (1 << power) + delta)
            for power in (7, 8, 15, 16, 31, 32, 63, 64)
            for delta in (-1, 0, 1)
            for sign in (1, -1)
        ]
        for value in near:
            bits = form.round(value)
            rows += [(bits,), (bits + 1,), (max(bits - 1, 0),)]
    return rows


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_conversions(row: Row) -> None:
    check(row, sources(row))


def test_every_half_widens_exactly() -> None:
    rows = [(bits,) for bits in range(1 << 16)]
    check(between_floats("f32", "f16", ""), rows)


def test_narrowing_to_half_rounds_every_halfway_case_to_even() -> None:
    """The exact middle between each two neighbouring halves, and the f32 numbers just below and above it."""
    rows = []
    for half in range(F16.inf):
        above = F16.value(half + 1) if half + 1 < F16.inf else F16.value(half) + 32
        middle = F32.round((F16.value(half) + above) / 2)
        rows += [(middle,), (middle - 1,), (middle + 1,)]
    check(between_floats("f16", "f32", "rn"), rows)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_narrowing_to_half_in_directed_modes(mode: str) -> None:
    rng = random.Random(5)
    rows = []
    for half in rng.sample(range(F16.inf - 1), 2000):
        middle = F32.round((F16.value(half) + F16.value(half + 1)) / 2)
        rows += [(bits | sign,) for bits in (middle, middle - 1, F32.round(F16.value(half))) for sign in (0, F32.minus)]
    check(between_floats("f16", "f32", mode), rows)


def test_the_halves_of_a_register_convert_separately() -> None:
    text = "mov.b32 {%h0, %h1}, %a; cvt.f32.f16 %d, %h0; cvt.f32.f16 %q, %h1;"
    check(
        Row(
            text,
            "f32 f32",
            "f16x2",
            lambda a: (F32.round(F16.value(a & 0xFFFF), "rn", a >> 15 & 1), F32.round(F16.value(a >> 16), "rn", a >> 31)),
        )
    )
