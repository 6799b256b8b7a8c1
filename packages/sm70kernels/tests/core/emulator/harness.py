"""Runs one PTX instruction per lane on arrays of operands and compares every result with an independent formula.

An instruction's text names its operands %a %b %c %e and its results %d %q (then %d2, %d3, ...). Scratch registers: predicates %p0-%p7,
16-bit %h0-%h7, 32-bit %r0-%r7, 64-bit %l0-%l7. All operand registers are untyped (.b16 .b32 .b64), predicates excepted.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sm70kernels.emulator import emulate

from .operands import bits_of, operands
from .softfloat import FORMATS, ordinal

HEAD = ".version 8.7\n.target sm_70\n.address_size 64\n"
LANES = 128
Formula = Callable[..., int | tuple[int, ...]]


class Row(NamedTuple):
    """A line of an instruction table.

    `results` and `operands` are kinds separated by spaces. `formula` maps operand bit patterns to result bit patterns.
    Results of a floating-point kind may be any NaN where the formula gives one; `ulps` is how many representable numbers a
    result may lie off, and `close` replaces the comparison altogether.
    """

    text: str
    results: str
    operands: str
    formula: Formula
    ulps: int = 0
    close: Callable[[int, int], bool] | None = None


def ids(rows: Sequence[Row]) -> list[str]:
    """Test ids: the instruction texts."""
    return [row.text.replace("\n", " ") for row in rows]


def entry(parameters: str, body: str, outside: str = "", name: str = "probe") -> str:
    """A module of one kernel with the scratch registers declared; `parameters` such as "u64 out, u32 n"."""
    declared = ", ".join(f".param .{p.split()[0]} {p.split()[1]}" for p in parameters.split(", ") if p)
    scratch = ".reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b64 %l<8>; .reg .f32 %f<8>; .reg .f64 %fd<8>;"
    return f"{HEAD}{outside}\n.visible .entry {name}({declared})\n{{\n{scratch}\n{body}\nret;\n}}\n"


def module(text: str, results: Sequence[str], kinds: Sequence[str]) -> str:
    """PTX that applies `text` to row i of its operand arrays in lane i."""
    lines = [".reg .b32 %i, %n; .reg .b64 %at, %wide;"]
    lines += ["mov.u32 %i, %ctaid.x;", "mov.u32 %n, %ntid.x;", "mov.u32 %r0, %tid.x;", "mad.lo.u32 %i, %i, %n, %r0;"]
    lines += ["ld.param.u32 %n, [count];", "setp.ge.u32 %p0, %i, %n;", "@%p0 bra DONE;"]
    names = [*zip(operand_names(kinds), kinds, strict=True)]
    for index, (name, kind) in enumerate(names):
        register = ".pred" if kind == "pred" else f".b{bits_of(kind)}"
        lines += [f".reg {register} {name};", f"ld.param.u64 %at, [in{index}];", f"mul.wide.u32 %wide, %i, {bits_of(kind) // 8};"]
        lines.append("add.u64 %at, %at, %wide;")
        if kind == "pred":
            lines += ["ld.global.u32 %r0, [%at];", f"setp.ne.u32 {name}, %r0, 0;"]
        else:
            lines.append(f"ld.global.b{bits_of(kind)} {name}, [%at];")
    for name, kind in zip(result_names(results), results, strict=True):
        lines.append(f".reg {'.pred' if kind == 'pred' else f'.b{bits_of(kind)}'} {name};")
    lines.append(text)
    for index, (name, kind) in enumerate(zip(result_names(results), results, strict=True)):
        lines += [f"ld.param.u64 %at, [out{index}];", f"mul.wide.u32 %wide, %i, {bits_of(kind) // 8};", "add.u64 %at, %at, %wide;"]
        if kind == "pred":
            lines += [f"selp.u32 %r0, 1, 0, {name};", "st.global.u32 [%at], %r0;"]
        else:
            lines.append(f"st.global.b{bits_of(kind)} [%at], {name};")
    lines.append("DONE:")
    parameters = [f"u64 in{i}" for i in range(len(kinds))] + [f"u64 out{i}" for i in range(len(results))]
    return entry(", ".join([*parameters, "u32 count"]), "\n".join(lines))


def operand_names(kinds: Sequence[str]) -> list[str]:
    return ["%a", "%b", "%c", "%e"][: len(kinds)]


def result_names(kinds: Sequence[str]) -> list[str]:
    return ["%d", "%q", *(f"%d{i}" for i in range(2, len(kinds)))][: len(kinds)]


def execute(text: str, results: str, kinds: str, rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Results of `text` for every row of operands, as bit patterns."""
    out, into = results.split(), kinds.split()
    columns = [np.array(column, f"u{bits_of(kind) // 8}") for column, kind in zip(zip(*rows, strict=True), into, strict=True)]
    outputs = [np.zeros(len(rows), f"u{bits_of(kind) // 8}") for kind in out]
    emulate(module(text, out, into), "probe", -(-len(rows) // LANES), LANES, *columns, *outputs, len(rows))
    return list(zip(*(column.tolist() for column in outputs), strict=True))


def agree(kind: str, got: int, wanted: int, ulps: int = 0) -> bool:
    """Equal bits, or two NaNs of a floating-point kind, or numbers at most `ulps` apart."""
    if kind == "f16x2":
        return all(agree("f16", got >> s & 0xFFFF, wanted >> s & 0xFFFF, ulps) for s in (0, 16))
    if got == wanted:
        return True
    form = FORMATS.get(kind)
    if form is None:
        return False
    if form.is_nan(got) or form.is_nan(wanted):
        return form.is_nan(got) and form.is_nan(wanted)
    return abs(ordinal(form, got) - ordinal(form, wanted)) <= ulps and ulps > 0


def check(row: Row, rows: Sequence[tuple[int, ...]] | None = None) -> None:
    """Assert that a table's line holds for `rows` of operands, by default the crossed edge values and random ones of its kinds."""
    rows = operands(row.operands.split()) if rows is None else rows
    kinds = row.results.split()
    wrong = []
    for values, got in zip(rows, execute(row.text, row.results, row.operands, rows), strict=True):
        answer = row.formula(*values)
        wanted = answer if isinstance(answer, tuple) else (answer,)
        if row.close is not None:
            good = all(map(row.close, got, wanted))
        else:
            good = all(agree(kind, g, w, row.ulps) for kind, g, w in zip(kinds, got, wanted, strict=True))
        if not good:
            wrong.append(f"({', '.join(map(hex, values))}) -> {', '.join(map(hex, got))}, not {', '.join(map(hex, wanted))}")
    assert not wrong, f"{row.text}: {len(wrong)} of {len(rows)} rows differ: " + "; ".join(wrong[:6])
