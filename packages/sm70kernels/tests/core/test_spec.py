"""The grammar of arguments and dims: what it reads and what it refuses, with the reason."""

import pytest

from sm70kernels.dims import AnyDim, DeclarationError, Derived, Dim, Spec, complete, drawing_order, evaluate, names_in
from sm70kernels.spec import parse


@pytest.mark.parametrize(
    ("text", "dtypes", "axes", "flags"),
    [
        ("act[M,K]", ("act",), ("M", "K"), set()),
        ("act[M, K] strided", ("act",), ("M", "K"), {"strided"}),
        ("act|f32[M,HQ,D] out", ("act", "f32"), ("M", "HQ", "D"), {"out"}),
        ("f32[L,SL,HV,V,K] inout", ("f32",), ("L", "SL", "HV", "V", "K"), {"inout"}),
        ("kv[B,P,HK,D] inout", ("kv",), ("B", "P", "HK", "D"), {"inout"}),
        ("act[1,E] optional", ("act",), (1, "E"), {"optional"}),
        ("i32 device", ("i32",), (), {"device"}),
        ("u8[W] scratch", ("u8",), ("W",), {"scratch"}),
    ],
)
def test_tensor_forms(text: str, dtypes: tuple[str, ...], axes: tuple[str | int, ...], flags: set[str]) -> None:
    arg = parse("x", text)
    assert (arg.kind, arg.dtypes, arg.axes, set(arg.flags)) == ("tensor", dtypes, axes, flags)


def test_scalar_forms() -> None:
    assert [parse("x", text).kind for text in ("int", "float", "bool")] == ["int", "float", "bool"]
    assert parse("kind", "enum decode|prefill").choices == ("decode", "prefill")
    assert parse("topk", "dim K").dims == ("K",)
    assert parse("scale", "f32[HK] when=kv:u8").when == "kv:u8"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f33[M]", "unknown dtype 'f33'"),
        ("f32[M] outt", "unknown flag 'outt'"),
        ("f32[m]", "axis 'm' is neither"),
        ("f32[M,]", "axis '' is neither"),
        ("f32", "needs either axes"),
        ("f32[M] device", "needs either axes"),
        ("f32[M] out inout", "exclude each other"),
        ("dim k", "'k' is not a dim's name"),
        ("f32 [M]", "cannot read"),
    ],
)
def test_refusals_name_argument_and_reason(text: str, reason: str) -> None:
    with pytest.raises(DeclarationError, match="argument x: ") as refusal:
        parse("x", text)
    assert reason in str(refusal.value)


def test_expressions() -> None:
    assert evaluate("topk*ratio + ratio - 1", {"topk": 3, "ratio": 4}) == 15
    assert evaluate("min(X, 4) // 2 % 3", {"X": 9}) == 2
    assert evaluate(7, {}) == 7
    assert names_in("min(A, 2*B)", 3, None) == {"A", "B"}


@pytest.mark.parametrize("text", ["__import__('os')", "A.real", "A / 2", "A ** 2", "1.5", "A if A else 1", "[A][0]", "A +"])
def test_expressions_refuse_anything_but_integer_arithmetic(text: str) -> None:
    with pytest.raises(DeclarationError, match="dimension expression"):
        evaluate(text, {"A": 1})


def test_order_and_completion_follow_dependencies() -> None:
    dims: dict[str, AnyDim] = {"W": Derived("K*R"), "K": Dim(1, "X"), "X": Spec(8)}
    dims |= {"R": Dim(1, 4, infer="W // K"), "G": Dim(0, 4, infer="W - X")}
    order = drawing_order(dims)
    assert order.index("X") < order.index("K") < order.index("W")
    bound = {"K": 2, "X": 8, "R": 3}
    complete(dims, bound)
    assert bound == {"K": 2, "X": 8, "R": 3, "W": 6, "G": -2}


def test_a_cycle_is_refused() -> None:
    with pytest.raises(DeclarationError, match="cannot be ordered"):
        drawing_order({"A": Derived("B"), "B": Derived("A")})


def test_spec_needs_a_value() -> None:
    with pytest.raises(DeclarationError, match="at least one value"):
        Spec()
