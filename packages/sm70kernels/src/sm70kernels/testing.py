"""Property tests of an op against a naive definition, and of the independence of its rows. Needs the extra `test`.

    test_matches_naive = conforms(linear_skinny, naive)
    test_rows = rows_independent(linear_skinny)

A *naive definition* is a function in the op's test file, written as loops from the specification and from nothing else. It takes
what the op's reference takes, changes `inout` arguments in place and returns the outputs in the same form. Floating tensors
arrive as float64. It may take a keyword `h`, to be applied where the specification rounds to the activation dtype before the end.

**Yardstick.** For `Ratio(n)` the naive definition runs three times: once undisturbed with `h` the identity (*truth*), and twice
(*yards*) with `h` rounding to the activation dtype, every floating input multiplied by 1 ± 2^-22 with random signs, and every
output rounded to its dtype. The disturbance is float32's unit roundoff four times over: by backward error analysis a float32
evaluation in any order of summation is the exact result of inputs disturbed by a few units of roundoff, so what the yards lose is
what an implementation in native precision may lose, cancellation and conditioning included. The op's error against truth may be
n times the yards' error, both as the maximum over an output and as its root mean square. One term keeps luck out on tiny outputs:
2^-23 of the largest magnitude. Values that are infinite or NaN in truth, after rounding, must be the same in the op's output.

Integer outputs, and all outputs for `Exact()`, must equal the naive definition's.

A reference that skips a rounding point is nearer to truth, so `conforms` cannot see it: `rounds_as_stated` does.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from sm70kernels.dims import Derived, Dim, Spec, evaluate
from sm70kernels.op import Op, Ratio
from sm70kernels.spec import DTYPE_NAMES

DTYPES = (torch.float32, torch.float16)
_DISTURBANCE = 2.0**-22
_FLOOR = 2.0**-23
_NORMS: dict[str, Callable[[Tensor], float]] = {
    "maximum": lambda error: float(error.max()),
    "root mean square": lambda error: float(error.square().mean().sqrt()),
}
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


def clone(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with every tensor copied (strides kept), so that a call in place leaves the original alone."""
    return {name: _copy(item) if isinstance(item, Tensor) else item for name, item in arguments.items()}


