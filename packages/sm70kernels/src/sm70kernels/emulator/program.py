"""A kernel translated: pieces of PTX as Python functions over NumPy arrays, compiled when they first run.

Everything is translated at once, so that an unknown instruction is reported before anything runs. A piece that is followed by pieces
which begin with a `*.sync` also exists as a chain with them, for warps that are whole.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sm70kernels.emulator import atomics, compare, conversions, floats, halves, integers, loads, logic, mma, moves, warp  # noqa: F401
from sm70kernels.emulator.emitter import DTYPES, HANDLERS, HELPERS, SPECIAL, STORED, Emitter, constant, kind_of
from sm70kernels.emulator.faults import UnknownInstruction
from sm70kernels.emulator.flow import Piece, callee, emit_end, emit_warp_barrier, split
from sm70kernels.emulator.integers import CARRY
from sm70kernels.emulator.liveness import live_out
from sm70kernels.emulator.memory import GLOBAL_BASE
from sm70kernels.emulator.parse import parse
from sm70kernels.emulator.reconverge import meeting_order
from sm70kernels.emulator.sites import MemorySite
from sm70kernels.emulator.syntax import WIDTHS, Function, Instruction, Module, Operand, Variable
from sm70kernels.emulator.taint import written_through

Code = Callable[..., Any]

GAP = 4096
"""Bytes between the variables of a module in the image of global memory."""

WARP_BARRIER_KEY = 1 << 40
"""What lanes at a bar.warp.sync wait for: it need not be the same instruction in all of them. Others meet at one instruction."""

PRELUDE = """def code(M, R, G):
    i = G.index
