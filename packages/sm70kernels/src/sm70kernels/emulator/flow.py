"""Control flow: bra brx ret exit trap call bar barrier, which end a block, and how a function falls into blocks.

Source: PTX ISA 8.7, sections 9.7.12 and 9.7.13.1.
"""

from dataclasses import dataclass, field

from sm70kernels.emulator.emitter import Emitter, form
from sm70kernels.emulator.syntax import Function, Instruction, Operand

EFFECTS = frozenset({
    "ld", "ldu", "st", "atom", "red", "shfl", "vote", "match", "mma", "bar", "barrier", "call", "trap", "ret", "exit", "brx", "activemask",
    "membar", "fence", "prefetch", "prefetchu", "nanosleep",
})  # fmt: skip
"""Instructions whose guard becomes a branch around them; the guard of any other selects between new and old value."""

ENDS = frozenset(["bra", "brx", "ret", "exit", "trap", "call", "bar", "barrier"])


def is_warp_sync(i: Instruction) -> bool:
    """True for instructions that wait for other lanes of the warp."""
    return i.base in ("shfl", "vote", "match", "mma") or i.parts[:3] == ("bar", "warp", "sync")


def ends_block(i: Instruction) -> bool:
    return i.base in ENDS and not is_warp_sync(i)


@dataclass
class Piece:
    """Instructions without a branch inside, the smallest unit that lanes execute together.

    `guard` ends a piece before a guarded instruction: lanes where it fails go on at `skip`. `charge`: that instruction, which is issued
    for the whole warp and counted here. `following` is the piece behind (-1 at the end of the function), `targets` where its end may lead.
    """

    function: str
    body: list[Instruction] = field(default_factory=list)
    guard: Operand | None = None
    charge: Instruction | None = None
    charged: bool = False
    skip: int = -1
    following: int = -1
    targets: list[int] = field(default_factory=list)

    @property
    def end(self) -> Instruction | None:
        """The instruction that decides where to go, if there is one."""
        return self.body[-1] if self.body and ends_block(self.body[-1]) else None

    @property
    def issued(self) -> list[Instruction]:
        """Instructions counted for every warp that runs the piece: a guarded one belongs to the piece that tests its guard."""
        return [*([] if self.charged else self.body), *([self.charge] if self.charge else [])]

    @property
    def length(self) -> int:
        return len(self.issued)

    @property
    def executed(self) -> int:
        """Instructions counted for every lane that runs the piece."""
        return len(self.body)

    @property
    def sync(self) -> Instruction | None:
        return self.body[0] if self.body and is_warp_sync(self.body[0]) else None


def split(function: Function, first: int) -> tuple[list[Piece], dict[str, int]]:
    """Cut a function into pieces numbered from `first`; return them and the piece of every label."""
    pieces: list[Piece] = [Piece(function.name)]
    at: dict[str, int] = {}
    names: dict[int, list[str]] = {}
    for name, place in function.labels.items():
        names.setdefault(place, []).append(name)

    def fresh() -> Piece:
        if pieces[-1].body or pieces[-1].guard:
            pieces.append(Piece(function.name))
        return pieces[-1]

    for place, instruction in enumerate(function.body):
        if place in names:
            fresh()
            at.update(dict.fromkeys(names[place], first + len(pieces) - 1))
        around = instruction.guard is not None and instruction.base in EFFECTS
        if around:
            pieces[-1].guard = instruction.guard
            pieces[-1].charge = instruction
            pieces[-1].skip = first + len(pieces) + 1
            pieces.append(Piece(function.name, charged=True))
        elif is_warp_sync(instruction):
            fresh()
        pieces[-1].body.append(instruction)
        if around or ends_block(instruction):
            pieces.append(Piece(function.name))
    at.update({name: first + len(pieces) - 1 for place in names if place >= len(function.body) for name in names[place]})
    for place, piece in enumerate(pieces):
        piece.following = first + place + 1 if place + 1 < len(pieces) else -1
        end = piece.end
        falls = end is None or end.base in ("bar", "barrier", "call") or (end.base == "bra" and end.guard is not None)
        piece.targets = [piece.following] if falls and piece.following >= 0 else []
        if piece.guard is not None:
            piece.targets.append(piece.skip)
        if end is not None and end.base == "bra":
            piece.targets.append(target(end, end.operands[0].text, at))
        if end is not None and end.base == "brx":
            table = function.tables.get(end.operands[1].text)
            if table is None:
                raise end.unknown(f"{end.operands[1].text} is no .branchtargets")
            piece.targets += [target(end, name, at) for name in table]
    return pieces, at


def target(i: Instruction, name: str, at: dict[str, int]) -> int:
    if name not in at:
        raise i.unknown(f"label {name} is not in this function")
    return at[name]


