"""atom and red: add min max inc dec and or xor exch cas on every type SM70 has. Source: PTX ISA 8.7, sections 9.7.13.5 and 9.7.13.6.

Lanes of one instruction that meet at one address take turns in lane order, so old values, sums of floats included, are those of one
definite order. Lanes are sorted by address and served in rounds: the first of every address, then the second, and so on; integer sums
and extremes, whose old values nobody reads, go in one step.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import CODES, DTYPES, Emitter, handles
from sm70kernels.emulator.loads import CACHING, SCOPES, address_of, site_of
from sm70kernels.emulator.rounding import canonical, canonical_half
from sm70kernels.emulator.syntax import WIDTHS, Instruction

Array = NDArray[Any]

TYPES = {
    "add": "u32 s32 u64 f32 f64 f16 f16x2", "min": "u32 s32 u64 s64", "max": "u32 s32 u64 s64", "inc": "u32", "dec": "u32",
    "and": "b32 b64", "or": "b32 b64", "xor": "b32 b64", "exch": "b32 b64", "cas": "b16 b32 b64",
}  # fmt: skip
"""Operations and the types each exists for on SM70."""


def _add(old: Array, value: Array, _: Array | None) -> Array:
    total: Array = old + value
    if total.dtype == np.float32:
        return canonical(total)
    return canonical_half(total) if total.dtype == np.float16 else total


OPERATIONS: dict[str, Callable[[Array, Array, Array | None], Array]] = {
    "add": _add,
    "min": lambda old, value, _: np.minimum(old, value),
    "max": lambda old, value, _: np.maximum(old, value),
    "and": lambda old, value, _: old & value,
    "or": lambda old, value, _: old | value,
    "xor": lambda old, value, _: old ^ value,
    "exch": lambda old, value, _: value,
    "inc": lambda old, value, _: np.where(old >= value, np.uint32(0), old + np.uint32(1)),
    "dec": lambda old, value, _: np.where((old == 0) | (old > value), value, old - np.uint32(1)),
    "cas": lambda old, value, new: np.where(old == value, new, old) if new is not None else old,
}
AT_ONCE: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
                           "xor": np.bitwise_xor}  # fmt: skip


def _columns(value: Array, kind: str) -> Array:
    """Words as numbers: f16x2 becomes [n, 2] of float16."""
    return value.view(np.float16).reshape(-1, 2) if kind == "f16x2" else value.view(DTYPES[CODES[kind]])


def perform(words: Array, index: Array, operation: str, kind: str, value: Array, new: Array | None, wanted: bool) -> Array:
    """Apply the operation to words[index] in lane order and return the old words (meaningless if not `wanted`)."""
    if not wanted and operation in AT_ONCE and kind[0] != "f":
        AT_ONCE[operation].at(words.view(DTYPES[CODES[kind]]), index, value.view(DTYPES[CODES[kind]]))
        return value
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sizes = np.diff(starts, append=len(order))
    old = np.empty_like(value)
    combine = OPERATIONS[operation]
    for turn in range(int(sizes.max())):
        lanes = order[starts[sizes > turn] + turn]
        there = words[index[lanes]]
        old[lanes] = there
        operand = None if new is None else _columns(new[lanes], kind)
        result = combine(_columns(there, kind), _columns(value[lanes], kind), operand)
        words[index[lanes]] = np.ascontiguousarray(result).view(words.dtype).reshape(-1)
    return old


@handles("atom", "red")
def emit_atomic(e: Emitter, i: Instruction) -> None:
    *rest, kind = i.parts[1:]
    ftz_ok = [part for part in rest if part == "noftz"]
    rest = [part for part in rest if part != "noftz"]
    spaces = [part.removesuffix("::cta") for part in rest if part.removesuffix("::cta") in ("global", "shared")]
    operations = [part for part in rest if part in TYPES]
    orders = [part for part in rest if part in ("relaxed", "acquire", "release", "acq_rel")]
    others = [part for part in rest if part.removesuffix("::cta") not in ("global", "shared") and part not in (*operations, *orders)]
    for part in others:
        if part not in SCOPES | (CACHING - {"nc"}):
            raise i.unknown(f"modifier .{part} of {i.base} is not implemented")
    if len(operations) != 1 or len(spaces) > 1 or len(orders) > 1 or kind not in TYPES[operations[0]].split():
        raise i.unknown("no such atomic on SM70")
    operation = operations[0]
    if bool(ftz_ok) != (kind in ("f16", "f16x2")):
        raise i.unknown(".noftz belongs to f16 and f16x2")
    operands = list(i.operands)
    dst = operands.pop(0) if i.base == "atom" else None
    if len(operands) != (3 if operation == "cas" else 2) or (i.base == "red" and operation in ("exch", "cas")):
        raise i.unknown("wrong operands")
    space = spaces[0] if spaces else "generic"
    order = orders[0] if orders else "relaxed"
    site = site_of(e, i, operands[0], WIDTHS[kind], 1, space, strong=True, acquire="acq" in order, release=order in ("release", "acq_rel"))
    plain = f"b{8 * WIDTHS[kind]}"
    values = [e.value(word, kind if word.kind == "imm" else plain) for word in operands[1:]]
    values = [f"{text}.view(u{WIDTHS[kind]})" if word.kind == "imm" else text for text, word in zip(values, operands[1:], strict=True)]
    wanted = dst is not None and dst.kind != "sink"
    new = values[1] if len(values) > 1 else "None"
    where = f"G, {site}, {address_of(e, operands[0])}"
    old = e.temporary(f"M.access.atomic_{space}({where}, {operation!r}, {kind!r}, {values[0]}, {new}, {wanted})")
    if wanted and dst is not None:
        e.set(dst, plain, old)