"""


def take(register: Any, lanes: Any) -> Any:
    return register if register.size == 1 else register[lanes]


class Block:
    """One piece as the machine runs it. `pieces`, `chain_pieces`: numbers of the pieces that single() and chain() execute."""

    def __init__(self, program: "Program", number: int, piece: Piece) -> None:
        self.program = program
        self.instructions = piece.body
        self.pieces = (number,)
        self.chain_pieces: tuple[int, ...] = (number,)
        self.polls = int(any(_polls(instruction) for instruction in piece.body))
        self.sync: int | None = None
        if piece.sync is not None:
            self.sync = WARP_BARRIER_KEY if piece.sync.base == "bar" else number + 1
        self.sources: dict[str, str] = {}
        self.compiled: dict[str, Code] = {}

    def _code(self, name: str) -> Code:
        if name not in self.compiled:
            space: dict[str, Any] = {}
            exec(compile(self.sources[name], f"<{self.program.name} {name} {self.pieces[0]}>", "exec"), self.program.names, space)
            self.compiled[name] = space["code"]
        return self.compiled[name]

    def single(self) -> Code:
        return self._code("single")

    def chain(self) -> Code:
        return self._code("chain" if len(self.chain_pieces) > 1 else "single")

    def mask(self) -> Code:
        return self._code("mask")


class Program:
    """One entry of a module with everything it calls. Raises UnknownInstruction for what the emulator does not implement."""

    def __init__(self, module: Module, name: str) -> None:
        if name not in module.functions or not module.functions[name].entry:
            entries = ", ".join(function.name for function in module.functions.values() if function.entry)
            raise ValueError(f"there is no kernel {name!r} in this PTX; it has: {entries or 'none'}")
        self.name = name
        self.module = module
        self.function = module.functions[name]
        self.functions = self._reachable(self.function, ())
        self.registers: dict[str, tuple[int, str]] = {}
        self.kinds: list[Any] = []
        self.sites: list[MemorySite] = []
        for special, stored in SPECIAL.items():
            self._register(special, stored)
        self.symbols: dict[str, int] = {}
        self.images: list[tuple[Variable, int]] = []
        self.frames: set[str] = set()
        self.passed: dict[tuple[str, str], tuple[str, str]] = {}
        self.local_size = self.frame_size = 0
        self._place_variables()
        self.names: dict[str, Any] = {**HELPERS, "take": take, "SITES": self.sites, "FRAMES": self.frames}
        self.pieces: list[Piece] = []
        self.numbers: dict[str, tuple[int, int]] = {}
        for number, function in enumerate(self.functions):
            self.numbers[function.name] = number, len(self.pieces)
            self.pieces += split(function, len(self.pieces))[0]
        self.entry = self.numbers[name][1]
        self.blocks = [Block(self, number, piece) for number, piece in enumerate(self.pieces)]
        for function in self.functions:
            self._translate(function)
        del self.names["ENTRY"]
        self.rank = self._ranks()
        self.shared_unit = self._unit("shared", "generic")
        self.local_unit = self._unit("local", "generic")
        self.global_unit = self._unit("global", "const", "generic")
        self.written = written_through(self.functions, self.passed)

    def _reachable(self, function: Function, above: tuple[str, ...]) -> list[Function]:
        """Callees first, so that lanes inside one run before those behind it."""
        found: list[Function] = []
        for instruction in function.body:
            if instruction.base == "call":
                name = callee(instruction)[1]
                if name in (*above, function.name):
                    raise instruction.unknown("recursion is not implemented")
                if name not in self.module.functions:
                    raise instruction.unknown(f"{name} is declared but not defined in this PTX")
                found += [inner for inner in self._reachable(self.module.functions[name], (*above, function.name)) if inner not in found]
        return [*found, function]

    def _ranks(self) -> list[int]:
        """Return for every piece its place in the order in which lanes run; device functions come before their callers."""
        order: list[int] = []
        for function in self.functions:
            mine = {number for number, piece in enumerate(self.pieces) if piece.function == function.name}
            order += meeting_order(mine, self.numbers[function.name][1], {number: self.pieces[number].targets for number in mine})
        rank = [0] * len(order)
        for place, number in enumerate(order):
            rank[number] = place
        return rank

    def _unit(self, *spaces: str) -> int:
        """Bytes of the shortest access to these spaces."""
        return min((site.size for site in self.sites if site.space in spaces), default=4)

    def _register(self, name: str, stored: str) -> None:
        self.registers[name] = len(self.kinds), stored
        self.kinds.append(DTYPES[stored])

    # Variables

    def _place_variables(self) -> None:
        used = {operand.text for function in self.functions for i in function.body for operand in _flat(i.operands)}
        everything = list(self.module.variables.values())
        own = [variable for function in self.functions for variable in function.variables.values()]
        shared = 0
        dynamic = []
        place = 0
        for variable in [*everything, *own]:
            if variable.space == "shared" and variable.name in used:
                if variable.array and variable.size == 0:
                    dynamic.append(variable)
                    continue
                shared = _up(shared, variable.align)
                self.symbols[variable.name] = shared
                shared += variable.size
            elif variable.space in ("global", "const"):
                place = _up(place, max(variable.align, 256))
                self.symbols[variable.name] = GLOBAL_BASE + place
                self.images.append((variable, place))
                place += variable.size + GAP
        self.image_end = place
        self.dynamic_start = _up(shared, max([16, *(variable.align for variable in dynamic)])) if dynamic else shared
        self.static_shared = shared
        self.symbols.update({variable.name: self.dynamic_start for variable in dynamic})
        for function in self.functions:
            for variable in function.variables.values():
                if variable.space == "local":
                    self.local_size = _up(self.local_size, variable.align)
                    self.symbols[_scoped(function, variable.name)] = self.local_size
                    self.local_size += variable.size
            if function is not self.function:
                for variable in (*function.parameters, *function.results):
                    self.frame_size = _up(self.frame_size, max(16, variable.align))
                    self.symbols[_scoped(function, variable.name)] = self.frame_size
                    self.frames.add(_scoped(function, variable.name))
                    self.frame_size += variable.size
        offset = 0
        self.parameters: list[tuple[Variable, int]] = []
        for variable in self.function.parameters:
            offset = _up(offset, variable.align)
            self.symbols[_scoped(self.function, variable.name)] = offset
            self.parameters.append((variable, offset))
            offset += variable.size
        self.parameter_size = offset
        for function in self.functions:
            self._share_frames(function)

    def _share_frames(self, function: Function) -> None:
        """The caller's parameter variables are the callee's own: nothing is copied at a call."""
        for instruction in function.body:
            if instruction.base != "call":
                continue
            results, name, arguments = callee(instruction)
            inner = self.module.functions[name]
            if len(results) != len(inner.results) or len(arguments) != len(inner.parameters):
                raise instruction.unknown("another number of arguments than the function has")
            for operand, variable in zip((*results, *arguments), (*inner.results, *inner.parameters), strict=True):
                if operand.text not in function.variables:
                    raise instruction.unknown(f"argument {operand.text} is no .param variable")
                outer = _scoped(function, operand.text)
                self.passed[function.name, operand.text] = inner.name, variable.name
                self.symbols[outer] = self.symbols[_scoped(inner, variable.name)]
                self.frames.add(outer)

    # Code

    def _translate(self, function: Function) -> None:
        registers = dict(self.registers)
        for name, kind in [*function.registers.items(), (CARRY, "pred")]:
            registers[name] = len(self.kinds), STORED[kind]
            self.kinds.append(DTYPES[STORED[kind]])
        prefix = f"{function.name}/"
        symbols = {key: value for key, value in self.symbols.items() if "/" not in key}
        symbols |= {key.removeprefix(prefix): value for key, value in self.symbols.items() if key.startswith(prefix)}
        self.names["ENTRY"] = function is self.function
        self.names["FRAMES"] = {key.removeprefix(prefix) for key in self.frames if key.startswith(prefix)}
        mine = [number for number, piece in enumerate(self.pieces) if piece.function == function.name]
        emitters: dict[int, Emitter] = {}
        ends: dict[int, str] = {}
        for number in mine:
            emitters[number] = e = Emitter(registers, symbols, self.names)
            ends[number] = self._emit(e, [self.pieces[number]])
        after = live_out({number: (self.pieces[number].targets, emitters[number].reads, set(emitters[number].writes)) for number in mine})
        for number in mine:
            block, piece = self.blocks[number], self.pieces[number]
            block.sources["single"] = _source(emitters[number], ends[number], after[number])
            if piece.sync is not None:
                block.sources["mask"] = self._mask(piece.sync, registers, symbols)
            chain = [number]
            while self._continues(self.pieces[chain[-1]]):
                chain.append(chain[-1] + 1)
            if len(chain) > 1:
                block.chain_pieces = tuple(chain)
                e = Emitter(registers, symbols, self.names)
                end = self._emit(e, [self.pieces[member] for member in chain])
                block.sources["chain"] = _source(e, end, after[chain[-1]])

    def _continues(self, piece: Piece) -> bool:
        """True when execution falls from this piece into one that begins with a `*.sync`."""
        return piece.end is None and piece.guard is None and piece.following >= 0 and self.pieces[piece.following].sync is not None

    def _emit(self, e: Emitter, pieces: list[Piece]) -> str:
        for piece in pieces:
            ended = piece.end
            for instruction in piece.body:
                if instruction is ended:
                    break
                e.instruction = instruction if not piece.charged else _unguarded(instruction)
                if instruction.base == "bar":
                    emit_warp_barrier(e, instruction)
                    continue
                handler = HANDLERS.get((instruction.base, kind_of(instruction)))
                if handler is None:
                    raise instruction.unknown("this instruction is not implemented")
                handler(e, e.instruction)
            e.instruction = ended or piece.charge or e.instruction
        last = pieces[-1]
        if last.end is not None and last.charged:
            e.instruction = _unguarded(last.end)
        elif last.end is not None:
            e.instruction = last.end
        return emit_end(e, last, last.function == self.name, self.numbers)

    def _mask(self, instruction: Instruction, registers: dict[str, tuple[int, str]], symbols: dict[str, int]) -> str:
        e = Emitter(registers, symbols, self.names)
        e.instruction = instruction
        text = e.integer(-1, "b32") if instruction.base == "mma" else e.value(instruction.operands[-1], "b32")
        return _source(e, text, set())


def _source(e: Emitter, result: str, live: set[int]) -> str:
    """Assemble the text of a function: read registers, compute, write those that are needed later, return where to go."""
    whole = [f"        r{index} = R[{index}]\n" for index in sorted(e.reads)]
    part = [f"        r{index} = take(R[{index}], i)\n" for index in sorted(e.reads)]
    lines = [PRELUDE]
    if whole:
        lines += ["    if i is None:\n", *whole, "    else:\n", *part]
    lines += [f"    {line}\n" for line in e.lines]
    written = {index: fresh for index, fresh in sorted(e.writes.items()) if index in live}
    if written:
        lines.append("    if i is None:\n")
        lines += [f"        R[{index}] = r{index}{'' if fresh else '.copy()'}\n" for index, fresh in written.items()]
        lines.append("    else:\n")
        lines += [f"        M.put({index}, r{index}, i)\n" for index in written]
    lines.append(f"    return {result}\n")
    return "".join(lines)


def _polls(i: Instruction) -> bool:
    """True for what a lane executes again and again while it waits for another one."""
    return i.base == "atom" or (i.base in ("ld", "nanosleep") and bool({"volatile", "relaxed", "acquire", "nanosleep"} & set(i.parts)))


def _unguarded(i: Instruction) -> Instruction:
    return Instruction(i.parts, i.operands, None, i.ptx_line, i.source, i.text)


def _flat(operands: tuple[Operand, ...]) -> list[Operand]:
    return [inner for operand in operands for inner in (_flat(operand.inner) if operand.inner else [operand])]


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


def _scoped(function: Function, name: str) -> str:
    return f"{function.name}/{name}"


def initial_bytes(variable: Variable) -> bytes:
    """The initial contents of a variable of the module. Raises UnknownInstruction for initialisers with addresses."""
    width = WIDTHS[variable.type]
    data = bytearray(variable.size)
    if variable.init is None:
        return bytes(data)
    items = variable.init.replace("{", " ").replace("}", " ").replace(",", " ").split()
    for place, item in enumerate(items):
        try:
            value = constant(item, variable.type).tobytes()
        except ValueError:
            raise UnknownInstruction(f"initialiser {item} of {variable.name} is not implemented") from None
        data[place * width : (place + 1) * width] = value
    return bytes(data)


@lru_cache(maxsize=64)
def module_of(ptx: str) -> Module:
    return parse(ptx)


@lru_cache(maxsize=256)
def program_of(ptx: str, name: str) -> Program:
    """Return the translated kernel, kept for later launches."""
    return Program(module_of(ptx), name)

