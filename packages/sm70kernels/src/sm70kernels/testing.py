"""Property tests of an op against a naive definition, and of the independence of its rows. Needs the extra `test`.

    test_matches_naive = conforms(linear_skinny, naive)
    test_rows = rows_independent(linear_skinny)

What error is allowed is in sm70kernels.yardstick, what a test runs the op on in sm70kernels.backends.

A *naive definition* is a function in the op's test file, written as loops from the specification and from nothing else. It takes
what the op's reference takes, changes `inout` arguments in place and returns the outputs in the same form. Floating tensors
arrive as float64. It may take a keyword `h`, to be applied where the specification rounds to the activation dtype before the end.

A reference that skips a rounding point is nearer to truth, so `conforms` cannot see it: `rounds_as_stated` does.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from sm70kernels.backends import MOST_ROWS, REFERENCE, Backend, cases, moved, real_shapes
from sm70kernels.dims import Derived, Dim, Spec, evaluate
from sm70kernels.op import Op
from sm70kernels.yardstick import clone, expect, judge, outputs, rounds_to_nearest, run_naively, same_definition

DTYPES = (torch.float32, torch.float16)
FEW = 4
"""Examples of a test at real shapes: to draw a quarter of a billion weights takes seconds."""

_UNCHECKED = tuple(hypothesis.HealthCheck)
"""Examples are few and deliberately not small, so hypothesis' limits on drawing time and size do not apply."""


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN (the most negative value, or 255, for integers) in place and return it."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    info = torch.iinfo(tensor.dtype) if tensor.dtype is not torch.bool else None
    return tensor.fill_(True if info is None else info.min or info.max)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch.empty and its relatives return poisoned memory, so that a value nobody wrote cannot pass for zero."""

    def poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: poison(allocate(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
            patch.setattr(place, name, poisoning(getattr(place, name)))
        yield


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results (tensors, None, or tuples of them) are equal bit for bit; NaN equals the same NaN."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def choose_dims(
    op: Op[Any], fixed: Mapping[str, int], pick: Callable[[Sequence[int]], int], largest: str = "", kernel: bool = False
) -> dict[str, int]:
    """Return every dim of an op: the fixed ones, one value that `pick` takes from each test range, the derived ones.

    `largest` names a dim that takes the end of its range, so that the sizes that depend on it suit any smaller value too. For a kernel,
    specialised sizes are those it is tested at.
    """
    dims = dict(fixed)
    for name in op.contract.order:
        dim = op.dims[name]
        if name in dims:
            continue
        if isinstance(dim, Derived):
            dims[name] = evaluate(dim.expression, dims)
        elif isinstance(dim, Spec):
            dims[name] = pick(dim.kernel if kernel else dim.test)
        else:
            lo, hi = (evaluate(bound, dims) for bound in dim.drawn)
            dims[name] = hi if name == largest else pick(range(lo, hi + 1))
    return dims


@st.composite
def draw_dims(
    draw: st.DrawFn, op: Op[Any], fixed: Mapping[str, int] | None = None, largest: str = "", kernel: bool = False
) -> dict[str, int]:
    """Draw every dim of an op from its test range; `fixed` dims are taken as given, the `largest` one at its range's end."""
    return choose_dims(op, fixed or {}, lambda values: draw(st.sampled_from(values)), largest, kernel)