def emit_end(e: Emitter, piece: Piece, entry: bool, functions: dict[str, tuple[int, int]]) -> str:
    """Return the Python expression of where the lanes go. functions: name -> (number, first piece)."""
    i = piece.end
    if piece.guard is not None:
        return f"M.branch(G, {e.value(piece.guard, 'pred')}, {piece.following}, {piece.skip})"
    if i is None:
        return leave(entry, functions[piece.function][0]) if piece.following < 0 else str(piece.following)
    return ENDINGS[i.base](e, i, piece, entry, functions)


def leave(entry: bool, number: int) -> str:
    return "M.exit(G)" if entry else f"M.ret(G, {number})"


def _branch(e: Emitter, i: Instruction, piece: Piece, entry: bool, functions: dict[str, tuple[int, int]]) -> str:
    if set(i.parts[1:]) - {"uni"}:
        raise i.unknown("bra is bra or bra.uni")
    if i.guard is None:
        return str(piece.targets[0])
    condition = e.value(i.guard, "pred")
    return f"M.branch(G, {condition}, {piece.targets[-1]}, {piece.following})"


def _table(e: Emitter, i: Instruction, piece: Piece, entry: bool, functions: dict[str, tuple[int, int]]) -> str:
    if set(i.parts[1:]) - {"uni", "idx"} or "idx" not in i.parts:
        raise i.unknown("brx is brx.idx")
    return f"M.table(G, {e.value(i.operands[0], 'u32')}, {tuple(piece.targets)}, {e.share('I', i)})"


def _return(e: Emitter, i: Instruction, piece: Piece, entry: bool, functions: dict[str, tuple[int, int]]) -> str:
    if set(i.parts[1:]) - {"uni"}:
        raise i.unknown("ret is ret or ret.uni")
    return leave(entry or i.base == "exit", functions[piece.function][0])


def _trap(e: Emitter, i: Instruction, piece: Piece, entry: bool, functions: dict[str, tuple[int, int]]) -> str:
    return f"M.trap(G, {e.share('I', i)})"


def callee(i: Instruction) -> tuple[tuple[Operand, ...], str, tuple[Operand, ...]]:
    """Return (results, name, arguments) of a call. Raises UnknownInstruction for an indirect one."""
    operands = list(i.operands)
    results = operands.pop(0).inner if operands and operands[0].kind == "vec" else ()
    arguments = operands.pop().inner if len(operands) == 2 and operands[1].kind == "vec" else ()
    if len(operands) != 1 or operands[0].kind != "name":
        raise i.unknown("only direct calls are implemented")
    return results, operands[0].text, arguments


def _call(e: Emitter, i: Instruction, piece: Piece, entry: bool, functions: dict[str, tuple[int, int]]) -> str:
    if set(i.parts[1:]) - {"uni"}:
        raise i.unknown("call is call or call.uni")
    number, first = functions[callee(i)[1]]
    return f"M.call(G, {number}, {first}, {piece.following})"


def _barrier(e: Emitter, i: Instruction, piece: Piece, entry: bool, functions: dict[str, tuple[int, int]]) -> str:
    words = [part for part in i.parts[1:] if part not in ("cta", "aligned")]
    if not words or words[0] not in ("sync", "arrive", "red"):
        raise i.unknown("bar and barrier are .sync, .arrive or .red")
    how, operands = words[0], list(i.operands)
    if len(operands) < (2 if how == "red" else 1):
        raise i.unknown("a barrier has a number")
    number = operands.pop(1 if how == "red" else 0)
    extra = ""
    if how == "red":
        modifiers = words[1:]
        if modifiers not in (["popc", "u32"], ["and", "pred"], ["or", "pred"]) or len(operands) not in (2, 3):
            raise i.unknown("bar.red is .popc.u32, .and.pred or .or.pred")
        register, stored = e.register(operands.pop(0).text)
        if stored != ("u4" if modifiers[0] == "popc" else "bool"):
            raise i.unknown("the result has another type")
        vote = e.value(operands.pop(), "pred")
        extra = f", vote={vote}, reduction=({modifiers[0]!r}, {register})"
    elif len(words) > 1 or len(operands) > 1 or (how == "arrive" and not operands):
        raise i.unknown("wrong modifiers or operands")
    count = e.value(operands[0], "u32") if operands else "None"
    wait = ", wait=False" if how == "arrive" else ""
    return f"M.barriers.meet(G, {e.value(number, 'u32')}, {count}, {piece.following}, {e.share('I', i)}{wait}{extra})"


ENDINGS = {"bra": _branch, "brx": _table, "ret": _return, "exit": _return, "trap": _trap, "call": _call, "bar": _barrier,
           "barrier": _barrier}  # fmt: skip


def emit_warp_barrier(e: Emitter, i: Instruction) -> None:
    """bar.warp.sync."""
    form(i, "warp sync", types=0)
    if len(i.operands) != 1:
        raise i.unknown("bar.warp.sync has a mask")
    e.emit(f"join(M, G, {e.value(i.operands[0], 'b32')}, {e.share('I', i)})")

