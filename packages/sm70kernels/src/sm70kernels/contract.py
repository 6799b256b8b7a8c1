"""Checks one call of an op against its declaration and binds its dims, activation dtype, cache storage and device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from sm70kernels.dims import AnyDim, DeclarationError, Derived, Dim, Spec, complete, drawing_order, evaluate, names_in
from sm70kernels.spec import ACTIVATIONS, ALIGNMENT, DTYPE_NAMES, DTYPES, KV_CODES, SCALARS, Arg, parse


class ContractError(ValueError):
    """A call breaks the op's declaration; the text names op, argument, axis, dim, expected and got."""


@dataclass
class Bound:
    """What one call fixed: dim values (with who bound them), activation dtype, cache storage, device, whether a kernel runs."""

    dims: dict[str, int] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    act: torch.dtype | None = None
    act_source: str = ""
    kv: torch.dtype | None = None
    kv_source: str = ""
    device: torch.device | None = None
    device_source: str = ""
    kernel: bool = False


class Contract:
    """The parsed declaration of an op: its arguments in call order and its dims."""

    def __init__(self, name: str, args: Mapping[str, str], dims: Mapping[str, AnyDim]) -> None:
        self.name = name
        self.args = tuple(parse(arg, text) for arg, text in args.items())
        self.dims = dict(dims)
        try:
            self.order = drawing_order(self.dims)
        except DeclarationError as error:
            raise DeclarationError(f"{name}: {error}") from error
        self._check_declaration()

    def _check_declaration(self) -> None:
        used = {dim for arg in self.args for dim in arg.dims}
        for arg in self.args:
            for dim in arg.dims:
                if dim not in self.dims:
                    raise DeclarationError(f"{self.name}: {arg.name} uses dim {dim}, which dims= does not declare")
            known = {other.name for other in self.args} | {"kv:u8", "kv:i8"}
            if arg.when is not None and arg.when not in known:
                raise DeclarationError(f"{self.name}: {arg.name}: when={arg.when} names no argument and no cache storage")
        rules = [d.expression if isinstance(d, Derived) else d.infer for d in self.dims.values()]
        for dim in self.dims.keys() - used - names_in(*rules):
            raise DeclarationError(f"{self.name}: dim {dim} is declared but no argument and no expression uses it")

    def bind(self, values: Sequence[Any], kernel: bool = False) -> Bound:
        """Check `values`, one an argument in declared order (None: omitted), and return what they bind.

        For a kernel rather than the reference, sizes must be specialised ones, activations f16, scratch given and `aligned` tensors
        aligned. Raises ContractError.
        """
        bound = Bound(kernel=kernel)
        for arg, value in zip(self.args, values, strict=True):
            if value is not None:
                (self._tensor if arg.is_tensor else self._scalar)(arg, value, bound)
        self._presence(values, bound)
        complete(self.dims, bound.dims)
        self._ranges(bound)
        if kernel and bound.act is None:  # codes only: what they become is what kernels take
            bound.act, bound.act_source = torch.float16, "kernels"
        if kernel and bound.act is torch.float32:
            self._fail(f"{bound.act_source}: expected f16, got f32; kernels take f16 activations: convert them, or call with CPU tensors")
        return bound

    def shape(self, arg: Arg, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a tensor argument at the given dims."""
        return tuple(dims[axis] if isinstance(axis, str) else axis for axis in arg.axes)

    def dtype(self, arg: Arg, bound: Bound) -> torch.dtype:
        """Return the dtype to allocate an omitted output with. Raises ContractError where the caller has the choice."""
        if len(arg.dtypes) > 1:
            self._fail(f"{arg.name} may be {' or '.join(arg.dtypes)}: pass {arg.name}= to choose")
        word = arg.dtypes[0]
        if word in DTYPES:
            return DTYPES[word]
        chosen = bound.kv if word == "kv" else bound.act
        if chosen is None:
            self._fail(f"{arg.name}: no argument of this call fixes its dtype {word}: pass {arg.name}=")
        return chosen

    def _fail(self, message: str) -> NoReturn:
        raise ContractError(f"{self.name}: {message}")

    def _scalar(self, arg: Arg, value: Any, bound: Bound) -> None:
        if arg.kind == "enum":
            if value not in arg.choices:
                self._fail(f"{arg.name}: expected one of {', '.join(arg.choices)}, got {value!r}")
            return
        wanted: type[Any] = int if arg.kind == "dim" else SCALARS[arg.kind]
        if not (type(value) is wanted or (wanted is float and type(value) is int)):
            self._fail(f"{arg.name}: expected a Python {wanted.__name__}, got {type(value).__name__} {value!r}")
        if arg.kind == "dim":
            self._bind_dim(arg.choices[0], value, arg.name, bound)

    def _tensor(self, arg: Arg, value: Any, bound: Bound) -> None:
        if not isinstance(value, Tensor):
            self._fail(f"{arg.name}: expected a tensor ({arg.text}) or an array with __dlpack__, got {type(value).__name__}")
        if bound.device is None:
            bound.device, bound.device_source = value.device, arg.name
        elif value.device != bound.device:
            self._fail(f"{arg.name}: on {value.device}, but {bound.device_source} is on {bound.device}; move one of them")
        if value.requires_grad:
            self._fail(f"{arg.name}: requires grad, and ops have no gradient; pass {arg.name}.detach()")
        if value.dim() != len(arg.axes):
            self._fail(f"{arg.name}: expected {len(arg.axes)} axes [{','.join(map(str, arg.axes))}], got shape {tuple(value.shape)}")
        self._dtype(arg, value.dtype, bound)
        self._layout(arg, value, bound)
        for index, axis in enumerate(arg.axes):
            size = value.size(index)
            if isinstance(axis, str):
                self._bind_dim(axis, size, f"{arg.name} axis {index}", bound)
            elif axis != size:
                self._fail(f"{arg.name} axis {index}: expected {axis}, got {size}")

    def _bind_dim(self, dim: str, size: int, place: str, bound: Bound) -> None:
        known = bound.dims.setdefault(dim, size)
        source = bound.source.setdefault(dim, place)
        if known != size:
            self._fail(f"{place}: expected {dim}={known} (bound by {source}), got {size}")

    def _dtype(self, arg: Arg, dtype: torch.dtype, bound: Bound) -> None:
        fixed = [DTYPES[word] for word in arg.dtypes if word in DTYPES]
        classes = [word for word in arg.dtypes if word not in DTYPES]
        if dtype in fixed and not classes:
            return
        got = DTYPE_NAMES.get(dtype, str(dtype))
        if not classes:
            self._fail(f"{arg.name}: expected {' or '.join(arg.dtypes)}, got {got}")
        if "kv" in classes:
            if bound.kv not in (None, dtype):
                self._fail(f"{arg.name}: kv storage {got}, but {bound.kv_source} has {DTYPE_NAMES[bound.kv]}; one call has one storage")
            if dtype in KV_CODES or dtype in ACTIVATIONS:
                bound.kv, bound.kv_source = dtype, bound.kv_source or arg.name
            if dtype in KV_CODES:
                return
        if bound.act == dtype:
            return
        if dtype in fixed:  # act|f32 that is f32: says nothing about the activation dtype
            return
        if dtype not in ACTIVATIONS:
            self._fail(f"{arg.name}: expected {' or '.join(arg.dtypes)} (activations are f32 or f16), got {got}")
        if bound.act is not None:
            self._fail(f"{arg.name}: expected activation dtype {DTYPE_NAMES[bound.act]} (bound by {bound.act_source}), got {got}")
        bound.act, bound.act_source = dtype, arg.name

    def _layout(self, arg: Arg, value: Tensor, bound: Bound) -> None:
        if bound.kernel and "aligned" in arg.flags:
            for index, stride in enumerate(value.stride()[:-1]):
                step = stride * value.itemsize
                if step % ALIGNMENT and value.size(index) > 1:
                    self._fail(f"{arg.name} axis {index}: expected a stride of a multiple of {ALIGNMENT} bytes, got {step}")
        if value.is_contiguous():
            return
        if "strided" not in arg.flags:
            self._fail(f"{arg.name}: expected a contiguous tensor, got strides {value.stride()} for shape {tuple(value.shape)}; "
                       "call .contiguous() on it")  # fmt: skip
        if value.stride(-1) != 1 and value.shape[-1] > 1:
            self._fail(f"{arg.name}: expected a contiguous last axis, got strides {value.stride()} for shape {tuple(value.shape)}")

    def _presence(self, values: Sequence[Any], bound: Bound) -> None:
        given = {arg.name: value is not None for arg, value in zip(self.args, values, strict=True)}
        storage = "kv:" + DTYPE_NAMES.get(bound.kv, "") if bound.kv is not None else ""
        for arg in self.args:
            if arg.when is not None:
                wanted = given.get(arg.when, arg.when == storage)
                if given[arg.name] and not wanted:
                    self._fail(f"{arg.name}: given, but it belongs to {arg.when}, which this call does not have; pass None")
                if wanted and not given[arg.name] and not arg.is_out:
                    self._fail(f"{arg.name}: missing, but this call has {arg.when}, which needs it")
            elif not given[arg.name] and not (arg.may_be_none or arg.is_out or (arg.is_scratch and not bound.kernel)):
                self._fail(f"{arg.name}: missing ({arg.text})")

    def _ranges(self, bound: Bound) -> None:
        for name, value in bound.dims.items():
            place = bound.source.get(name, "an inferred dim")
            dim = self.dims[name]
            if isinstance(dim, Derived):
                self._compare(name, value, place, f"{name} = {dim.expression}", dim.expression, bound, lambda a, b: a == b)
            elif isinstance(dim, Dim):
                self._compare(name, value, place, f"{name} >= {dim.lo}", dim.lo, bound, lambda a, b: a >= b)
                self._compare(name, value, place, f"{name} <= {dim.hi}", dim.hi, bound, lambda a, b: a <= b)
            elif isinstance(dim, Spec) and bound.kernel and value not in dim.values + dim.kernel:
                self._fail(f"{place}: {name}={value} has no kernel; kernels exist for {', '.join(map(str, dim.values))}")

    def _compare(
        self, name: str, value: int, place: str, rule: str, expression: int | str, bound: Bound, holds: Callable[[int, int], bool]
    ) -> None:
        if not names_in(expression) <= bound.dims.keys():
            return  # a dim that only an omitted argument has
        limit = evaluate(expression, bound.dims)
        if not holds(value, limit):
            expected = rule if rule.endswith(f" {limit}") else f"{rule} = {limit}"
            self._fail(f"{place}: expected {expected}, got {name}={value}")