def conforms(
    op: Op[Any],
    naive: Callable[..., Any],
    *,
    examples: int = 8,
    dims: Mapping[str, int] | None = None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    large: Callable[..., Any] | None = None,
    also: Sequence[Mapping[str, int]] = (),
) -> Callable[..., None]:
    """Return a property test: the op equals its naive definition within its tolerance, for drawn dims, seeds and both dtypes.

    An op with a launch is tested on its reference, on its kernel in the emulator (every configuration) and on its kernel on a GPU; there
    at the real shapes too, against `large`: the definition once more, vectorised, itself compared with the naive one here.

    Each example also checks that given outputs (poisoned first) are written completely and equal the omitted ones, which makes
    it a test of repeatability too, in another order of warps. The smallest and the largest test dims are always among the examples, and
    for a kernel the dims in `also`, which reach what the small ones do not.
    """

    def compare(dtype: torch.dtype, backend: Backend, definition: Callable[..., Any], sizes: Mapping[str, int], seed: int) -> None:
        arguments = op.make(sizes, seed, dtype)
        first, second = clone(arguments), clone(arguments)
        with poisoned_memory():
            result = backend.call(op, first, None)
        got = outputs(op, first, result)
        on_gpu = backend.gpu and definition is large  # the real shapes are too much for the CPU
        expected = expect(op, definition, moved(arguments, "cuda") if on_gpu else arguments, dtype)
        judge(op, expected, got)
        if backend.kernel:  # references have rounds_as_stated
            rounds_to_nearest(op, expected, got)
        given = {arg.name: poison(torch.empty_like(value)) for arg in op.args if arg.is_out and (value := got[arg.name]) is not None}
        again = outputs(op, second, backend.call(op, second | given, seed))
        for name, value in got.items():
            assert same_bits(value, again[name]), f"{op.name}: {name}: a given output differs from an omitted one"

    def matches_naive(dtype: torch.dtype, backend: Backend) -> None:
        def example(sizes: dict[str, int], seed: int) -> None:
            compare(dtype, backend, naive, sizes, seed)

        test = hypothesis.given(sizes=draw_dims(op, dims, kernel=backend.kernel), seed=st.integers(0, 2**31 - 1))(example)
        for extreme in (min, max):
            edge: Callable[..., Any] = hypothesis.example(sizes=choose_dims(op, dims or {}, extreme, kernel=backend.kernel), seed=0)
            test = edge(test)
        for fixed in also if backend.kernel else ():
            test = hypothesis.example(sizes=choose_dims(op, fixed, max, kernel=True), seed=0)(test)
        _settled(test, backend.examples or examples)()
        if large is not None and backend is REFERENCE:
            same_definition(op, naive, large, choose_dims(op, dims or {}, max), dtype)
        if large is not None and backend.gpu:
            for shape in real_shapes(op):
                compare(dtype, backend, large, op.sizes(shape), 1)

    parametrized: Callable[..., None] = pytest.mark.parametrize(("dtype", "backend"), cases(op, dtypes))(matches_naive)
    return parametrized


def rounds_as_stated(
    op: Op[Any],
    naive: Callable[..., Any],
    dims: Mapping[str, int],
    *,
    change: Callable[[dict[str, Any]], None] | None = None,
    share: float = 0.01,
) -> Callable[[], None]:
    """Return a test: with float16 activations the op rounds where its definition calls `h` and at the end, and nowhere else.

    In float64 with exactly those roundings the definition gives all but a few values bit for bit: float32's sums rarely cross a
    rounding border of float16, while a rounding that is missing or too many moves several percent. At most `share` of any float16
    output may differ over four draws of `dims` (sizes left out take the largest of the tests). Each `h` in turn is left out too, and
    must then move more than that: a rounding this test cannot see fails it. `change` edits the drawn arguments in place.
    """

    def roundings_are_those_of_the_definition() -> None:
        sizes = choose_dims(op, dims, max)
        calls = [op.make(sizes, seed, torch.float16) for seed in range(4)]
        for arguments in calls:
            if change is not None:
                change(arguments)
        got = [outputs(op, own, op(**own)) for own in map(clone, calls)]
        places: dict[tuple[str, int], int] = {}

        def moved(left_out: tuple[str, int] | None) -> dict[str, float]:
            def h(x: Tensor) -> Tensor:
                caller = sys._getframe(1)  # an h is known by where it stands in the definition
                place = (caller.f_code.co_name, caller.f_lasti)
                places.setdefault(place, caller.f_lineno)
                return x if place == left_out else x.half().double()

            differ: dict[str, list[Tensor]] = {}
            for arguments, values in zip(calls, got, strict=True):
                expected = run_naively(op, naive, arguments, h)
                for name, value in values.items():
                    other = expected[name]
                    if value is not None and other is not None and value.dtype is torch.float16:
                        differ.setdefault(name, []).append((value != other.half()).flatten())
            return {name: float(torch.cat(parts).double().mean()) for name, parts in differ.items()}

        for name, part in moved(None).items():
            assert part <= share, f"{op.name}: {name}: {part:.1%} of the values differ from the definition with its roundings"
        for place, line in list(places.items()):
            assert max(moved(place).values()) > share, f"{op.name}: leaving out h in line {line} of the definition shows nowhere"

    return roundings_are_those_of_the_definition


