"""Approximate functions: special cases exact, everything else within the error the PTX manual states, against fp64.

Errors of the manual are on silicon; the emulator may be better, so only the bound is tested. Two ulp are the manual's bound for ex2,
rcp and div, 2**-20.9 to 2**-22.9 relative for the others.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest

from .harness import Row, check, ids
from .operands import operands
from .softfloat import F32, F64, finish

Special = dict[int, int]
INF, NAN, MINUS = F32.inf, F32.nan, F32.minus


def rounded(value: float | Fraction, zero: int = 0) -> int:
    return F32.round(Fraction(value) if isinstance(value, float) and math.isfinite(value) else value, "rn", zero)


def exp2(a: int) -> int:
    x = F32.value(a)
    if isinstance(x, float):
        return NAN if math.isnan(x) else INF if x > 0 else 0
    return INF if x >= 128 else 0 if x < -160 else rounded(2.0 ** float(x))


def log2(a: int) -> int:
    x = F32.value(a)
    if isinstance(x, float):
        return INF if x > 0 else NAN
    return INF | MINUS if x == 0 else NAN if x < 0 else rounded(math.log2(x))


def rsqrt(a: int) -> int:
    x = F32.value(a)
    if isinstance(x, float):
        return 0 if x > 0 else NAN
    return INF | a & MINUS if x == 0 else NAN if x < 0 else rounded(1 / math.sqrt(x))


def sqrt(a: int) -> int:
    x = F32.value(a)
    if isinstance(x, float):
        return INF if x > 0 else NAN
    return a if x == 0 else NAN if x < 0 else rounded(math.sqrt(x))


def reciprocal(a: int) -> int:
    x = F32.value(a)
    if isinstance(x, float):
        return NAN if math.isnan(x) else a & MINUS
    return INF | a & MINUS if x == 0 else F32.round(1 / x)


def flushing(function: Callable[[int], int]) -> Callable[[int], int]:
    return lambda a: finish(F32, function(F32.flush(a)), ftz=True)


ONE_OPERAND = {"ex2": (exp2, 2), "lg2": (log2, 0), "rsqrt": (rsqrt, 2), "sqrt": (sqrt, 2), "rcp": (reciprocal, 1)}


def near_log2(got: int, wanted: int) -> bool:
    """lg2: absolute error 2**-22 for results in [-1, 1], relative 2**-22 elsewhere."""
    x, y = F32.value(got), F32.value(wanted)
    if isinstance(x, float) or isinstance(y, float):
        return got == wanted or (x != x and y != y)
    return abs(x - y) <= Fraction(1, 1 << 22) * max(abs(y), 1)


ROWS = [
    Row(
        f"{name}.approx{ftz}.f32 %d, %a;", "f32", "f32", flushing(function) if ftz else function, ulps, near_log2 if name == "lg2" else None
    )
    for name, (function, ulps) in ONE_OPERAND.items()
    for ftz in ("", ".ftz")
]


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_functions_of_one_operand(row: Row) -> None:
    check(row, operands(["f32"], extra=1500))


def test_ex2_is_accurate_over_the_exponents_of_a_softmax() -> None:
    rows = [(rounded(-i / 16.0 if i % 3 else -i / 17.3),) for i in range(1, 2000)]
    check(Row("ex2.approx.ftz.f32 %d, %a;", "f32", "f32", flushing(exp2), 2), rows)


def near_wave(got: int, wanted: int) -> bool:
    """sin and cos: absolute error 2**-20.5 in [-pi, pi]."""
    return abs(float(F32.value(got)) - float(F32.value(wanted))) <= 2.0**-20.5


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sine_and_cosine(name: str, ftz: str) -> None:
    function = math.sin if name == "sin" else math.cos
    check(Row(f"{name}.approx{ftz}.f32 %d, %a;", "f32", "angle", lambda a: rounded(function(float(F32.value(a)))), close=near_wave))
    special = {0: 0, MINUS: MINUS} if name == "sin" else {0: F32.one, MINUS: F32.one}
    special |= {INF: NAN, INF | MINUS: NAN, NAN: NAN}
    check(Row(f"{name}.approx{ftz}.f32 %d, %a;", "f32", "f32", special.__getitem__), [(bits,) for bits in special])


def quotient(a: int, b: int) -> int:
    x, y, sign = F32.value(a), F32.value(b), (a ^ b) & MINUS
    if x != x or y != y or (isinstance(x, float) and isinstance(y, float)) or (x == 0 and y == 0):
        return NAN
    if isinstance(x, float) or y == 0:
        return INF | sign
    return sign if isinstance(y, float) else F32.round(x / y, "rn", bool(sign))


@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_full_range_division(ftz: str) -> None:
    flush = F32.flush if ftz else int
    check(Row(f"div.full{ftz}.f32 %d, %a, %b;", "f32", "f32 f32", lambda a, b: finish(F32, quotient(flush(a), flush(b)), bool(ftz)), 2))


@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_approximate_division_of_moderate_divisors(ftz: str) -> None:
    """2 ulp while the divisor is a normal number up to 2**126; beyond it the manual allows 0."""
    rows = [(a, b) for a, b in operands(["f32", "f32"]) if b & ~MINUS <= INF - (2 << 23) and not F32.is_subnormal(b)]
    flush = F32.flush if ftz else int
    check(
        Row(f"div.approx{ftz}.f32 %d, %a, %b;", "f32", "f32 f32", lambda a, b: finish(F32, quotient(flush(a), flush(b)), bool(ftz)), 2),
        rows,
    )


def near_double(got: int, wanted: int) -> bool:
    x, y = F64.value(got), F64.value(wanted)
    if isinstance(x, float) or isinstance(y, float):
        return got == wanted or (x != x and y != y)
    return got == wanted if y == 0 else abs(x / y - 1) < Fraction(1, 1 << 19)


def gross(name: str, a: int) -> int:
    x = F64.value(a)
    if isinstance(x, float):
        return F64.nan if x != x or (name == "rsqrt" and x < 0) else a & F64.minus
    if x == 0:
        return F64.inf | a & F64.minus
    if name == "rsqrt":
        return F64.nan if x < 0 else F64.round(Fraction(1 / math.sqrt(x)))
    return finish(F64, F64.round(1 / x), ftz=True)


@pytest.mark.parametrize("name", ["rcp", "rsqrt"])
def test_gross_approximations_in_double_precision_have_twenty_bits(name: str) -> None:
    rows = [(a,) for (a,) in operands(["f64"]) if not F64.is_subnormal(a)]
    if name == "rsqrt":
        check(Row("rsqrt.approx.f64 %d, %a;", "f64", "f64", lambda a: gross(name, a), close=near_double), rows)
    check(Row(f"{name}.approx.ftz.f64 %d, %a;", "f64", "f64", lambda a: gross(name, a), close=near_double), rows)
    subnormal = [(1,), (F64.minus | 99,)]
    check(Row(f"{name}.approx.ftz.f64 %d, %a;", "f64", "f64", lambda a: gross(name, F64.flush(a)), close=near_double), subnormal)
