"""setp set selp slct: comparison and selection. Source: PTX ISA 8.7, sections 9.7.5 and 9.7.6.

For floats eq ne lt le gt ge are false when an operand is NaN, and equ neu ltu leu gtu geu are true then; num and nan test for NaN.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import Emitter, expect, form, handles, helper
from sm70kernels.emulator.logic import OPERATORS
from sm70kernels.emulator.syntax import Instruction

Array = NDArray[Any]

SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
COMPARISONS = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan"
FLOATS = ("f16", "f16x2", "f32", "f64")


@helper
def unordered(a: Array, b: Array) -> Array:
    """True where a or b is NaN."""
    result: Array = np.isnan(a) | np.isnan(b)
    return result


def comparison(e: Emitter, i: Instruction, name: str, kind: str, a: str, b: str) -> str:
    """Return the expression of one comparison."""
    floating = kind in FLOATS
    if name in ("num", "nan"):
        if not floating:
            raise i.unknown(f".{name} compares floats")
        return f"unordered({a}, {b})" if name == "nan" else f"~unordered({a}, {b})"
    if name in SIGNS:
        if (name in ("lo", "ls", "hi", "hs") and kind[0] != "u" and kind[0] != "b") or (kind[0] == "b" and name not in ("eq", "ne")):
            raise i.unknown(f".{name} does not compare .{kind}")
        text = f"({a} {SIGNS[name]} {b})"
        return f"({text} & ~unordered({a}, {b}))" if floating and name == "ne" else text
    if not floating:
        raise i.unknown(f".{name} compares floats")
    if name == "neu":
        return f"({a} != {b})"
    return f"({a} {SIGNS[name[:2]]} {b}) | unordered({a}, {b})"


def _parts(i: Instruction, types: int) -> tuple[frozenset[str], tuple[str, ...], str, str]:
    """Return (other modifiers, types, comparison, boolean operator or "")."""
    modifiers, kinds = form(i, f"{COMPARISONS} and or xor ftz", types=types)
    name = modifiers & set(COMPARISONS.split())
    combine = modifiers & set(OPERATORS)
    if len(name) != 1 or len(combine) > 1:
        raise i.unknown("one comparison and at most one boolean operator are needed")
    return modifiers, kinds, next(iter(name)), next(iter(combine), "")


def _values(e: Emitter, i: Instruction, kind: str, modifiers: frozenset[str]) -> tuple[str, str]:
    a, b = (e.value(operand, kind) for operand in i.operands[1:3])
    if "ftz" not in modifiers:
        return a, b
    if kind == "f32":
        return f"flush({a})", f"flush({b})"
    if kind in ("f16", "f16x2"):
        return f"flush_half({a})", f"flush_half({b})"
    raise i.unknown(f"no .ftz of .{kind}")


@handles("setp")
def emit_predicate(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,), name, combine = _parts(i, 1)
    expect(i, 4 if combine else 3)
    if kind in ("pred", "b8", "u8", "s8"):
        raise i.unknown(f"no setp of .{kind}")
    a, b = _values(e, i, kind, modifiers)
    result = e.temporary(comparison(e, i, name, kind, a, b))
    third = e.temporary(e.value(i.operands[3], "pred")) if combine else None
    targets = i.operands[0].inner or (i.operands[0],)
    if kind == "f16x2":
        if len(targets) != 2:
            raise i.unknown("setp of f16x2 has two destinations")
        results = [f"{result}[:, {place}]" for place in (0, 1)]
    else:
        results = [result, f"~{result}"]
    for target, text in zip(targets, results, strict=False):
        if target.kind == "sink":
            continue
        e.set(target, "pred", f"{text} {OPERATORS[combine]} {third}" if third else f"{text}.copy()" if text == result else text)


@handles("set")
def emit_set(e: Emitter, i: Instruction) -> None:
    modifiers, (to, kind), name, combine = _parts(i, 2)
    expect(i, 4 if combine else 3)
    a, b = _values(e, i, kind, modifiers)
    text = comparison(e, i, name, kind, a, b)
    if combine:
        third = e.value(i.operands[3], "pred")
        text = f"({text}) {OPERATORS[combine]} {third}" + (".reshape(-1, 1)" if kind == "f16x2" else "")
    if kind == "f16x2" and to in ("u32", "s32"):
        e.set(i.operands[0], "u32", f"where({text}, u2.type(65535), u2.type(0)).view(u4).reshape(-1)")
        return
    if (kind == "f16x2") != (to == "f16x2") or to not in ("u32", "s32", "f32", "f16", "f16x2", "u16", "s16"):
        raise i.unknown(f"no set of .{kind} to .{to}")
    if to in ("f32", "f16", "f16x2"):
        e.set(i.operands[0], to, f"({text}).astype({'f4' if to == 'f32' else 'f2'})")
    else:
        e.set(i.operands[0], to, f"where({text}, {e.integer(-1, to)}, {e.integer(0, to)})")


@handles("selp")
def emit_selection(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, a, b, condition = expect(i, 4)
    if kind == "pred" or kind in ("f16", "f16x2", "b8", "u8", "s8"):
        raise i.unknown(f"no selp of .{kind}")
    e.set(dst, kind, f"where({e.value(condition, 'pred')}, {e.value(a, kind)}, {e.value(b, kind)})")


@handles("slct")
def emit_sign_selection(e: Emitter, i: Instruction) -> None:
    modifiers, (kind, by) = form(i, "ftz", types=2)
    dst, a, b, c = expect(i, 4)
    if by not in ("s32", "f32") or (modifiers and by != "f32"):
        raise i.unknown("slct selects by s32 or f32")
    sign = e.value(c, by)
    sign = f"flush({sign})" if modifiers else sign
    e.set(dst, kind, f"where({sign} >= 0, {e.value(a, kind)}, {e.value(b, kind)})")
