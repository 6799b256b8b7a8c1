"""What a property test runs an op on: its reference, its kernel in the emulator, its kernel on a GPU. Needs the extra `test`.

Every backend takes the same CPU arguments and gives CPU results, so one declaration of a test serves all three.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels.op import Op
from sm70kernels.spec import DTYPE_NAMES

EXAMPLES = 10
"""Examples of the default configuration of a kernel in the emulator; every other configuration gets one."""

MOST_ROWS = 64
"""Rows up to which kernels are tested: the most rows of a decode step."""


@dataclass
class Budget:
    """What the emulated launches of this process came to."""

    launches: int = 0
    thread_instructions: int = 0

    def __str__(self) -> str:
        return f"emulated {self.launches:,} launches, {self.thread_instructions / 1e6:,.1f} million thread-instructions"


budget = Budget()


@dataclass(frozen=True)
class Backend:
    """`call(op, arguments, order)` runs the op on CPU arguments, changes `inout` ones in place and returns CPU results.

    `kernel` backends draw the sizes a kernel accepts. `order` seeds the order of warps where there is a choice. `examples` overrides the
    test's own number.
    """

    name: str
    call: Callable[[Op[Any], dict[str, Any], int | None], Any]
    kernel: bool = False
    examples: int | None = None
    gpu: bool = False


def _refer(op: Op[Any], arguments: dict[str, Any], order: int | None) -> Any:
    return op(**arguments)


def _on_gpu(op: Op[Any], arguments: dict[str, Any], order: int | None) -> Any:
    there = moved(arguments, "cuda")
    there |= {arg.name: _to(tensor, "cuda") for arg, tensor in op.scratch(arguments)}
    result = op(**there)
    torch.cuda.synchronize()
    for arg in op.args:
        if (arg.is_inout or arg.is_out) and isinstance(arguments.get(arg.name), Tensor):
            arguments[arg.name].copy_(there[arg.name])
    return tuple(_to(item, "cpu") for item in result) if isinstance(result, tuple) else _to(result, "cpu")


def moved(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """The arguments with every tensor on the device."""
    return {name: _to(item, device) for name, item in arguments.items()}


def _to(item: Any, device: str) -> Any:
    """A tensor on the device with its strides, in memory that is NaN where a view leaves gaps; anything else unchanged."""
    if not isinstance(item, Tensor):
        return item
    if item.is_contiguous():
        return item.to(device)
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=device).copy_(item)


def _emulating(config: Any) -> Callable[[Op[Any], dict[str, Any], int | None], Any]:
    def call(op: Op[Any], arguments: dict[str, Any], order: int | None) -> Any:
        result, counters = op.emulate(**arguments, config=config, order=order)
        budget.launches += len(counters)
        budget.thread_instructions += sum(each.thread_instructions for each in counters)
        return result

    return call


REFERENCE = Backend("reference", _refer)
GPU = Backend("gpu", _on_gpu, kernel=True, gpu=True)


def cases(op: Op[Any], dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    """Return the pytest parameters (dtype, backend) of an op: its reference for each dtype and, with a launch, its kernel for f16.

    GPU cases carry the marker `gpu` and are skipped without a CUDA device.
    """
    found = [pytest.param(dtype, REFERENCE, id=DTYPE_NAMES[dtype]) for dtype in dtypes]
    if op.launch is None:
        return found
    for index, config in enumerate(op.configs or (None,)):
        backend = Backend(f"emulator-{index}", _emulating(config), kernel=True, examples=EXAMPLES if index == 0 else 1)
        found.append(pytest.param(torch.float16, backend, id=backend.name))
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    found.append(pytest.param(torch.float16, GPU, id="gpu", marks=[pytest.mark.gpu, skip]))
    return found


def real_shapes(op: Op[Any], without: str = "") -> list[Mapping[str, int]]:
    """Return the op's shapes at the real model's sizes; without a dim, every distinct rest of them."""
    rest = [{name: size for name, size in shape.items() if name != without} for shape in op.shapes]
    return [shape for index, shape in enumerate(rest) if shape not in rest[:index]]


def calls(op: Op[Any]) -> list[Any]:
    """Return pytest parameters: the op called on its reference and, with a launch, on its kernel in the emulator; arguments by name.

    For the edge cases of a test file, whose arguments must then suit the kernel too: f16, sizes it accepts.
    """
    emulator = _emulating(None)
    found = [pytest.param(op.__call__, id="reference")]
    return found if op.launch is None else [*found, pytest.param(lambda **arguments: emulator(op, arguments, None), id="emulator")]
