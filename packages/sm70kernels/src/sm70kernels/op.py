"""An op, declared once: checks, dispatch, test inputs, byte counts and the manual entry derive from the declaration.

    name = Op("name", reference=reference, launch=None, determinism=INV, tolerance=Ratio(2.0),
              args=dict(x="act[M,K] strided", w="act[N,K]", out="act[M,N] out"),
              dims=dict(M=Dim(0, 64, test=(0, 20)), N=Spec(2560, test=(24, 40)), K=Spec(2560, test=(32,))),
              inputs=dict(w=inputs.normal(0.1)))

The grammar of `args` is in sm70kernels.spec, that of `dims` in sm70kernels.dims. `reference` takes every argument except outputs
and scratch, in declared order, changes `inout` arguments in place and returns the outputs (one tensor, a tuple in declared order,
or None). `launch(config, dims, *every argument)` writes the outputs. Both signatures are checked at import.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from sm70kernels import inputs as input_makers
from sm70kernels.contract import Bound, Contract, ContractError
from sm70kernels.cuda import emulated
from sm70kernels.dims import AnyDim, DeclarationError, Derived, Dim, Spec, complete
from sm70kernels.spec import ALIGNMENT, DTYPES, Arg

if TYPE_CHECKING:
    from sm70kernels.emulator import Counters

__all__ = [
    "EXACT", "INV", "RUN", "TOL", "ContractError", "DeclarationError", "Derived", "Determinism", "Dim", "Exact", "NoKernel", "Op",
    "Ratio", "Spec", "record",
]  # fmt: skip

R = TypeVar("R")

_PLANS = 512
"""Cached call shapes an op keeps, at one or two kilobytes each; at the limit it starts over, so a caller with ever new shapes, as a server
is with the lengths of its contexts, cannot grow it. To check a shape anew takes less than a tenth of a millisecond."""

_BY_VALUE = frozenset({int, str, NoneType})
"""Scalars whose value may matter to a check (dims, enums, absent arguments); floats and bools matter by type only."""

_REMEMBERED = _BY_VALUE | {float, bool, Tensor}
"""Types whose checks are cached. Subclasses (a Parameter, an enum of strings) and other libraries' arrays are checked every time."""

_recorders: list[list[str]] = []


class NoKernel(RuntimeError):
    """The op has a reference but no kernel for the device its tensors are on."""


class Determinism(Enum):
    """What equality of bits an op promises."""

    EXACT = "bit-equal to the definition"
    RUN = "the same bits from run to run"
    INV = "the same bits from run to run, and a row's bits do not depend on the other rows, their number or its place"
    TOL = "within tolerance only"


EXACT, RUN, INV, TOL = Determinism.EXACT, Determinism.RUN, Determinism.INV, Determinism.TOL


@dataclass(frozen=True)
class Ratio:
    """Error at most `n` times that of the yardstick (sm70kernels.testing says how it is measured)."""

    n: float


@dataclass(frozen=True)
class Exact:
    """Equal to the definition, bit for bit after rounding to the output's dtype."""


