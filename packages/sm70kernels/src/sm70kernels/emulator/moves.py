"""mov, packing and unpacking vectors, and cvta between generic and other addresses. Source: PTX ISA 8.7, sections 9.7.9.4 and 9.7.9.20."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import CLOCKS, CODES, SPECIAL, Emitter, expect, form, handles, helper
from sm70kernels.emulator.syntax import WIDTHS, Instruction

Array = NDArray[Any]

WINDOWS = {"global": 0, "const": 0, "shared": 1 << 52, "local": 1 << 53, "param": 1 << 54}
"""Where the address window of a state space begins in generic addresses; each is 2^40 bytes long, and global memory is all the rest."""


@helper
def pack(*parts: Array) -> Array:
    """Join values of equal width into one word, first part lowest: [n] each -> [n]."""
    first = parts[0]
    out = np.empty((max(part.size for part in parts), len(parts)), first.dtype)
    for place, part in enumerate(parts):
        out[:, place] = part
    return out.view(f"u{first.dtype.itemsize * len(parts)}").reshape(-1)


@handles("mov")
def emit_move(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    dst, source = expect(i, 2)
    if source.kind == "vec":
        width, rest = divmod(WIDTHS[kind], len(source.inner))
        if rest or kind[0] != "b":
            raise i.unknown(f"{len(source.inner)} parts do not make a .{kind}")
        parts = ", ".join(e.value(part, f"b{8 * width}") for part in source.inner)
        e.set(dst, kind, f"pack({parts})")
    elif dst.kind == "vec":
        width, rest = divmod(WIDTHS[kind], len(dst.inner))
        if rest or kind[0] != "b":
            raise i.unknown(f"a .{kind} has no {len(dst.inner)} parts")
        word = e.temporary(e.value(source, kind))
        for place, part in enumerate(dst.inner):
            if part.kind != "sink":
                shifted = f"({word} >> {e.integer(8 * width * place, kind)})" if place else word
                e.set(part, f"b{8 * width}", f"{shifted}.astype(u{width})")
    elif source.kind == "name" and source.text in SPECIAL | CLOCKS:
        special = SPECIAL.get(source.text) or CLOCKS[source.text]
        if CODES[kind][1:] != special[1:]:
            raise i.unknown(f"{source.text} has {special[1:]} bytes")
        e.set(dst, kind, e.value(source, kind), fresh=False)
    else:
        e.set(dst, kind, e.value(source, kind), fresh=False)


@handles("cvta")
def emit_address(e: Emitter, i: Instruction) -> None:
    spaces = [part for part in i.parts[1:] if part in WINDOWS]
    modifiers, (kind,) = form(i, "to global const shared local param shared::cta")
    spaces += ["shared"] if "shared::cta" in modifiers else []
    dst, source = expect(i, 2)
    if kind != "u64" or len(spaces) != 1:
        raise i.unknown("cvta is cvta{.to}.space.u64")
    window = WINDOWS[spaces[0]]
    value = e.value(source, kind)
    if window:
        e.set(dst, kind, f"{value} {'-' if 'to' in modifiers else '+'} {e.integer(window, kind)}")
    else:
        e.set(dst, kind, value, fresh=False)
