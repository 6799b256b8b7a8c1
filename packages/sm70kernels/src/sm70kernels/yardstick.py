"""How far an op may be from its definition: what a test measures its error with.

**Yardstick.** For `Ratio(n)` the naive definition runs three times: once undisturbed with `h` the identity (*truth*), and twice
(*yards*) with `h` rounding to the activation dtype, every floating input multiplied by 1 ± 2^-22 with random signs, and every
output rounded to its dtype. The disturbance is float32's unit roundoff four times over: by backward error analysis a float32
evaluation in any order of summation is the exact result of inputs disturbed by a few units of roundoff, so what the yards lose is
what an implementation in native precision may lose, cancellation and conditioning included. The op's error against truth may be
n times the yards' error, both as the maximum over an output and as its root mean square. One term keeps luck out on tiny outputs:
2^-23 of the largest magnitude. Values that are infinite or NaN in truth, after rounding, must be the same in the op's output.

Integer outputs, and all outputs for `Exact()`, must equal the naive definition's.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sm70kernels.op import Op, Ratio

_DISTURBANCE = 2.0**-22
_FLOOR = 2.0**-23
_NORMS: dict[str, Callable[[Tensor], float]] = {
    "maximum": lambda error: float(error.max()),
    "root mean square": lambda error: float(error.square().mean().sqrt()),
}


def clone(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with every tensor copied (strides kept), so that a call in place leaves the original alone."""
    return {name: _copy(item) if isinstance(item, Tensor) else item for name, item in arguments.items()}


