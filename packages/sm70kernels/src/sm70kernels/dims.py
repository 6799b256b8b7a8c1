"""Named dimensions of an op: runtime ranges, specialised values, and the integer expressions that tie them together."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType

_ALLOWED = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant, ast.Load)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub)
_FUNCTIONS = {"min": min, "max": max}


class DeclarationError(TypeError):
    """An op is declared wrongly; raised at import, never by a call."""


@cache
def _compiled(text: str) -> tuple[CodeType, frozenset[str]]:
    """Return the code of an integer expression and the dims it names; DeclarationError for anything but + - * // % min max."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise DeclarationError(f"dimension expression {text!r}: {error.msg}") from error
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED + _OPERATORS) or (isinstance(node, ast.Constant) and type(node.value) is not int):
            raise DeclarationError(f"dimension expression {text!r}: {ast.dump(node)} is not an integer, a dim, + - * // %, min or max")
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS:
            names.add(node.id)
    return compile(tree, text, "eval"), frozenset(names)


def evaluate(expression: int | str, dims: Mapping[str, int]) -> int:
    """Return the value of an integer or of an expression over `dims`. Raises KeyError for a dim that is not bound."""
    if isinstance(expression, int):
        return expression
    code, names = _compiled(expression)
    scope = {name: dims[name] for name in names}
    return int(eval(code, {"__builtins__": {}, **_FUNCTIONS}, scope))  # nodes were checked against a whitelist above


def names_in(*expressions: int | str | None) -> frozenset[str]:
    """Return the dims that the given expressions mention."""
    return frozenset().union(*(_compiled(e)[1] for e in expressions if isinstance(e, str)))


@dataclass(frozen=True)
class Dim:
    """A runtime integer in [lo, hi], both inclusive; tests draw from the smaller range `test`.

    Bounds may be expressions over other dims ("X", "min(X, 4)"). `infer` computes the value when no given tensor binds it
    (an axis that only an omitted output has).
    """

    lo: int | str
    hi: int | str
    test: tuple[int | str, int | str] | None = None
    infer: str | None = None

    @cached_property
    def drawn(self) -> tuple[int | str, int | str]:
        """The inclusive range tests draw from."""
        return self.test or (self.lo, self.hi)


@dataclass(frozen=True, init=False)
class Spec:
    """A size that kernels are specialised for (-D): CUDA accepts only these values, the CPU reference any size from 0 up.

    The first value is the model's; `test` lists the sizes tests of the reference draw (all values when left out), `kernel` those that
    tests of the kernel draw (`test` when left out): kernels read 16 bytes at a time, so few of the awkward sizes are theirs.
    """

    values: tuple[int, ...]
    test: tuple[int, ...]
    kernel: tuple[int, ...]
    infer: str | None

    def __init__(self, *values: int, test: tuple[int, ...] = (), kernel: tuple[int, ...] = (), infer: str | None = None) -> None:
        if not values:
            raise DeclarationError("Spec needs at least one value; a free runtime size is Dim(lo, hi)")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "test", test or values)
        object.__setattr__(self, "kernel", kernel or test or values)
        object.__setattr__(self, "infer", infer)


@dataclass(frozen=True)
class Derived:
    """A size computed from other dims, e.g. Derived("2*I"); checked where a tensor has it."""

    expression: str


AnyDim = Dim | Spec | Derived


def needs(dim: AnyDim) -> frozenset[str]:
    """Return the dims that must be known before `dim` can be drawn or ranged."""
    if isinstance(dim, Derived):
        return names_in(dim.expression)
    if isinstance(dim, Dim):
        return names_in(dim.lo, dim.hi, *dim.drawn)
    return frozenset()


def drawing_order(dims: Mapping[str, AnyDim]) -> list[str]:
    """Return the dims so that each comes after those it needs. Raises DeclarationError for a cycle or an undeclared dim."""
    order: list[str] = []
    left = dict(dims)
    while left:
        ready = [name for name, dim in left.items() if needs(dim) <= set(order)]
        if not ready:
            wanted = {name: sorted(needs(dim) - set(order)) for name, dim in left.items()}
            raise DeclarationError(f"dims cannot be ordered: each waits for another or for an undeclared one: {wanted}")
        order += ready
        for name in ready:
            del left[name]
    return order


def complete(dims: Mapping[str, AnyDim], bound: dict[str, int]) -> None:
    """Add to `bound` every dim that follows from those already there: Derived ones, and `infer` of the unbound."""
    progress = True
    while progress:
        progress = False
        for name, dim in dims.items():
            rule = dim.expression if isinstance(dim, Derived) else dim.infer
            if name not in bound and rule is not None and names_in(rule) <= bound.keys():
                bound[name] = evaluate(rule, bound)
                progress = True


def describe(dim: AnyDim) -> str:
    """Return a dim as one phrase of the manual."""
    if isinstance(dim, Dim):
        return f"{dim.lo}..{dim.hi}" + (f", inferred as {dim.infer}" if dim.infer else "")
    if isinstance(dim, Spec):
        return "specialised: " + ", ".join(map(str, dim.values)) + (f", inferred as {dim.infer}" if dim.infer else "")
    return f"= {dim.expression}"
