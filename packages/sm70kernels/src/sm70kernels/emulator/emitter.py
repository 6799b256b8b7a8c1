"""The writer of generated Python: registers become local variables, operands become NumPy expressions.

A value is an array over the lanes of the running group, or an array of one element when it is the same in all of them: NumPy's
broadcasting makes both work in the same expression, so loop counters and base addresses cost next to nothing.
"""

import struct
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from sm70kernels.emulator.syntax import WIDTHS, Instruction, Operand

CODES = {"b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2", "b32": "u4", "u32": "u4",
         "s32": "i4", "f32": "f4", "f16x2": "u4", "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8", "pred": "bool"}  # fmt: skip
"""NumPy type (as named in generated code) that a PTX type is computed in."""

STORED = {**{name: f"u{width}" for name, width in WIDTHS.items()}, "f32": "f4", "f64": "f8", "pred": "bool"}
"""NumPy type in which a register of a PTX type is kept: unsigned, except float and predicate registers."""

DTYPES: dict[str, Any] = {code: np.dtype(code) for code in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")}
DTYPES["bool"] = np.dtype(bool)

SPECIAL = {
    **{f"%{name}.{axis}": "u4" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"},
    **{f"%lanemask_{name}": "u4" for name in ("eq", "le", "lt", "ge", "gt")},
    **dict.fromkeys(("%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid", "%dynamic_smem_size", "%total_smem_size"), "u4"),
    "%gridid": "u8",
}
"""Special registers that keep their value during a launch."""

CLOCKS = {"%clock": "u4", "%clock_hi": "u4", "%clock64": "u8", "%globaltimer": "u8", "%globaltimer_lo": "u4", "%globaltimer_hi": "u4"}
"""Special registers that change while a kernel runs."""


def parse_number(text: str, type_name: str) -> int | float:
    """Return the value of an immediate of PTX type `type_name`. Raises ValueError when it is no number of that kind."""
    lowered = text.lower()
    if lowered.startswith("0f"):
        return float(struct.unpack(">f", bytes.fromhex(lowered[2:]))[0])
    if lowered.startswith("0d"):
        return float(struct.unpack(">d", bytes.fromhex(lowered[2:]))[0])
    if type_name in ("f32", "f64", "f16"):
        return float(text)
    digits = lowered.rstrip("u")
    negative, digits = digits.startswith("-"), digits.lstrip("-")
    if digits.startswith("0") and len(digits) > 1 and digits[1].isdigit():
        value = int(digits, 8)
    else:
        value = int(digits, 0)
    return -value if negative else value


def constant(text: str, type_name: str) -> Any:
    """Return the one-element array of an immediate, in the type it is computed in."""
    code = CODES[type_name]
    if text.lower().startswith("0f") and code == "f4":
        return np.array([int(text[2:], 16)], np.uint32).view(np.float32)
    if text.lower().startswith("0d") and code == "f8":
        return np.array([int(text[2:], 16)], np.uint64).view(np.float64)
    value = parse_number(text, type_name)
    if code == "bool":
        return np.array([bool(value)])
    if code.startswith("f"):
        return np.array([value], DTYPES[code])
    if not isinstance(value, int):  # a float literal used as bits: mov.b32 %r1, 0f3F800000
        value = int(text[2:], 16)
    width = 8 * DTYPES[code].itemsize
    return np.array([value & ((1 << width) - 1)], f"u{width // 8}").view(DTYPES[code])


class Emitter:
    """Code of one basic block (or a chain of them).

    `registers`: name -> (index, stored type). `symbols`: variable name -> address. `names`: the globals of the generated code,
    into which constants are put. After emission, `reads` are the registers needed from before, `writes` those that changed.
    """

    def __init__(self, registers: dict[str, tuple[int, str]], symbols: dict[str, int], names: dict[str, Any]) -> None:
        self.registers = registers
        self.symbols = symbols
        self.names = names
        self.lines: list[str] = []
        self.reads: set[int] = set()
        self.writes: dict[int, bool] = {}
        self.instruction: Instruction | None = None
        self.count = 0

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def temporary(self, expression: str) -> str:
        self.count += 1
        self.lines.append(f"t{self.count} = {expression}")
        return f"t{self.count}"

    def share(self, prefix: str, value: object) -> str:
        """Put an object into the globals of the generated code and return its name."""
        name = f"{prefix}{len(self.names)}"
        self.names[name] = value
        return name

    def constant(self, text: str, type_name: str) -> str:
        name = f"K_{type_name}_{''.join(c if c.isalnum() else '_' for c in text)}"
        if name not in self.names:
            try:
                self.names[name] = constant(text, type_name)
            except ValueError:
                raise self.unknown(f"immediate {text} of type .{type_name}") from None
        return name

    def integer(self, value: int, type_name: str) -> str:
        return self.constant(str(value), type_name)

    def unknown(self, why: str) -> Exception:
        assert self.instruction is not None
        return self.instruction.unknown(why)

    def register(self, name: str) -> tuple[int, str]:
        if name not in self.registers:
            raise self.unknown(f"{name} is not a register, symbol or special register the emulator knows")
        return self.registers[name]

    def read(self, index: int) -> str:
        if index not in self.writes:
            self.reads.add(index)
        return f"r{index}"

    def value(self, operand: Operand, type_name: str) -> str:
        """An expression of the operand in the NumPy type of `type_name`; f16x2 values have shape [n, 2]."""
        if type_name == "f16x2":
            if operand.kind == "imm":
                return f"{self.constant(operand.text, 'b32')}.view(f2).reshape(-1, 2)"
            return f"{self.value(operand, 'b32')}.view(f2).reshape(-1, 2)"
        code = CODES[type_name]
        if operand.kind == "imm":
            return self.constant(operand.text, type_name)
        if operand.kind == "name" and operand.text == "WARP_SZ":
            return self.constant("32", type_name)
        if operand.kind == "name" and operand.text in self.symbols:
            return self.integer(self.symbols[operand.text] + operand.offset, type_name)
        if operand.kind == "name" and operand.text in CLOCKS:
            return self._convert(f"M.clock('{operand.text}')", CLOCKS[operand.text], code)
        if operand.kind not in ("reg", "name"):
            raise self.unknown(f"operand {operand.text} of kind {operand.kind} where a value is needed")
        index, stored = self.register(operand.text)
        name = self.read(index)
        if operand.negated:
            if stored != "bool":
                raise self.unknown(f"!{operand.text} of a register that is no predicate")
            name = f"~{name}"
        return self._convert(name, stored, code)

    def _convert(self, name: str, stored: str, code: str) -> str:
        if stored == code:
            return name
        if "bool" in (stored, code):
            raise self.unknown(f"a predicate and a value are mixed ({stored}, {code})")
        have, want = DTYPES[stored].itemsize, DTYPES[code].itemsize
        if have == want:
            return f"{name}.view({code})"
        if have > want:
            if stored[0] == "f":
                raise self.unknown("a float register is read in part")
            narrow = f"{name}.astype(u{want})"
            return narrow if code == f"u{want}" else f"{narrow}.view({code})"
        raise self.unknown(f"a register of {8 * have} bits is read as {8 * want} bits")

    def set(self, operand: Operand, type_name: str, expression: str, *, fresh: bool = True) -> None:
        """Assign to a register. `expression` has the NumPy type of `type_name`; not `fresh` when it may share a register's memory."""
        if operand.kind == "sink":
            self.emit(f"{expression}")
            return
        if operand.kind != "reg":
            raise self.unknown(f"destination {operand.text} is no register")
        index, stored = self.register(operand.text)
        code = CODES[type_name]
        if type_name == "f16x2":
            expression, code = f"({expression}).view(u4).reshape(-1)", "u4"
        if stored != code:
            if "bool" in (stored, code):
                raise self.unknown(f"a predicate and a value are mixed ({stored}, {code})")
            have, want = DTYPES[code].itemsize, DTYPES[stored].itemsize
            if have == want:
                expression = f"({expression}).view({stored})"
            elif have < want and stored[0] == "u" and code[0] in "iu":  # sign-extended or zero-extended by the instruction's type
                expression, fresh = f"({expression}).astype({'i' if code[0] == 'i' else 'u'}{want}).view({stored})", True
            elif have < want and stored[0] == "u":
                expression, fresh = f"({expression}).view(u{have}).astype({stored})", True
            else:
                raise self.unknown(f"{8 * have} bits do not fit a register of {8 * want} bits")
        self.assign(index, expression, fresh)

    def assign(self, index: int, expression: str, fresh: bool = True) -> None:
        guard = self.instruction.guard if self.instruction else None
        if guard is not None:
            condition = self.value(guard, "pred")
            expression, fresh = f"where({condition}, {expression}, {self.read(index)})", True
        self.emit(f"r{index} = {expression}")
        self.writes[index] = fresh


Handler = Callable[[Emitter, Instruction], None]
Function = TypeVar("Function", bound=Callable[..., Any])
HANDLERS: dict[tuple[str, str], Handler] = {}
"""(opcode, kind of its first type) -> function that emits it. Filled by the modules of instructions; kind is one of KINDS."""

KINDS = {"f32": "float", "f64": "float", "f16": "half", "f16x2": "half", "pred": "pred"}
"""Kind of a PTX type; every other type is "int"."""

HELPERS: dict[str, Any] = dict(DTYPES)
"""Names that generated code may use."""
HELPERS.update(where=np.where)


def handles(*opcodes: str, kinds: str = "int float half pred none") -> Callable[[Handler], Handler]:
    """Register a function as the translation of opcodes whose first type is of one of `kinds`."""

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            for kind in kinds.split():
                HANDLERS[opcode, kind] = handler
        return handler

    return register


def kind_of(instruction: Instruction) -> str:
    """Kind of the first type in the opcode; "none" when it has no type."""
    return next((KINDS.get(part, "int") for part in instruction.parts[1:] if part in CODES), "none")


def helper(function: Function) -> Function:
    """Make a function callable from generated code by its name."""
    HELPERS[function.__name__] = function
    return function


def form(instruction: Instruction, modifiers: str, types: int = 1) -> tuple[frozenset[str], tuple[str, ...]]:
    """Split an opcode into (modifiers, types). Raises UnknownInstruction for a modifier not listed or another number of types."""
    found_types = tuple(part for part in instruction.parts[1:] if part in CODES)
    found = [part for part in instruction.parts[1:] if part not in CODES]
    for part in found:
        if part not in modifiers.split():
            raise instruction.unknown(f"modifier .{part} of {instruction.base} is not implemented")
    if len(set(found)) != len(found):
        raise instruction.unknown("a modifier stands twice")
    if len(found_types) != types:
        raise instruction.unknown(f"{len(found_types)} types where {instruction.base} has {types}")
    return frozenset(found), found_types


def expect(instruction: Instruction, count: int) -> tuple[Operand, ...]:
    """Return the operands, which must be `count`."""
    if len(instruction.operands) != count:
        raise instruction.unknown(f"{len(instruction.operands)} operands where the emulator knows {count}")
    return instruction.operands