@contextmanager
def record() -> Iterator[list[str]]:
    """Collect the names of the ops called inside the block, in order, in the list it yields."""
    names: list[str] = []
    _recorders.append(names)
    try:
        yield names
    finally:
        _recorders[:] = [other for other in _recorders if other is not names]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the checks of one call shape found; reused by every later call of that shape."""

    direct: bool  # on the CPU with the reference's own arguments: nothing to rearrange
    on_cpu: bool
    bound: Bound | None  # for a launch; a reference looks at its arguments itself


_NOTHING: tuple[list[Any], _Plan] = ([object()], _Plan(direct=False, on_cpu=True, bound=None))
"""Before the first call: a key that equals no other."""


class Op(Generic[R]):
    """A callable op: CPU tensors run `reference`, CUDA tensors run `launch`.

    Calls take the declared arguments in order or by name; omitted outputs are allocated, given ones are written and returned.
    Arrays of other libraries come in through DLPack without a copy. Raises ContractError when a call breaks the declaration and
    NoKernel for CUDA tensors when there is no `launch`.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[..., R],
        launch: Callable[..., None] | None = None,
        determinism: Determinism,
        tolerance: Ratio | Exact,
        args: Mapping[str, str],
        dims: Mapping[str, AnyDim],
        inputs: Mapping[str, input_makers.Maker] | None = None,
        configs: Sequence[Any] = (),
        choose: Callable[[Mapping[str, int]], Any] | None = None,
        bytes: Callable[[Mapping[str, int], torch.dtype], int] | None = None,
        flops: Callable[[Mapping[str, int]], int] | None = None,
        shapes: Sequence[Mapping[str, int]] = (),
    ) -> None:
        self.name = name
        self.reference = reference
        self.launch = launch
        self.determinism = determinism
        self.tolerance = tolerance
        self.inputs = dict(inputs or {})
        self.configs = tuple(configs)
        self.choose = choose
        self.flops = flops
        self.shapes = tuple(shapes)
        self._bytes = bytes
        self.contract = Contract(name, args, dims)
        self.args = self.contract.args
        self.dims = self.contract.dims
        self.doc = self.__doc__ = inspect.getdoc(inspect.getmodule(reference)) or ""
        self._index = {arg.name: i for i, arg in enumerate(self.args)}
        self._taken = tuple(i for i, arg in enumerate(self.args) if not (arg.is_out or arg.is_scratch))
        self._outs = tuple(i for i, arg in enumerate(self.args) if arg.is_out)
        self._aligned = tuple(i for i, arg in enumerate(self.args) if "aligned" in arg.flags)
        self._leading = self._taken == tuple(range(len(self._taken)))
        self._orders: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._latest: tuple[list[Any], _Plan] = _NOTHING
        self._check_declaration()

    def _check_declaration(self) -> None:
        """Compare the signatures of reference and launch, and the names in inputs, with the declared arguments."""
        taken = [self.args[i].name for i in self._taken]
        found = list(inspect.signature(self.reference).parameters)
        if found != taken:
            raise DeclarationError(f"{self.name}: reference takes ({', '.join(found)}), but args declares ({', '.join(taken)})")
        if self.launch is not None:
            found = list(inspect.signature(self.launch).parameters)[2:]
            if found != list(self._index):
                raise DeclarationError(f"{self.name}: launch takes cfg, d, {', '.join(found)}; args declares {', '.join(self._index)}")
        for name in self.inputs.keys() - set(taken):
            raise DeclarationError(f"{self.name}: inputs names {name}, which is not an argument the reference takes ({', '.join(taken)})")

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Run the op; see the class. Returns the outputs: one tensor, a tuple in declared order, or None."""
        if kwargs:
            names = (len(args), *kwargs)
            order = self._orders.get(names) or self._order(names)
            values = (*args, *kwargs.values(), None)
            args = tuple([values[i] for i in order])
        key = _key(args)
        latest, plan = self._latest
        if key != latest:
            found = self._plans.get(tuple(key))
            if found is None:
                args, plan = self._admit(args)
            else:
                self._latest, plan = (key, found), found
        if _recorders:
            for called in _recorders:
                called.append(self.name)
        if plan.direct:
            return self.reference(*args)
        values = args + (None,) * (len(self.args) - len(args))
        return self._refer(values) if plan.on_cpu else self._launch(values, plan.bound)

    def _order(self, names: tuple[Any, ...]) -> tuple[int, ...]:
        """Return where the arguments stand, in declared order, in a call with names[0] positional ones and then these names.

        An omitted argument stands at -1; the arguments after the last given one and after the reference's own are left out.
        """
        positional, *named = names
        order = list(range(positional)) + [-1] * (len(self.args) - positional)
        for place, name in enumerate(named, positional):
            index = self._index.get(name)
            if index is None:
                raise ContractError(f"{self.name}: no argument {name}; it takes {', '.join(self._index)}")
            if index < positional:
                raise ContractError(f"{self.name}: {name} is given twice, by position and by name")
            order[index] = place
        while len(order) > len(self._taken) and order[-1] == -1:
            order.pop()
        self._orders[names] = tuple(order)
        return tuple(order)

    def _admit(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], _Plan]:
        """Check a call shape for the first time: take in other libraries' arrays, bind, and remember the finding."""
        if len(args) > len(self.args):
            raise ContractError(f"{self.name}: expected at most {len(self.args)} arguments ({', '.join(self._index)}), got {len(args)}")
        args = tuple(self._as_tensor(arg, value) for arg, value in zip(self.args, args, strict=False))
        if self.launch is None:
            for arg, value in zip(self.args, args, strict=False):
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    raise NoKernel(f"{self.name}: no CUDA kernel; {arg.name} is on {value.device}: move the tensors to the CPU")
        on_cpu = all(value.device.type == "cpu" for value in args if isinstance(value, Tensor))
        bound = self.contract.bind(args + (None,) * (len(self.args) - len(args)), kernel=not on_cpu)
        plan = _Plan(direct=on_cpu and self._leading and len(args) == len(self._taken), on_cpu=on_cpu, bound=None if on_cpu else bound)
        if all(type(value) in _REMEMBERED for value in args):
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[tuple(_key(args))] = plan
        return args, plan

    def _as_tensor(self, arg: Arg, value: Any) -> Any:
        """Return another library's array, or a parameter, as a tensor over the same memory; anything else unchanged."""
        if isinstance(value, Tensor):  # of its subclasses the driver takes no address
            return value if type(value) is Tensor or value.requires_grad else value.as_subclass(Tensor)
        if not hasattr(value, "__dlpack__"):
            return value
        try:
            return from_dlpack(value)
        except (BufferError, RuntimeError, TypeError) as error:
            raise ContractError(f"{self.name}: {arg.name}: this array cannot come in through DLPack ({error}); pass a copy") from error

    def _refer(self, values: tuple[Any, ...]) -> R:
        """Run the reference and copy its results into the outputs the caller gave."""
        result = self.reference(*[values[i] for i in self._taken])
        if all(values[i] is None for i in self._outs):
            return result
        results: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
        returned = []
        for i, got in zip(self._outs, results, strict=True):
            given = values[i]
            if given is not None:
                if got is None or got.shape != given.shape or got.dtype != given.dtype:
                    made = "nothing" if got is None else f"{got.dtype} {tuple(got.shape)}"
                    place = f"{self.name}: {self.args[i].name}"
                    raise ContractError(f"{place}: this call makes {made}, got a tensor for {given.dtype} {tuple(given.shape)}")
                got = given.copy_(got)
            returned.append(got)
        return tuple(returned) if isinstance(result, tuple) else returned[0]  # type: ignore[return-value]

    def _launch(self, values: tuple[Any, ...], bound: Bound | None, config: Any = None) -> R:
        """Allocate the omitted outputs and launch on the caller's stream, with the given or the chosen configuration."""
        assert self.launch is not None  # _admit refuses the call otherwise
        assert bound is not None
        full = list(values)
        for i in self._outs:
            arg = self.args[i]
            absent = arg.when in self._index and values[self._index[str(arg.when)]] is None
            if full[i] is None and not absent:
                full[i] = self._empty(arg, bound)
        for i in self._aligned:
            if full[i] is not None and full[i].data_ptr() % ALIGNMENT:
                place, address = f"{self.name}: {self.args[i].name}", full[i].data_ptr()
                raise ContractError(f"{place}: expected an address that is a multiple of {ALIGNMENT}, got {address:#x}; pass a copy")
        self.launch(self.config(bound.dims) if config is None else config, bound.dims, *full)
        outs = tuple(full[i] for i in self._outs)
        return outs if len(outs) > 1 else outs[0] if outs else None  # type: ignore[return-value]

    def _empty(self, arg: Arg, bound: Bound) -> Tensor:
        return torch.empty(self.contract.shape(arg, bound.dims), dtype=self.contract.dtype(arg, bound), device=bound.device)

    def scratch(self, arguments: Mapping[str, Any]) -> list[tuple[Arg, Tensor]]:
        """Return the workspace a kernel needs for a call with these arguments, by name: every scratch argument not among them, empty.

        Raises ContractError.
        """
        missing = [arg for arg in self.args if arg.is_scratch and arguments.get(arg.name) is None]
        if not missing:
            return []
        bound = self.contract.bind([arguments.get(arg.name) for arg in self.args])
        return [(arg, self._empty(arg, bound)) for arg in missing]

    def emulate(self, *, config: Any = None, order: int | None = None, **arguments: Any) -> "tuple[R, list[Counters]]":
        """Run the kernel in the emulator on CPU tensors; returns what a call returns, and the counters of every launch.

        Arguments by name; scratch is allocated when omitted. `config` is one of `configs` (None: the chosen one), `order` the seed of a
        random order of warps. Raises ContractError as a call with CUDA tensors does, NoKernel, and emulator.Fault for a faulty kernel.
        """
        if self.launch is None:
            raise NoKernel(f"{self.name}: no CUDA kernel to emulate")
        values = tuple(self._as_tensor(arg, arguments.pop(arg.name, None)) for arg in self.args)
        for name in arguments:
            raise ContractError(f"{self.name}: no argument {name}; it takes {', '.join(self._index)}")
        given = {arg.name: value for arg, value in zip(self.args, values, strict=True)}
        given |= {arg.name: tensor for arg, tensor in self.scratch(given)}
        values = tuple(given[arg.name] for arg in self.args)
        with emulated(order=order) as counters:
            result = self._launch(values, self.contract.bind(values, kernel=True), config)
        return result, counters

    def config(self, dims: Mapping[str, int]) -> Any:
        """Return the kernel configuration for these dims: the op's rule, else its first config, else None."""
        if self.choose is not None:
            return self.choose(dims)
        return self.configs[0] if self.configs else None

    def sizes(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Return all dims: those given, the model's value of a specialised dim that is not, and the derived ones.

        Raises ContractError for a runtime dim that is missing.
        """
        bound = dict(dims)
        for name in bound.keys() - self.dims.keys():
            raise ContractError(f"{self.name}: no dim {name}; it has {', '.join(self.dims)}")
        for name in self.contract.order:
            dim = self.dims[name]
            if isinstance(dim, Spec) and name not in bound and dim.infer is None:
                bound[name] = dim.values[0]
        complete(self.dims, bound)
        for name in self.dims.keys() - bound.keys():
            raise ContractError(f"{self.name}: dim {name} is needed: it has no model value and follows from no other dim")
        return bound

    def make(
        self, dims: Mapping[str, int], seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> dict[str, Any]:
        """Return arguments for a call (every one but outputs and scratch, by name), drawn from `inputs` with `seed`.

        `dims` may leave out specialised dims (the model's value) and derived ones; `dtype` is that of activations.
        """
        return input_makers.make(self.name, [self.args[i] for i in self._taken], self.inputs, self.sizes(dims), seed, dtype, device)

    def bytes(self, dims: Mapping[str, int], dtype: torch.dtype = torch.float16) -> int:
        """Return the bytes one call moves at least: every tensor once, `inout` twice, or the op's own rule where it has one."""
        sizes = self.sizes(dims)
        if self._bytes is not None:
            return self._bytes(sizes, dtype)
        total = 0
        for arg in self.args:
            if arg.is_tensor and not arg.is_scratch:
                numel = torch.Size(self.contract.shape(arg, sizes)).numel()
                total += numel * _storage(arg, dtype).itemsize * (2 if arg.is_inout else 1)
        return total


def _key(args: tuple[Any, ...]) -> list[Any]:
    """What the checks of a call depend on: four entries a tensor, the first a torch.Size, and one for anything else.

    A flat list, because most calls have the shapes of the op's call before: to compare costs half of what hashing does.
    """
    key: list[Any] = []
    for a in args:
        if type(a) is Tensor:
            key += (a.shape, a.dtype, a.is_contiguous() or a.stride(), a.is_cpu or a.device)
        else:
            key.append(a if type(a) in _BY_VALUE else type(a))
    return key


def _storage(arg: Arg, act: torch.dtype) -> torch.dtype:
    return DTYPES.get(arg.dtypes[0], act)
