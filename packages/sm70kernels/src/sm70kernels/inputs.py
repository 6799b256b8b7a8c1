"""Makers of test and benchmark inputs, one an argument: `inputs=dict(k=inputs.unit(), slot=inputs.distinct("S"))`.

A maker is a function from a :class:`Draw` (the argument's name, shape, dtype; the dims; a seeded generator; the arguments made
before it) to a tensor or a scalar, so an op whose arguments depend on each other passes its own function. Bounds may be
expressions over the dims. Arguments without a maker get: floating tensors normal(), bool and enum any value, optional ones None
half of the time; other scalars and integer tensors have no sensible default and must be declared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sm70kernels.dims import DeclarationError, evaluate
from sm70kernels.spec import ALIGNMENT, DTYPES, Arg


@dataclass(frozen=True)
class Draw:
    """What a maker sees: the argument to make and everything decided before it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: Mapping[str, int]
    generator: torch.Generator
    made: Mapping[str, Any]

    def integer(self, lo: int, hi: int) -> int:
        """Return an integer in [lo, hi], both inclusive."""
        return int(torch.randint(lo, hi + 1, (), generator=self.generator))

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal float32 values."""
        return torch.randn(shape, generator=self.generator)


Maker = Callable[[Draw], Any]


def normal(scale: float = 1.0, mean: float = 0.0) -> Maker:
    """Normal values with the given standard deviation and mean."""
    return lambda draw: (draw.normal(*draw.shape) * scale + mean).to(draw.dtype)


def uniform(lo: float, hi: float) -> Maker:
    """Uniform values in [lo, hi)."""
    return lambda draw: (torch.rand(draw.shape, generator=draw.generator) * (hi - lo) + lo).to(draw.dtype)


def unit() -> Maker:
    """Normal values scaled to Euclidean length 1 along the last axis."""
    return lambda draw: torch.nn.functional.normalize(draw.normal(*draw.shape), dim=-1).to(draw.dtype)


def log_decay() -> Maker:
    """Logarithms of decay factors: mostly near 0, some strong (-exp of a normal value)."""
    return lambda draw: (-torch.exp(draw.normal(*draw.shape) * 2 - 2)).to(draw.dtype)


def integers(lo: int | str, hi: int | str) -> Maker:
    """Integers in [lo, hi], both inclusive; a Python int for an int argument."""

    def maker(draw: Draw) -> Any:
        low, high = evaluate(lo, draw.dims), evaluate(hi, draw.dims)
        if draw.shape == ():
            return draw.integer(low, high)
        return torch.randint(low, high + 1, draw.shape, generator=draw.generator).to(draw.dtype)

    return maker


def distinct(count: int | str) -> Maker:
    """Distinct integers below `count` in random order; -1 where the shape has more elements than that."""

    def maker(draw: Draw) -> Tensor:
        numel = torch.Size(draw.shape).numel()
        ids = torch.randperm(evaluate(count, draw.dims), generator=draw.generator)[:numel]
        return torch.cat([ids, ids.new_full((numel - ids.numel(),), -1)]).view(draw.shape).to(draw.dtype)

    return maker


def value(constant: Any) -> Maker:
    """The same scalar or, for a tensor argument, a tensor filled with it."""

    def maker(draw: Draw) -> Any:
        return torch.full(draw.shape, constant, dtype=draw.dtype) if draw.shape else constant

    return maker


def one_of(*choices: Any) -> Maker:
    """One of the given scalars."""
    return lambda draw: choices[draw.integer(0, len(choices) - 1)]


def optional(maker: Maker) -> Maker:
    """None half of the time, else what `maker` makes."""
    return lambda draw: maker(draw) if draw.integer(0, 1) else None


def make(
    op: str,
    args: Sequence[Arg],
    makers: Mapping[str, Maker],
    dims: Mapping[str, int],
    seed: int,
    act: torch.dtype,
    device: str | torch.device,
) -> dict[str, Any]:
    """Return a value for every argument of `args`, in order. Raises DeclarationError for one that needs a maker and has none."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for arg in args:
        shape = tuple(dims[axis] if isinstance(axis, str) else axis for axis in arg.axes)
        dtype = DTYPES.get(arg.dtypes[0], act) if arg.is_tensor else torch.float32
        draw = Draw(arg.name, shape, dtype, dims, generator, made)
        if arg.when is not None and (arg.when.startswith("kv:") or made.get(arg.when) is None):
            made[arg.name] = None  # test caches are dense
        elif arg.name in makers:
            made[arg.name] = makers[arg.name](draw)
        else:
            made[arg.name] = _default(op, arg, draw)
        if "device" in arg.flags and made[arg.name] is not None:
            made[arg.name] = torch.as_tensor(made[arg.name], dtype=dtype)  # makers give scalars for shape ()
        if isinstance(made[arg.name], Tensor) and "strided" in arg.flags:
            made[arg.name] = _column_slice(made[arg.name], draw, "aligned" in arg.flags)
    return {name: item.to(device) if isinstance(item, Tensor) else item for name, item in made.items()}


def _default(op: str, arg: Arg, draw: Draw) -> Any:
    if arg.kind == "dim":
        return draw.dims[arg.choices[0]]
    if arg.kind == "enum":
        return arg.choices[draw.integer(0, len(arg.choices) - 1)]
    if arg.kind == "bool":
        return bool(draw.integer(0, 1))
    if arg.is_tensor and draw.dtype.is_floating_point:
        maker = normal()
        return optional(maker)(draw) if "optional" in arg.flags else maker(draw)
    raise DeclarationError(f"{op}: {arg.name} ({arg.text}) needs a maker: inputs=dict({arg.name}=inputs.integers(...))")


def _column_slice(tensor: Tensor, draw: Draw, aligned: bool) -> Tensor:
    """Return the values as columns of a wider NaN-filled buffer half of the time: a fused projection hands them over that way.

    Aligned ones lie at a multiple of 16 bytes, with rows that are that far apart.
    """
    if tensor.dim() < 2 or not tensor.dtype.is_floating_point or not draw.integer(0, 1):
        return tensor
    before, after = draw.integer(0, 3), draw.integer(1, 3)
    width = tensor.shape[-1]
    if aligned:
        whole = ALIGNMENT // tensor.itemsize
        before, after = before * whole, after * whole - width % whole
    wide = torch.full((*tensor.shape[:-1], before + width + after), float("nan"), dtype=tensor.dtype)
    wide[..., before : before + width] = tensor
    return wide[..., before : before + width]
