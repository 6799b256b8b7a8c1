"""mma.sync.m8n8k4: eight forms against a scalar loop over the fragment maps of the PTX manual.

A warp holds four independent products; product q belongs to lanes 4q..4q+3 and 16+4q..16+4q+3.
"""

import itertools

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from .harness import entry

FORMS = [*itertools.product(("row", "col"), ("row", "col"), ("f32", "f16"))]


def place(operand: str, layout: str, lane: int, i: int) -> tuple[int, int, int]:
    """Product, row and column of element i of a lane's fragment: A is 8 x 4, B is 4 x 8, C and D are 8 x 8."""
    product, low, high = lane >> 2 & 3, lane & 3, 4 * (lane >= 16)
    along, across = (low + high, i), (i, low + high)
    if operand == "A":
        return (product, *(along if layout == "row" else (i + high, low)))
    if operand == "B":
        return (product, *(across if layout == "col" else (low, i + high)))
    if layout == "f16":
        return (product, low + high, i)
    return (product, (lane & 1) + (i & 2) + high, (i & 4) + (lane & 2) + (i & 1))


def fragments(matrices: np.ndarray, operand: str, layout: str) -> np.ndarray:  # type: ignore[type-arg]
    """[32 lanes, elements] of [4 products, rows, columns]."""
    count = 8 if operand == "C" else 4
    return np.array([[matrices[place(operand, layout, lane, i)] for i in range(count)] for lane in range(32)], matrices.dtype)


def kernel(a: str, b: str, c: str) -> str:
    """Each lane loads its fragments, does one mma and stores the result."""
    count = 8 if c == "f32" else 4
    sums = [f"%c{i}" for i in range(count)]
    results = [f"%d{i}" for i in range(count)]
    body = [f".reg .b32 {', '.join(sums + results)};", "mov.u32 %r0, %tid.x;"]
    for index, (name, size) in enumerate((("a", 8), ("b", 8), ("c", 4 * count), ("d", 4 * count))):
        body += [f"ld.param.u64 %l{index}, [{name}];", f"mad.wide.u32 %l{index}, %r0, {size}, %l{index};"]
    body += ["ld.global.v2.b32 {%r1, %r2}, [%l0];", "ld.global.v2.b32 {%r3, %r4}, [%l1];"]
    body += [f"ld.global.b32 {name}, [%l2+{4 * i}];" for i, name in enumerate(sums)]
    body.append(
        f"mma.sync.aligned.m8n8k4.{a}.{b}.{c}.f16.f16.{c} {{{', '.join(results)}}}, {{%r1, %r2}}, {{%r3, %r4}}, {{{', '.join(sums)}}};"
    )
    body += [f"st.global.b32 [%l3+{4 * i}], {name};" for i, name in enumerate(results)]
    return entry("u64 a, u64 b, u64 c, u64 d", "\n".join(body))


def run(form: tuple[str, str, str], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """Products [4, 8, 8] as the kernel's fragments say, from A [4, 8, 4], B [4, 4, 8] in f16 and C [4, 8, 8] in the accumulator's type."""
    out = np.zeros((32, 8), c.dtype)
    emulate(kernel(*form), "probe", 1, 32, fragments(a, "A", form[0]), fragments(b, "B", form[1]), fragments(c, "C", form[2]), out)
    result = np.zeros((4, 8, 8), c.dtype)
    for lane in range(32):
        for i in range(8):
            result[place("C", form[2], lane, i)] = out[lane, i]
    return result


def matrices(form: tuple[str, str, str], integers: bool) -> list[np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(FORMS.index(form))
    dtype = np.float32 if form[2] == "f32" else np.float16
    shapes, types = ((4, 8, 4), (4, 4, 8), (4, 8, 8)), (np.float16, np.float16, dtype)
    if integers:
        return [rng.integers(-9, 10, shape).astype(kind) for shape, kind in zip(shapes, types, strict=True)]
    return [rng.standard_normal(shape).astype(kind) for shape, kind in zip(shapes, types, strict=True)]


def loops(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    result = np.zeros((4, 8, 8))
    for product, m, n in np.ndindex(4, 8, 8):
        result[product, m, n] = float(c[product, m, n]) + sum(float(a[product, m, k]) * float(b[product, k, n]) for k in range(4))
    return result


@pytest.mark.parametrize("form", FORMS, ids=".".join)
def test_small_integers_give_exact_products(form: tuple[str, str, str]) -> None:
    """Sums below 2048 are exact in both accumulator types, so a wrong lane or element shows as a wrong integer."""
    a, b, c = matrices(form, integers=True)
    assert np.array_equal(run(form, a, b, c), loops(a, b, c))


@pytest.mark.parametrize("form", FORMS, ids=".".join)
def test_real_products_are_within_the_rounding_of_the_accumulator(form: tuple[str, str, str]) -> None:
    """f32: silicon truncates aligned sums, so 8 units of the last place of the largest term;
    f16: one rounding at the end, half a unit and a bit."""
    a, b, c = matrices(form, integers=False)
    exact = loops(a, b, c)
    largest = np.maximum(np.abs(exact), np.abs(c.astype(np.float64)))
    for k in range(4):
        largest = np.maximum(largest, np.abs(a[:, :, k, None].astype(np.float64) * b[:, None, k].astype(np.float64)))
    bound = largest * 2.0**-20 if form[2] == "f32" else np.maximum(np.abs(exact), 2.0**-14) * 2.0**-10
    assert (np.abs(run(form, a, b, c) - exact) <= bound).all()


@pytest.mark.parametrize("form", FORMS, ids=".".join)
def test_subnormal_halves_count_and_nan_and_infinity_spread(form: tuple[str, str, str]) -> None:
    a, b, c = matrices(form, integers=True)
    a[0, 2, :] = [2.0**-24, 0, 0, 0]
    b[0, :, 5] = [1024, 0, 0, 0]
    c[0, 2, 5] = 0
    a[1, 3, 1], a[2, 4, 0] = np.inf, np.nan
    b[1, 1, :] = 1
    got = run(form, a, b, c)
    assert got[0, 2, 5] == 2.0**-14
    assert np.isposinf(got[1, 3]).all()
    assert np.isnan(got[2, 4]).all()
    assert np.isfinite(np.delete(got[1], 3, 0)).all()


def test_a_product_of_two_wrong_layouts_is_seen() -> None:
    """The test's own check: reading a row-major fragment as column-major changes the result."""
    form = ("row", "col", "f32")
    a, b, c = matrices(form, integers=True)
    wrong = np.zeros_like(a)
    for lane in range(32):
        for i in range(4):
            wrong[place("A", "col", lane, i)] = fragments(a, "A", "row")[lane, i]
    assert not np.array_equal(loops(wrong, b, c), loops(a, b, c))
    assert np.array_equal(run(form, a, b, c), loops(a, b, c))