def _copy(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor.clone()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def _choose_dims(op: Op[Any], fixed: Mapping[str, int], pick: Callable[[Sequence[int]], int], largest: str = "") -> dict[str, int]:
    """Return every dim of an op: the fixed ones, one value that `pick` takes from each test range, the derived ones.

    `largest` names a dim that takes the end of its range, so that the sizes that depend on it suit any smaller value too.
    """
    dims = dict(fixed)
    for name in op.contract.order:
        dim = op.dims[name]
        if name in dims:
            continue
        if isinstance(dim, Derived):
            dims[name] = evaluate(dim.expression, dims)
        elif isinstance(dim, Spec):
            dims[name] = pick(dim.test)
        else:
            lo, hi = (evaluate(bound, dims) for bound in dim.drawn)
            dims[name] = hi if name == largest else pick(range(lo, hi + 1))
    return dims


@st.composite
def draw_dims(draw: st.DrawFn, op: Op[Any], fixed: Mapping[str, int] | None = None, largest: str = "") -> dict[str, int]:
    """Draw every dim of an op from its test range; `fixed` dims are taken as given, the `largest` one at its range's end."""
    return _choose_dims(op, fixed or {}, lambda values: draw(st.sampled_from(values)), largest)


def outputs(op: Op[Any], arguments: Mapping[str, Any], result: Any) -> dict[str, Tensor | None]:
    """Return what a call wrote, by name: the outputs it returned, then its `inout` arguments."""
    results = result if isinstance(result, tuple) else (result,)
    written = dict(zip([arg.name for arg in op.args if arg.is_out], results, strict=False))
    return written | {arg.name: arguments[arg.name] for arg in op.args if arg.is_inout}


def _naively(
    op: Op[Any],
    naive: Callable[..., Any],
    arguments: Mapping[str, Any],
    h: Callable[[Tensor], Tensor],
    disturb: torch.Generator | None = None,
) -> dict[str, Tensor | None]:
    """Run the naive definition in float64 on copies, disturbed when a generator is given."""
    wide = clone(arguments)
    for name, item in wide.items():
        if isinstance(item, Tensor) and item.is_floating_point():
            item = item.double().contiguous()
            if disturb is not None:
                signs = torch.randint(0, 2, item.shape, generator=disturb) * 2 - 1
                item = item * (1 + _DISTURBANCE * signs)
            wide[name] = item
    rounding = {"h": h} if "h" in inspect.signature(naive).parameters else {}
    return outputs(op, wide, naive(*wide.values(), **rounding))


def judge(op: Op[Any], naive: Callable[..., Any], arguments: Mapping[str, Any], got: Mapping[str, Tensor | None], act: torch.dtype) -> None:
    """Compare what an op wrote with the naive definition by the op's tolerance; AssertionError names the output and both errors."""

    def h(x: Tensor) -> Tensor:
        return x.to(act).double()

    ratio = op.tolerance.n if isinstance(op.tolerance, Ratio) else None
    truth = _naively(op, naive, arguments, h if ratio is None else lambda x: x)
    yards = [] if ratio is None else [_naively(op, naive, arguments, h, torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    for name, value in got.items():
        expected = truth[name]
        assert (value is None) == (expected is None), f"{op.name}: {name}: got {value}, the definition gives {expected}"
        if value is None or expected is None:
            continue
        assert value.shape == expected.shape, f"{op.name}: {name}: shape {tuple(value.shape)}, the definition gives {tuple(expected.shape)}"
        rounded = expected.to(value.dtype)
        exact = torch.ones_like(rounded, dtype=torch.bool)
        if ratio is not None and value.is_floating_point():
            exact = ~torch.isfinite(rounded)
        different = ~torch.isclose(value, rounded, rtol=0, atol=0, equal_nan=True) & exact
        if different.any():
            at = tuple(different.nonzero()[0].tolist())
            count = f"{int(different.sum())} of {value.numel()} values differ"
            raise AssertionError(f"{op.name}: {name}: {count}, first at {at}: {value[at]}, the definition gives {rounded[at]}")
        if ratio is not None and not exact.all():
            _within(f"{op.name}: {name}", ratio, value, expected, [yard[name] for yard in yards], ~exact)


def _within(place: str, ratio: float, value: Tensor, truth: Tensor, yards: list[Tensor | None], where: Tensor) -> None:
    exact = truth[where]
    error = (value[where].double() - exact).abs()
    floor = _FLOOR * float(exact.abs().max())
    allowed = [(yard.to(value.dtype)[where].double() - exact).abs().nan_to_num(0.0, posinf=0.0) for yard in yards if yard is not None]
    for norm, measure in _NORMS.items():
        mine, limit = measure(error), ratio * (max(measure(e) for e in allowed) + floor)
        assert mine <= limit, f"{place}: {norm} error {mine:.3g} is above {ratio} x the yardstick = {limit:.3g}"


def conforms(
    op: Op[Any],
    naive: Callable[..., Any],
    *,
    examples: int = 8,
    dims: Mapping[str, int] | None = None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Callable[..., None]:
    """Return a property test: the op equals its naive definition within its tolerance, for drawn dims, seeds and both dtypes.

    Each example also checks that given outputs (poisoned first) are written completely and equal the omitted ones, which makes
    it a test of repeatability too. The smallest and the largest test dims are always among the examples.
    """

    def matches_naive(dtype: torch.dtype, sizes: dict[str, int], seed: int) -> None:
        arguments = op.make(sizes, seed, dtype)
        first, second = clone(arguments), clone(arguments)
        with poisoned_memory():
            result = op(**first)
        got = outputs(op, first, result)
        judge(op, naive, arguments, got, dtype)
        given = {arg.name: poison(torch.empty_like(value)) for arg in op.args if arg.is_out and (value := got[arg.name]) is not None}
        again = outputs(op, second, op(**second, **given))
        for name, value in got.items():
            assert same_bits(value, again[name]), f"{op.name}: {name}: a given output differs from an omitted one"

    test = hypothesis.given(sizes=draw_dims(op, dims), seed=st.integers(0, 2**31 - 1))(matches_naive)
    for extreme in (min, max):
        edge: Callable[..., Any] = hypothesis.example(sizes=_choose_dims(op, dims or {}, extreme), seed=0)
        test = edge(test)
    return _settled(test, examples, dtypes)


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
        sizes = _choose_dims(op, dims, max)
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
                expected = _naively(op, naive, arguments, h)
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
    """Return a property test: a row alone has the bits it has at any place among random neighbours.

    The arguments and outputs that have an axis `dim` are the rows; the others are the same in every call. `slots` names `inout`
    pools that rows reach through an index: {"state": "slot"} compares state[slot[row]].
    """
    axis = {arg.name: arg.axes.index(dim) for arg in op.args if dim in arg.axes}
    pools = set((slots or {}).values())

    def row(name: str, tensor: Tensor, index: int) -> Tensor:
        return tensor.narrow(axis[name], index, 1).clone(memory_format=torch.contiguous_format)

    def check(dtype: torch.dtype, sizes: dict[str, int], others: int, seed: int, here: int, there: int) -> None:
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
            wrote = outputs(op, arguments, op(**arguments))
            seen.append({name: row(name, value, index) for name, value in wrote.items() if name in axis and value is not None})
            for pool, slot in (slots or {}).items():
                held = int(arguments[slot].flatten()[index])
                if held >= 0:
                    seen[-1][pool] = arguments[pool][held]
        for name in seen[0]:
            for other, what in ((seen[1], f"row {there} of {others}"), (seen[2], "alone")):
                assert same_bits(seen[0][name], other[name]), f"{op.name}: {name}: row {here} of {sizes[dim]} has other bits as {what}"

    def row_alone_equals_row_in_batch(dtype: torch.dtype, data: st.DataObject) -> None:
        sizes = data.draw(draw_dims(op, dims, largest=dim))
        lo, hi = (evaluate(bound, sizes) for bound in _range(op, dim))
        count, others = (data.draw(st.integers(max(1, lo), hi)) for _ in range(2))
        sizes = {name: value for name, value in sizes.items() if not isinstance(op.dims[name], Derived)} | {dim: count}
        here, there = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, others - 1))
        check(dtype, sizes, others, data.draw(st.integers(0, 2**30)), here, there)

    return _settled(hypothesis.given(data=st.data())(row_alone_equals_row_in_batch), examples, DTYPES)


def _settled(test: Callable[..., None], examples: int, dtypes: tuple[torch.dtype, ...]) -> Callable[..., None]:
    """Fix the number and the order of a property test's examples (a run is repeatable) and run it for each activation dtype."""
    settings = hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=_UNCHECKED)
    repeated: Callable[..., None] = pytest.mark.parametrize("dtype", dtypes, ids=[DTYPE_NAMES[dtype] for dtype in dtypes])(settings(test))
    return repeated


def _range(op: Op[Any], dim: str) -> tuple[int | str, int | str]:
    declared = op.dims[dim]
    assert isinstance(declared, Dim), f"{op.name}: {dim} is not a runtime dim, so it has no rows to vary"
    return declared.drawn


def _neighbours(op: Op[Any], batch: Mapping[str, Any], sizes: dict[str, int], seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Make another batch that has the same optional arguments as `batch`."""
    for attempt in range(1, 65):
        crowd = op.make(sizes, seed + attempt, dtype)
        if all((crowd[name] is None) == (item is None) for name, item in batch.items()):
            return crowd
    raise AssertionError(f"{op.name}: no neighbours with the same optional arguments in 64 draws")