def _copy(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor.clone()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def outputs(op: Op[Any], arguments: Mapping[str, Any], result: Any) -> dict[str, Tensor | None]:
    """Return what a call wrote, by name: the outputs it returned, then its `inout` arguments."""
    results = result if isinstance(result, tuple) else (result,)
    written = dict(zip([arg.name for arg in op.args if arg.is_out], results, strict=False))
    return written | {arg.name: arguments[arg.name] for arg in op.args if arg.is_inout}


def run_naively(
    op: Op[Any],
    naive: Callable[..., Any],
    arguments: Mapping[str, Any],
    h: Callable[[Tensor], Tensor],
    disturb: int | None = None,
) -> dict[str, Tensor | None]:
    """Run the definition in float64 on copies, disturbed when a seed is given; on the device the arguments are on."""
    wide = clone(arguments)
    for name, item in wide.items():
        if isinstance(item, Tensor) and item.is_floating_point():
            item = item.double().contiguous()
            if disturb is not None:
                generator = torch.Generator(item.device).manual_seed(disturb + len(name))
                signs = torch.randint(0, 2, item.shape, generator=generator, device=item.device) * 2 - 1
                item = item * (1 + _DISTURBANCE * signs)
            wide[name] = item
    rounding = {"h": h} if "h" in inspect.signature(naive).parameters else {}
    return outputs(op, wide, naive(*wide.values(), **rounding))


@dataclass(frozen=True)
class Expected:
    """What a definition gives for one call: the undisturbed values and, for a ratio, the values with all roundings and the yards."""

    truth: dict[str, Tensor | None]
    stated: dict[str, Tensor | None]
    yards: list[dict[str, Tensor | None]]


def expect(op: Op[Any], naive: Callable[..., Any], arguments: Mapping[str, Any], act: torch.dtype) -> Expected:
    """Run the definition for one call with activations of dtype `act`."""

    def h(x: Tensor) -> Tensor:
        return x.to(act).double()

    def run(h: Callable[[Tensor], Tensor], disturb: int | None = None) -> dict[str, Tensor | None]:
        return {name: None if value is None else value.cpu() for name, value in run_naively(op, naive, arguments, h, disturb).items()}

    if not isinstance(op.tolerance, Ratio):
        truth = run(h)
        return Expected(truth, truth, [])
    return Expected(run(lambda x: x), run(h), [run(h, seed) for seed in (1, 2)])


def judge(op: Op[Any], expected: Expected, got: Mapping[str, Tensor | None]) -> None:
    """Compare what an op wrote with what its definition gives, by the op's tolerance; AssertionError names the output and both errors."""
    ratio = op.tolerance.n if isinstance(op.tolerance, Ratio) else None
    for name, value in got.items():
        truth = expected.truth[name]
        assert (value is None) == (truth is None), f"{op.name}: {name}: got {value}, the definition gives {truth}"
        if value is None or truth is None:
            continue
        assert value.shape == truth.shape, f"{op.name}: {name}: shape {tuple(value.shape)}, the definition gives {tuple(truth.shape)}"
        rounded = truth.to(value.dtype)
        exact = torch.ones_like(rounded, dtype=torch.bool)
        if ratio is not None and value.is_floating_point():
            exact = ~torch.isfinite(rounded)
        different = ~torch.isclose(value, rounded, rtol=0, atol=0, equal_nan=True) & exact
        if different.any():
            at = tuple(different.nonzero()[0].tolist())
            count = f"{int(different.sum())} of {value.numel()} values differ"
            raise AssertionError(f"{op.name}: {name}: {count}, first at {at}: {value[at]}, the definition gives {rounded[at]}")
        if ratio is not None and not exact.all():
            _within(f"{op.name}: {name}", ratio, value, truth, [yard[name] for yard in expected.yards], ~exact)


def rounds_to_nearest(op: Op[Any], expected: Expected, got: Mapping[str, Tensor | None]) -> None:
    """Check that float16 outputs are those of the definition with its roundings, bit for bit but for a few.

    In float64 the definition rounds where a float32 evaluation does, and sums differ too little to cross a border often: 2% may, or two
    values of an output. Truncation instead of rounding stays within a ratio of 2, and moves half of them.
    """
    for name, value in got.items():
        stated = expected.stated[name]
        if value is not None and stated is not None and value.dtype is torch.float16:
            wrong = int((~torch.isclose(value, stated.half(), rtol=0, atol=0, equal_nan=True)).sum())
            assert wrong <= max(2, 0.02 * value.numel()), f"{op.name}: {name}: {wrong} of {value.numel()} values are rounded otherwise"


def _within(place: str, ratio: float, value: Tensor, truth: Tensor, yards: list[Tensor | None], where: Tensor) -> None:
    exact = truth[where]
    error = (value[where].double() - exact).abs()
    floor = _FLOOR * float(exact.abs().max())
    allowed = [(yard.to(value.dtype)[where].double() - exact).abs().nan_to_num(0.0, posinf=0.0) for yard in yards if yard is not None]
    for norm, measure in _NORMS.items():
        mine, limit = measure(error), ratio * (max(measure(e) for e in allowed) + floor)
        assert mine <= limit, f"{place}: {norm} error {mine:.3g} is above {ratio} x the yardstick = {limit:.3g}"


def same_definition(
    op: Op[Any], naive: Callable[..., Any], large: Callable[..., Any], sizes: Mapping[str, int], dtype: torch.dtype
) -> None:
    """Compare the vectorised definition with the naive one, rounding points included: they differ by the order of float64 sums only."""

    def h(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    arguments = op.make(sizes, 0, dtype)
    expected, got = run_naively(op, naive, arguments, h), run_naively(op, large, arguments, h)
    for name, value in expected.items():
        other = got[name]
        assert (value is None) == (other is None), f"{op.name}: {name}: the vectorised definition gives {other}, the naive one {value}"
        if value is not None and other is not None:
            # A sum that crosses a rounding point's border moves the result by about one unit of the activation dtype.
            close = torch.isclose(other.double(), value.double(), rtol=4 * torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)
            same = torch.isclose(other.double(), value.double(), rtol=1e-12, atol=1e-12, equal_nan=True)
            assert close.all(), f"{op.name}: {name}: the vectorised definition is another than the naive one"
            assert same.double().mean() > 0.99, f"{op.name}: {name}: the vectorised definition rounds elsewhere than the naive one"
