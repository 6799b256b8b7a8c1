"""f16 and f16x2 arithmetic, bit for bit against exact rational arithmetic rounded once, subnormal numbers kept unless .ftz."""

import pytest

from . import softfloat
from .harness import Formula, Row, check, ids
from .operands import operands
from .softfloat import F16, finish

FUNCTIONS = {"add": softfloat.add, "mul": softfloat.multiply, "fma": softfloat.fma}
ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3}
FLAGS = ("", ".ftz", ".sat", ".ftz.sat")


def pairwise(formula: Formula) -> Formula:
    """Apply a formula of halves to the low and to the high halves."""

    def both(*values: int) -> int:
        low, high = (formula(*(x >> s & 0xFFFF for x in values)) for s in (0, 16))
        assert isinstance(low, int)
        assert isinstance(high, int)
        return low | high << 16

    return both


def arithmetic(name: str, rounding: str, flags: str) -> list[Row]:
    ftz, sat = ".ftz" in flags, ".sat" in flags

    def formula(*values: int) -> int:
        values = tuple(map(F16.flush, values)) if ftz else values
        if name == "sub":
            a, b = values
            result = softfloat.add(F16, a, b if F16.is_nan(b) else b ^ F16.minus)
        else:
            result = FUNCTIONS[name](F16, *values)
        return finish(F16, result, ftz, sat)

    arity = ARITY[name]
    names = ", ".join(["%a", "%b", "%c"][:arity])
    return [
        Row(f"{name}{rounding}{flags}.{kind} %d, {names};", kind, " ".join([kind] * arity), formula if kind == "f16" else pairwise(formula))
        for kind in ("f16", "f16x2")
    ]


def signs(ftz: str) -> list[Row]:
    flush = F16.flush if ftz else int
    tests: dict[str, Formula] = {"abs": lambda a: flush(a) & 0x7FFF, "neg": lambda a: flush(a) ^ 0x8000}
    return [
        Row(f"{name}{ftz}.{kind} %d, %a;", kind, kind, formula if kind == "f16" else pairwise(formula))
        for name, formula in tests.items()
        for kind in ("f16", "f16x2")
    ]


ROWS = [row for name in ("add", "sub", "mul") for rounding in ("", ".rn") for flags in FLAGS for row in arithmetic(name, rounding, flags)]
ROWS += [row for flags in FLAGS for row in arithmetic("fma", ".rn", flags)] + signs("") + signs(".ftz")


def borderline(name: str, values: tuple[int, ...]) -> bool:
    """Whether .ftz meets a product that only rounding lifts out of the subnormal range, in either half."""
    if name not in ("mul", "fma"):
        return False
    halves = [tuple(F16.flush(x >> s & 0xFFFF) for x in values) for s in (0, 16)]
    operation = "multiply" if name == "mul" else "fma"
    return any(
        softfloat.borderline(F16, getattr(softfloat, operation)(F16, *half), getattr(softfloat, operation)(F16, *half, "rz"))
        for half in halves
    )


@pytest.mark.parametrize("row", ROWS, ids=ids(ROWS))
def test_half_precision_results_are_rounded_once(row: Row) -> None:
    name = row.text.split(".")[0]
    check(row, [values for values in operands(row.operands.split()) if ".ftz" not in row.text or not borderline(name, values)])


@pytest.mark.parametrize("sign", [0, F16.minus])
def test_ftz_flushes_halves_that_are_subnormal_once_rounded_to_11_bits(sign: int) -> None:
    """(1 - 2**-11) * 2**-14 is flushed, though a subnormal result would have rounded it up; (1 - 2**-20) * 2**-14 is not."""
    kept = [(0x3BFE, sign | 0x0401), (sign | 0x0401, 0x3BFE)]
    check(Row("mul.ftz.f16 %d, %a, %b;", "f16", "f16 f16", lambda a, b: sign | 0x0400), kept)
    rows = [(0x3BFF, sign | 0x0400), (sign | 0x0400, 0x3BFF)]
    check(Row("mul.ftz.f16 %d, %a, %b;", "f16", "f16 f16", lambda a, b: sign), rows)


def test_the_fused_half_product_is_not_rounded_twice() -> None:
    """Products halfway between two halves, and a bit of 2**-24 that decides: rounding through f32 first loses it."""
    rows = [(0x3C00 + 32 * i, 0x3C00 + 16 * j, c) for i in range(1, 16, 2) for j in range(1, 32, 2) for c in (1, 0x8001)]
    rows = [row for row in rows if through_single(*row) != softfloat.fma(F16, *row)]
    assert len(rows) >= 50
    check(Row("fma.rn.f16 %d, %a, %b, %c;", "f16", "f16 f16 f16", lambda a, b, c: softfloat.fma(F16, a, b, c)), rows)


def through_single(a: int, b: int, c: int) -> int:
    x, y, z = map(F16.value, (a, b, c))
    if isinstance(x, float) or isinstance(y, float) or isinstance(z, float) or x * y + z == 0:
        return softfloat.fma(F16, a, b, c)
    return F16.round(softfloat.F32.value(softfloat.F32.round(x * y + z)))


def test_int4_to_half_conversion_by_magic_numbers() -> None:
    """The W4 unpacking idiom: nibbles or-ed into 1024, minus 1024 (low) or times 1/16 minus 64 (high), are exact integers 0 to 15."""
    text = """lop3.b32 %d, %a, 0x000f000f, 0x64006400, 0xea; lop3.b32 %q, %a, 0x00f000f0, 0x64006400, 0xea;
        mov.b32 %r0, 0x64006400; sub.f16x2 %d, %d, %r0; mov.b32 %r1, 0x2c002c00; mov.b32 %r2, 0xd400d400; fma.rn.f16x2 %q, %q, %r1, %r2;"""

    def half(nibble: int) -> int:
        return F16.round(softfloat.Fraction(nibble))

    def formula(a: int) -> tuple[int, int]:
        return half(a & 15) | half(a >> 16 & 15) << 16, half(a >> 4 & 15) | half(a >> 20 & 15) << 16

    check(Row(text, "b32 b32", "b32", formula), [(low | high << 16,) for low in range(256) for high in (low ^ 0xA5, 255 - low)])