def rows_independent(
    op: Op[Any], dim: str = "M", *, slots: Mapping[str, str] | None = None, examples: int = 8, dims: Mapping[str, int] | None = None
) -> Callable[..., None]:
    """Return a property test: a row alone has the bits it has at any place among random neighbours, on every backend.

    The arguments and outputs that have an axis `dim` are the rows; the others are the same in every call. `slots` names `inout`
    pools that rows reach through an index: {"state": "slot"} compares state[slot[row]]. Kernels see up to 64 rows, and the real shapes
    on a GPU.
    """
    axis = {arg.name: arg.axes.index(dim) for arg in op.args if dim in arg.axes}
    pools = set((slots or {}).values())

    def row(name: str, tensor: Tensor, index: int) -> Tensor:
        return tensor.narrow(axis[name], index, 1).clone(memory_format=torch.contiguous_format)

    def check(dtype: torch.dtype, backend: Backend, sizes: dict[str, int], others: int, seed: int, here: int, there: int) -> None:
        batch = op.make(sizes, seed, dtype)
        crowd = _neighbours(op, batch, sizes | {dim: others}, seed, dtype)
        alone = clone(batch)
        for name, item in batch.items():
            if name in axis and item is not None:
                crowd[name] = crowd[name].contiguous()
                mine, place = row(name, item, here), crowd[name].narrow(axis[name], there, 1)
                if name in pools:  # whoever held this row's slot in the crowd gets the one it displaces
                    crowd[name][crowd[name] == mine] = place.clone()
                place.copy_(mine)
                alone[name] = mine
            elif name not in axis:
                crowd[name] = clone({name: item})[name]
        seen: list[dict[str, Tensor]] = []
        for arguments, index in ((batch, here), (crowd, there), (alone, 0)):
            wrote = outputs(op, arguments, backend.call(op, arguments, None))
            seen.append({name: row(name, value, index) for name, value in wrote.items() if name in axis and value is not None})
            for pool, slot in (slots or {}).items():
                held = int(arguments[slot].flatten()[index])
                if held >= 0:
                    seen[-1][pool] = arguments[pool][held]
        for name in seen[0]:
            for other, what in ((seen[1], f"row {there} of {others}"), (seen[2], "alone")):
                assert same_bits(seen[0][name], other[name]), f"{op.name}: {name}: row {here} of {sizes[dim]} has other bits as {what}"

    def row_alone_equals_row_in_batch(dtype: torch.dtype, backend: Backend) -> None:
        def example(data: st.DataObject) -> None:
            fixed = dict(dims or {})
            if backend.gpu and op.shapes:
                fixed |= data.draw(st.sampled_from(real_shapes(op, without=dim)))
            sizes = data.draw(draw_dims(op, fixed, largest=dim, kernel=backend.kernel))
            lo, hi = _range(op, dim, sizes, backend.kernel)
            count, others = (data.draw(st.integers(max(1, lo), hi)) for _ in range(2))
            sizes = {name: value for name, value in sizes.items() if not isinstance(op.dims[name], Derived)} | {dim: count}
            here, there = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, others - 1))
            check(dtype, backend, sizes, others, data.draw(st.integers(0, 2**30)), here, there)

        most = FEW if backend.gpu else backend.examples or examples
        _settled(hypothesis.given(data=st.data())(example), min(examples, most))()

    parametrized: Callable[..., None] = pytest.mark.parametrize(("dtype", "backend"), cases(op, DTYPES))(row_alone_equals_row_in_batch)
    return parametrized


def _settled(test: Callable[..., None], examples: int) -> Callable[..., None]:
    """Fix the number and the order of a property test's examples, so that a run is repeatable."""
    settings = hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=_UNCHECKED)
    settled: Callable[..., None] = settings(test)
    return settled


def _range(op: Op[Any], dim: str, sizes: Mapping[str, int], kernel: bool) -> tuple[int, int]:
    """The row counts to draw from: those of the test range or, for a kernel, up to the most rows of a decode step."""
    declared = op.dims[dim]
    assert isinstance(declared, Dim), f"{op.name}: {dim} is not a runtime dim, so it has no rows to vary"
    lo, hi = (evaluate(bound, sizes) for bound in declared.drawn)
    return (lo, min(MOST_ROWS, evaluate(declared.hi, sizes))) if kernel else (lo, hi)


def _neighbours(op: Op[Any], batch: Mapping[str, Any], sizes: dict[str, int], seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Make another batch that has the same optional arguments as `batch`."""
    for attempt in range(1, 65):
        crowd = op.make(sizes, seed + attempt, dtype)
        if all((crowd[name] is None) == (item is None) for name, item in batch.items()):
            return crowd
    raise AssertionError(f"{op.name}: no neighbours with the same optional arguments in 64 draws")
