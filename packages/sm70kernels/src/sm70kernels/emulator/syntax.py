"""The parts of a PTX module: functions with their instructions, labels and registers, and variables of every state space."""

from dataclasses import dataclass, field

from sm70kernels.emulator.faults import UnknownInstruction

WIDTHS = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4,
          "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip
"""Bytes of the fundamental types that SM70 code uses."""


@dataclass(frozen=True)
class Variable:
    """A declared variable: `size` in bytes (0 for an unsized array), `type` its element type, `init` the text after `=`."""

    name: str
    space: str
    type: str
    size: int
    align: int
    init: str | None = None
    array: bool = False


@dataclass(frozen=True)
class Operand:
    """One operand. kind: reg, imm, addr, vec, name (symbol, label or special register), sink. `offset` belongs to addr.

    `inner` holds the parts of a vector, or (value, predicate) of a pair `d|p`.
    """

    kind: str
    text: str
    offset: int = 0
    negated: bool = False
    inner: tuple["Operand", ...] = ()


@dataclass(frozen=True)
class Instruction:
    """One instruction: opcode split at its dots, operands, guard (a register operand or None), and where it stands."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Operand | None
    ptx_line: int
    source: str
    text: str

    @property
    def base(self) -> str:
        return self.parts[0]

    def unknown(self, why: str) -> UnknownInstruction:
        """The error for a form of this instruction that is not implemented."""
        place = f", {self.source}" if self.source else ""
        return UnknownInstruction(f"{self.text}: {why} (PTX line {self.ptx_line}{place})")


@dataclass
class Function:
    """An entry or device function. `labels`: name -> index into `body`; `tables`: .branchtargets; registers: name -> type."""

    name: str
    entry: bool
    parameters: tuple[Variable, ...]
    results: tuple[Variable, ...]
    max_threads: int | None = None
    required_block: tuple[int, ...] | None = None
    registers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prototypes: set[str] = field(default_factory=set)


@dataclass
class Module:
    """A PTX translation unit."""

    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)


def split_list(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []
