"""Arguments for timing a call: the op's own inputs at the model's sizes, every output and all scratch allocated, nothing left to chance.

They differ from what tests draw: optional tensors are there, tensors are contiguous, activations are f16, and tensors too large to draw
in a moment repeat a block of their own distribution.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sm70kernels import inputs
from sm70kernels.inputs import Draw, Maker
from sm70kernels.op import Op
from sm70kernels.spec import DTYPES, Arg

LARGE = 1 << 22
"""Elements from which on a tensor repeats itself."""


def make(
    op: Op[Any],
    dims: Mapping[str, int],
    given: Mapping[str, Any] | None = None,
    *,
    storage: str = "f16",
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Return every argument of a launch by name, in declared order.

    `dims` may leave out what `op.sizes` knows and may hold sizes without a kernel; `given` fixes arguments, by value (None: absent) or by a
    maker of sm70kernels.inputs; `storage` is
    that of the K/V cache: f16, u8 or i8.
    """
    sizes, fixed = op.sizes(dims), dict(given or {})
    drawn = [arg for arg in op.args if not (arg.is_out or arg.is_scratch)]
    taken = [_plain(arg, storage) for arg in drawn]
    makers = {arg.name: maker for arg in drawn if (maker := _maker(op, arg, fixed, device)) is not None}
    made = inputs.make(op.name, taken, makers, sizes, seed, torch.float16, device)
    for arg in op.args:
        if arg.is_out or arg.is_scratch:
            absent = arg.when is not None and made.get(arg.when) is None
            dtype = DTYPES.get(arg.dtypes[0], DTYPES[storage] if arg.dtypes[0] == "kv" else torch.float16)
            made[arg.name] = None if absent else torch.empty(op.contract.shape(arg, sizes), dtype=dtype, device=device)
    return {arg.name: made[arg.name] for arg in op.args}


def copy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments over memory of their own."""
    return {name: item.clone() if isinstance(item, Tensor) else item for name, item in arguments.items()}


def size(arguments: Mapping[str, Any]) -> int:
    """Return the bytes the tensors among the arguments take."""
    return sum(item.numel() * item.itemsize for item in arguments.values() if isinstance(item, Tensor))


def _plain(arg: Arg, storage: str) -> Arg:
    """The argument without what tests vary: contiguous, and with the cache of one storage."""
    plain = replace(arg, flags=arg.flags - {"strided"})
    if "kv" in arg.dtypes:
        plain = replace(plain, dtypes=(storage,))
    return replace(plain, when=None) if arg.when == f"kv:{storage}" else plain


def _maker(op: Op[Any], arg: Arg, fixed: Mapping[str, Any], device: str | torch.device) -> Maker | None:
    """Return what makes an argument here; None leaves it to the default of its kind."""
    if arg.name in fixed:
        item = fixed[arg.name]
        if callable(item):
            return _sized(item, device) if arg.is_tensor else item
        return (lambda draw: item) if item is None or isinstance(item, Tensor) else inputs.value(item)
    if not arg.is_tensor:
        return op.inputs.get(arg.name)
    default = inputs.uniform(0.01, 0.02) if str(arg.when).startswith("kv:") else _plausible
    return _sized(_present(op.inputs.get(arg.name) or default), device)


def _plausible(draw: Draw) -> Tensor:
    """Values for a tensor without a maker: standard normal, or any code of an integer type."""
    if draw.dtype.is_floating_point:
        return draw.normal(*draw.shape).to(draw.dtype)
    info = torch.iinfo(draw.dtype)
    return torch.randint(info.min, info.max, draw.shape, generator=draw.generator).to(draw.dtype)


def _present(maker: Maker) -> Maker:
    """The same maker, asked again while it leaves an optional tensor out."""

    def again(draw: Draw) -> Any:
        return next((value for value in (maker(draw) for _ in range(64)) if value is not None), None)

    return again


def _sized(maker: Maker, device: str | torch.device) -> Maker:
    """The same maker for moderate sizes; a larger tensor repeats, on its device, what it makes of its leading rows."""

    def sized(draw: Draw) -> Any:
        numel = torch.Size(draw.shape).numel()
        if numel <= LARGE:
            return maker(draw)
        rest = numel // draw.shape[0]
        rows = max(1, LARGE // rest)
        block = maker(replace(draw, shape=(min(rows, draw.shape[0]), *draw.shape[1:]))).to(device)
        repeats = -(-draw.shape[0] // block.shape[0])
        return block.repeat(repeats, *[1] * (len(draw.shape) - 1))[: draw.shape[0]]

    return sized

