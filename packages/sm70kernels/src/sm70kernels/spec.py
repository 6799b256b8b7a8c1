"""The argument grammar of an op declaration.

    DTYPE[D1,D2,...] FLAGS    a tensor; an axis is a dim's name or an integer
    DTYPE device              a 0-d tensor: a scalar that stays on the device
    int | float | bool        a Python scalar
    enum a|b                  one of the listed strings
    dim NAME                  an int that binds the dim NAME

and `optional` after an enum or a dim: it may be None.

DTYPE is f32 f16 i32 i64 u8 i8, alternatives joined by `|`, or a storage class chosen per call: `act` (activation dtype, f32 or
f16, the same for every act argument of a call), `kv` (K/V cache: the activation dtype, or u8 codes, or i8 codes; one choice per
call) and `bank` (expert weights: the activation dtype).

FLAGS: `out` (written; allocated when omitted), `inout` (changed in place), `optional` (may be None), `scratch` (uninitialised
workspace of the kernel; the reference does not see it), `strided` (only the last axis must be contiguous; without it the whole
tensor), `aligned` (for a kernel, the address and every stride but the last are multiples of 16 bytes), `when=NAME` (given exactly
when argument NAME is), `when=kv:u8` (given exactly when the cache has that storage).
"""

import re
from dataclasses import dataclass

import torch

from sm70kernels.dims import DeclarationError

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "i8": torch.int8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ACTIVATIONS = (torch.float32, torch.float16)
KV_CODES = (torch.uint8, torch.int8)
CLASSES = ("act", "kv", "bank")
SCALARS = {"int": int, "float": float, "bool": bool}
FLAGS = {"out", "inout", "optional", "scratch", "device", "strided", "aligned"}

ALIGNMENT = 16
"""Bytes a lane reads at once: what `aligned` tensors are aligned to."""

_TENSOR = re.compile(r"(?P<dtype>[a-z0-9]+(?:\|[a-z0-9]+)*)(?:\[(?P<axes>[A-Za-z0-9_, ]*)\])?(?P<flags>(?: +[a-z0-9_=:]+)*)")
_AXIS = re.compile(r"[A-Z][A-Za-z0-9_]*|[0-9]+")


@dataclass(frozen=True)
class Arg:
    """One declared argument. `kind` is tensor, int, float, bool, enum or dim."""

    name: str
    text: str
    kind: str
    dtypes: tuple[str, ...] = ()
    axes: tuple[str | int, ...] = ()
    choices: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    when: str | None = None

    @property
    def is_tensor(self) -> bool:
        return self.kind == "tensor"

    @property
    def is_out(self) -> bool:
        return "out" in self.flags

    @property
    def is_inout(self) -> bool:
        return "inout" in self.flags

    @property
    def is_scratch(self) -> bool:
        return "scratch" in self.flags

    @property
    def may_be_none(self) -> bool:
        return "optional" in self.flags or self.when is not None

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the dims this argument binds."""
        if self.kind == "dim":
            return self.choices
        return tuple(axis for axis in self.axes if isinstance(axis, str))


def parse(name: str, text: str) -> Arg:
    """Return the argument that `text` declares. Raises DeclarationError naming the argument and the offending word."""
    words = text.split()
    if text in SCALARS:
        return Arg(name, text, text)
    if text.startswith(("enum ", "dim ")) and (len(words) == 2 or words[2:] == ["optional"]):
        flags = frozenset(words[2:])
        if words[0] == "enum":
            return Arg(name, text, "enum", choices=tuple(words[1].split("|")), flags=flags)
        if not _AXIS.fullmatch(words[1]) or words[1].isdigit():
            raise DeclarationError(f"argument {name}: {words[1]!r} is not a dim's name (a capital letter first)")
        return Arg(name, text, "dim", choices=(words[1],), flags=flags)
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise DeclarationError(f"argument {name}: cannot read {text!r}; the forms are in the docstring of sm70kernels.spec")
    return _tensor(name, text, match)


def _tensor(name: str, text: str, match: re.Match[str]) -> Arg:
    dtypes = tuple(match["dtype"].split("|"))
    for dtype in dtypes:
        if dtype not in DTYPES and dtype not in CLASSES:
            raise DeclarationError(f"argument {name}: unknown dtype {dtype!r}; known are {', '.join([*DTYPES, *CLASSES])}")
    flags: set[str] = set()
    when = None
    for word in match["flags"].split():
        if word.startswith("when="):
            when = word.removeprefix("when=")
        elif word in FLAGS:
            flags.add(word)
        else:
            raise DeclarationError(f"argument {name}: unknown flag {word!r}; known are {', '.join(sorted(FLAGS))} and when=")
    if len(flags & {"out", "inout", "scratch"}) > 1:
        raise DeclarationError(f"argument {name}: out, inout and scratch exclude each other in {text!r}")
    if (match["axes"] is None) != ("device" in flags):
        raise DeclarationError(f"argument {name}: {text!r} needs either axes ([M,K]) or the flag `device` (a 0-d tensor)")
    axes: list[str | int] = []
    for axis in (match["axes"] or "").replace(" ", "").split(",") if match["axes"] else ():
        if not _AXIS.fullmatch(axis):
            raise DeclarationError(f"argument {name}: axis {axis!r} is neither a dim's name (a capital letter first) nor an integer")
        axes.append(int(axis) if axis.isdigit() else axis)
    return Arg(name, text, "tensor", dtypes=dtypes, axes=tuple(axes), flags=frozenset(flags), when=when)
