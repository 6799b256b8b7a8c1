"""mma.sync.m8n8k4: four independent 8 x 8 x 4 products a warp, one for each quad-pair.

Quad-pair q is lanes 4q..4q+3 and 16+4q..16+4q+3. With u = lane & 3, h = lane >= 16 and element i of a lane's fragment:

    A row-major   row u + 4h, column i          A column-major   row i + 4h, column u
    B column      row i, column u + 4h          B row-major      row u, column i + 4h
    C, D f16      row u + 4h, column i
    C, D f32      row (u & 1) + (i & 2) + 4h, column (i & 4) + (u & 2) + (i & 1)

Products and their sum with C are exact in double precision and rounded once to the type of D. Hardware truncates aligned sums, so its
last bits differ. Source: PTX ISA 8.7, section 9.7.14.5.1.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import Emitter, handles, helper
from sm70kernels.emulator.faults import DEADLOCK
from sm70kernels.emulator.group import Group
from sm70kernels.emulator.rounding import HALVES, canonical, canonical_half
from sm70kernels.emulator.syntax import Instruction

if TYPE_CHECKING:
    from sm70kernels.emulator.machine import Machine

Array = NDArray[Any]

# Axes of a fragment as it lies in registers: warp, h, q, u, i. Each entry orders them as warp, q, row, column.
INPUTS = {("a", "row"): (0, 2, 1, 3, 4), ("a", "col"): (0, 2, 1, 4, 3), ("b", "col"): (0, 2, 4, 1, 3), ("b", "row"): (0, 2, 3, 1, 4)}
HALF = (0, 2, 1, 3, 4)
# Axes of a float32 fragment: warp, h, q, u1, u0, i2, i1, i0; rows are h i1 u0, columns i2 u1 i0.
SINGLE = (0, 2, 1, 6, 4, 5, 3, 7)
SINGLE_BACK = tuple(int(axis) for axis in np.argsort(SINGLE))


def _words(group: Group, registers: list[Array]) -> Array:
    """[n] each -> [n, len]: the registers of a fragment side by side."""
    out = np.empty((group.n, len(registers)), registers[0].dtype)
    for place, register in enumerate(registers):
        out[:, place] = register
    return out


def _operand(group: Group, name: str, layout: str, registers: list[Array]) -> Array:
    """Return [warps, 4, 8, 4] of A or [warps, 4, 4, 8] of B in float32."""
    halves = HALVES[_words(group, registers).view(np.uint16)].reshape(-1, 2, 4, 4, 4)
    return halves.transpose(INPUTS[name, layout]).reshape(-1, 4, *((8, 4) if name == "a" else (4, 8)))


def _accumulator(group: Group, registers: list[Array]) -> Array:
    """Return [warps, 4, 8, 8] of C in float64."""
    words = _words(group, registers)
    if len(registers) == 4:
        return HALVES[words.view(np.uint16)].reshape(-1, 2, 4, 4, 8).transpose(HALF).reshape(-1, 4, 8, 8).astype(np.float64)
    single = words.view(np.float32).reshape(-1, 2, 4, 2, 2, 2, 2, 2)
    return single.transpose(SINGLE).astype(np.float64).reshape(-1, 4, 8, 8)


@helper
def multiply_matrices(machine: "Machine", group: Group, layouts: tuple[str, str], single: bool, instruction: Instruction,
                      a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:  # fmt: skip
    """Return the registers of D: eight float32 (as their bits) if `single`, else four pairs of float16."""
    if not group.full:
        position = int(group.starts[int(np.argmin(group.counts))])
        detail = f"{instruction.parts[0]}.sync is executed by {int(group.counts.min())} lanes of a warp; all 32 must take part"
        raise machine.fault(DEADLOCK, instruction, detail, int(group.lanes[position]))
    x, y = _operand(group, "a", layouts[0], a), _operand(group, "b", layouts[1], b)
    total = _accumulator(group, c)
    for k in range(4):
        total += x[..., :, k, None] * y[..., k, None, :]  # exact in float32: 22 bits
    if single:
        result = canonical(total.astype(np.float32)).reshape(-1, 4, 2, 2, 2, 2, 2, 2).transpose(SINGLE_BACK).reshape(-1, 8)
        words = result.view(np.uint32)
    else:
        halves = canonical_half(total.astype(np.float16)).reshape(-1, 4, 2, 4, 8).transpose(0, 2, 1, 3, 4).reshape(-1, 8)
        words = halves.view(np.uint32)
    return [np.ascontiguousarray(words[:, place]) for place in range(words.shape[1])]


@handles("mma")
def emit_mma(e: Emitter, i: Instruction) -> None:
    if i.parts[1:4] != ("sync", "aligned", "m8n8k4") or len(i.parts) != 10 or len(i.operands) != 4:
        raise i.unknown("mma is mma.sync.aligned.m8n8k4.alayout.blayout.dtype.f16.f16.ctype")
    a_layout, b_layout, d_type, a_type, b_type, c_type = i.parts[4:]
    if {a_layout, b_layout} - {"row", "col"} or (a_type, b_type) != ("f16", "f16") or {d_type, c_type} - {"f16", "f32"}:
        raise i.unknown("layouts are row and col, inputs f16, accumulators f16 or f32")
    if (d_type, c_type) == ("f16", "f32"):
        raise i.unknown("an f32 addend needs an f32 result")
    sizes = {"f16": 4, "f32": 8}
    if tuple(len(operand.inner) for operand in i.operands) != (sizes[d_type], 2, 2, sizes[c_type]):
        raise i.unknown("the fragments have other sizes")
    d, *inputs = i.operands
    texts = ["[" + ", ".join(e.value(word, "b32") for word in operand.inner) + "]" for operand in inputs]
    e.emit(f"join(M, G, {e.integer(-1, 'b32')}, {e.share('I', i)})")
    result = e.temporary(f"multiply_matrices(M, G, {(a_layout, b_layout)}, {d_type == 'f32'}, {e.share('I', i)}, {', '.join(texts)})")
    for place, target in enumerate(d.inner):
        e.set(target, "b32", f"{result}[{place}]")
