"""Arithmetic of f16 and f16x2: add sub mul fma abs neg.

Sums and products of float16 are exact in float32, so NumPy's half arithmetic (through float32) rounds once; the fused product goes
through float64. Source: PTX ISA 8.7, section 9.7.4; the forms that need SM75 or later (min, max, ex2, tanh, relu) do not exist here.
"""

from sm70kernels.emulator.emitter import Emitter, expect, form, handles
from sm70kernels.emulator.syntax import Instruction


def _finish(e: Emitter, i: Instruction, kind: str, text: str, modifiers: frozenset[str]) -> None:
    if "ftz" in modifiers:
        text = f"flush_half({text})"
    text = f"saturate({text})" if "sat" in modifiers else f"canonical_half({text})"
    e.set(i.operands[0], kind, text)


@handles("add", "sub", "mul", "fma", kinds="half")
def emit_arithmetic(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "rn ftz sat")
    _, *operands = expect(i, 4 if i.base == "fma" else 3)
    values = [e.value(operand, kind) for operand in operands]
    if "ftz" in modifiers:
        values = [f"flush_half({value})" for value in values]
    if "ftz" in modifiers and i.base in ("mul", "fma"):
        text = f"multiply_flushed_half({', '.join([*values, 'None'][:3])})"
    elif i.base == "fma":
        text = f"fma_half({', '.join(values)})"
    else:
        text = f"({values[0]} {dict(add='+', sub='-', mul='*')[i.base]} {values[1]})"
    _finish(e, i, kind, text, modifiers)


@handles("abs", "neg", kinds="half")
def emit_sign(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "ftz")
    dst, a = expect(i, 2)
    value = e.value(a, kind)
    if "ftz" in modifiers:
        value = f"flush_half({value})"
    e.set(dst, kind, f"canonical_half({'abs(' if i.base == 'abs' else '-('}{value}))")
