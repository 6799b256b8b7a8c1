"""f32 and f64 arithmetic in every rounding mode, bit for bit against exact rational arithmetic rounded once."""

import pytest

from . import softfloat
from .harness import Row, check, ids
from .operands import operands
from .softfloat import F32, FORMATS, MODES, Format, finish

FLAGS = {"f32": ("", ".ftz", ".sat", ".ftz.sat"), "f64": ("",)}
FUNCTIONS = {"add": softfloat.add, "mul": softfloat.multiply, "fma": softfloat.fma, "div": softfloat.divide, "sqrt": softfloat.root}
ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "sqrt": 1, "rcp": 1}


def exact(name: str, form: Format, values: tuple[int, ...], mode: str) -> int:
    if name == "sub":
        a, b = values
        return softfloat.add(form, a, b ^ form.minus if not form.is_nan(b) else b, mode)
    if name == "rcp":
        return softfloat.divide(form, form.one, *values, mode)
    return FUNCTIONS["fma" if name == "mad" else name](form, *values, mode)


def row(name: str, mode: str, flags: str, kind: str) -> Row:
    form, ftz, sat = FORMATS[kind], ".ftz" in flags, ".sat" in flags
    arity = ARITY[name]

    def formula(*values: int) -> int:
        values = tuple(map(form.flush, values)) if ftz else values
        return finish(form, exact(name, form, values, mode or "rn"), ftz, sat)

    text = f"{name}{'.' if mode else ''}{mode}{flags}.{kind} %d, {', '.join(['%a', '%b', '%c'][:arity])};"
    return Row(text, kind, " ".join([kind] * arity), formula)


ARITHMETIC = [
    row(name, mode, flags, kind)
    for kind in ("f32", "f64")
    for name in ("add", "sub", "mul", "fma")
    for mode in (*(() if name == "fma" else ("",)), *MODES)
    for flags in FLAGS[kind]
]
ARITHMETIC += [
    row(name, mode, flags, kind)
    for name in ("div", "sqrt", "rcp")
    for mode in MODES
    for kind, flags in (("f32", ""), ("f32", ".ftz"), ("f64", ""))
]
ARITHMETIC += [row("mad", mode, "", kind) for kind in ("f32", "f64") for mode in MODES]


@pytest.mark.parametrize("row", ARITHMETIC, ids=ids(ARITHMETIC))
def test_results_are_rounded_once(row: Row) -> None:
    name, *flags, kind = row.text.split(" ")[0].split(".")
    mode = next((flag for flag in flags if flag in MODES), "rn")

    def settled(values: tuple[int, ...]) -> bool:
        form = FORMATS[kind]
        values = tuple(map(form.flush, values))
        return not softfloat.borderline(form, exact(name, form, values, mode), exact(name, form, values, "rz"))

    check(row, [values for values in operands(row.operands.split()) if "ftz" not in flags or settled(values)])


TINY = 1 << F32.fraction


@pytest.mark.parametrize("sign", [0, F32.minus])
def test_ftz_flushes_what_is_subnormal_once_rounded_to_24_bits(sign: int) -> None:
    """The hardware rounds as if exponents had no lower end, then flushes what is below 2**-126.

    So (1 - 2**-24) * 2**-126 is flushed, though a subnormal result would have rounded it up; (1 - 2**-46) * 2**-126 is not. The manual
    does not say so; a GPU does it.
    """
    kept = [(F32.one - 2, sign | TINY | 1), (sign | TINY | 1, F32.one - 2)]
    check(Row("mul.ftz.f32 %d, %a, %b;", "f32", "f32 f32", lambda a, b: sign | TINY), kept)
    check(Row("fma.rn.ftz.f32 %d, %a, %b, 0f00000000;", "f32", "f32 f32", lambda a, b: sign | TINY), kept)
    rows = [(F32.one - 1, sign | TINY), (sign | TINY, F32.one - 1), ((F32.one - 1) | F32.minus, TINY | (sign ^ F32.minus))]
    check(Row("mul.ftz.f32 %d, %a, %b;", "f32", "f32 f32", lambda a, b: sign), rows)
    text = "fma.rn.ftz.f32 %d, %a, %b, %c;"
    check(Row(text, "f32", "f32 f32 f32", lambda a, b, c: sign), [(a, b, sign) for a, b in rows])


def ordered(kind: str, name: str, ftz: bool) -> Row:
    """min and max: a number wins over a NaN, and -0 is below +0."""
    form = FORMATS[kind]

    def formula(a: int, b: int) -> int:
        a, b = (form.flush(x) if ftz else x for x in (a, b))
        if form.is_nan(a) or form.is_nan(b):
            return form.nan if form.is_nan(a) and form.is_nan(b) else b if form.is_nan(a) else a
        pick = min if name == "min" else max
        return pick(a, b, key=lambda x: (form.value(x), not x & form.minus))

    return Row(f"{name}{'.ftz' if ftz else ''}.{kind} %d, %a, %b;", kind, f"{kind} {kind}", formula)


def signs(kind: str, ftz: str) -> list[Row]:
    form = FORMATS[kind]
    flush = form.flush if ftz else int
    return [
        Row(f"abs{ftz}.{kind} %d, %a;", kind, kind, lambda a: flush(a) & ~form.minus),
        Row(f"neg{ftz}.{kind} %d, %a;", kind, kind, lambda a: flush(a) ^ form.minus),
    ]


def copysign(kind: str) -> Row:
    """The sign of a on the magnitude of b."""
    form = FORMATS[kind]
    return Row(f"copysign.{kind} %d, %a, %b;", kind, f"{kind} {kind}", lambda a, b: a & form.minus | b & ~form.minus)


def class_tests(kind: str) -> list[Row]:
    """testp; zero counts as normal."""
    form = FORMATS[kind]
    size = ~form.minus
    tests = {
        "finite": lambda a: a & size < form.inf,
        "infinite": lambda a: a & size == form.inf,
        "number": lambda a: not form.is_nan(a),
        "notanumber": form.is_nan,
        "normal": lambda a: a & size < form.inf and not form.is_subnormal(a),
        "subnormal": form.is_subnormal,
    }
    return [Row(f"testp.{name}.{kind} %d, %a;", "pred", kind, lambda a, t=t: int(t(a))) for name, t in tests.items()]


OTHER = [ordered(kind, name, ftz) for name in ("min", "max") for kind, ftz in (("f32", False), ("f32", True), ("f64", False))]
OTHER += [*signs("f32", ""), *signs("f32", ".ftz"), *signs("f64", ""), copysign("f32"), copysign("f64")]
OTHER += [*class_tests("f32"), *class_tests("f64")]


@pytest.mark.parametrize("row", OTHER, ids=ids(OTHER))
def test_operations_on_sign_order_and_class(row: Row) -> None:
    check(row)


CANONICAL = [
    ("add.f32 %d, %a, %b;", "f32"),
    ("mul.f32 %d, %a, %b;", "f32"),
    ("fma.rn.f32 %d, %a, %b, %b;", "f32"),
    ("div.rn.f32 %d, %a, %b;", "f32"),
    ("min.f32 %d, %a, %b;", "f32"),
    ("max.f32 %d, %a, %b;", "f32"),
    ("add.f16 %d, %a, %b;", "f16"),
    ("fma.rn.f16 %d, %a, %b, %b;", "f16"),
]


@pytest.mark.parametrize(("text", "kind"), CANONICAL)
def test_a_nan_result_in_single_and_half_precision_is_the_canonical_one(text: str, kind: str) -> None:
    """All bits set but the sign, whatever sign and payload the operands had."""
    form = FORMATS[kind]
    nans = [form.nan, form.nan | form.minus, form.inf + 1, form.inf | form.minus | 5]
    integer = f"b{form.bits}"
    check(Row(text, integer, f"{integer} {integer}", lambda a, b: form.nan), [(a, b) for a in nans for b in nans])


@pytest.mark.parametrize("mode", MODES)
def test_a_fused_product_is_not_rounded_before_the_sum(mode: str) -> None:
    """a * b - round(a * b): zero if the product were rounded first, the product's rounding error if not."""
    rows = []
    for a, b in operands(["near", "near"], extra=400):
        product = softfloat.multiply(F32, a, b)
        rows.append((a, b, product ^ F32.minus))
    assert sum(F32.value(a) * F32.value(b) != -F32.value(c) for a, b, c in rows) > 200
    check(row("fma", mode, "", "f32"), rows)


def test_contracted_and_separate_instructions_differ_where_rounding_shows() -> None:
    text = "mul.rn.f32 %d, %a, %b; add.rn.f32 %d, %d, %c; fma.rn.f32 %q, %a, %b, %c;"

    def formula(a: int, b: int, c: int) -> tuple[int, int]:
        return softfloat.add(F32, softfloat.multiply(F32, a, b), c), softfloat.fma(F32, a, b, c)

    rows = operands(["near", "near", "near"])
    assert any(first != second for first, second in (formula(*values) for values in rows))
    check(Row(text, "f32 f32", "f32 f32 f32", formula), rows)
