"""Seeded faults: PTX with one instruction dropped or altered, to measure what the tests of a kernel would notice.

    for mutant in mutants(image.ptx, "rms_norm", count=40, seed=1):
        mutant.ptx, mutant.before, mutant.after, mutant.line

Every mutant is valid PTX. What it changes is drawn uniformly over instructions first and over the ways to change one then: stores, barriers
and branches are dropped, results replaced by an operand, opcodes exchanged with their neighbours, comparisons shifted, predicates
negated, constants and address offsets moved, operands exchanged, matrix layouts turned.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^(?P<indent>[\t {]*)(?P<guard>@!?%p\d+\s+)?(?P<opcode>[a-z][\w.:]*)\s+(?P<operands>[^;]*);(?P<rest>[\s}]*)$")
_REGISTER = re.compile(r"%[a-z]+\d+")
_IMMEDIATE = re.compile(r"(?<![\w%.$])-?\d+(?![\w.])")
_OFFSET = re.compile(r"\[(?P<base>[%$\w]+)(?:\+(?P<offset>\d+))?\]")
_WIDTH = re.compile(r"\.[a-z]*?(\d+)(?:x2)?$")

_SWAPS = {
    "add": ("sub",), "sub": ("add",), "mul": ("add",), "max": ("min",), "min": ("max",), "and": ("or",), "or": ("and", "xor"),
    "xor": ("or",), "shl": ("shr",), "shr": ("shl",), "ex2": ("lg2",), "rsqrt": ("rcp",), "rcp": ("rsqrt",), "div": ("mul",),
}  # fmt: skip
_COMPARISONS = {"lt": ("le", "ge"), "le": ("lt", "gt"), "gt": ("ge", "le"), "ge": ("gt", "lt"), "eq": ("ne",), "ne": ("eq",),
                "lo": ("ls",), "ls": ("lo",), "hi": ("hs",), "hs": ("hi",), "neu": ("equ",), "equ": ("neu",), "gtu": ("leu",),
                "leu": ("gtu",), "ltu": ("geu",), "geu": ("ltu",), "nan": ("num",), "num": ("nan",)}  # fmt: skip
_DROPPED = ("st", "bar", "barrier", "atom", "red", "membar", "fence", "bra", "ret")
_TYPED = re.compile(r"\.(?:[a-z]*32|[a-z]*64|[a-z]*16|f16x2|pred)$")
_PLAIN = {"add", "sub", "mul", "mad", "fma", "max", "min", "and", "or", "xor", "shl", "shr", "selp", "div", "abs", "neg", "not"}


@dataclass(frozen=True)
class Mutant:
    """One changed instruction: its line in the PTX (from 1), the line of CUDA it came from, both texts, the whole PTX."""

    ptx_line: int
    line: str
    before: str
    after: str
    ptx: str


def mutants(ptx: str, entry: str, count: int, seed: int) -> list[Mutant]:
    """Return up to `count` different mutants of an entry's body, drawn with `seed`. Raises ValueError when there is no such entry."""
    lines = ptx.split("\n")
    places = list(_body(lines, entry))
    generator = random.Random(seed)
    found: dict[tuple[int, str], Mutant] = {}
    for _ in range(50 * count):
        if len(found) == count or not places:
            break
        number, source = generator.choice(places)
        changed = sorted(set(_changes(lines[number])) - {lines[number]})
        if changed:
            after = generator.choice(changed)
            text = "\n".join([*lines[:number], after, *lines[number + 1 :]])
            found.setdefault((number, after), Mutant(number + 1, source, lines[number].strip(), after.strip() or "(dropped)", text))
    return list(found.values())


def _body(lines: list[str], entry: str) -> Iterator[tuple[int, str]]:
    """Yield the place of every instruction of an entry and the line of CUDA it belongs to, as file:line."""
    start = next((i for i, line in enumerate(lines) if re.search(rf"\.entry\s+{re.escape(entry)}\b", line)), None)
    if start is None:
        raise ValueError(f"{entry}: the PTX has no such entry")
    files = {match[1]: match[2] for line in lines if (match := re.match(r'\s*\.file\s+(\d+)\s+"([^"]+)"', line))}
    source, opened = "", False
    for number, line in enumerate(lines[start:], start):
        opened = opened or line.startswith("{")
        if opened and line.startswith("}"):
            return
        if located := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            source = f"{files.get(located[1], '?')}:{located[2]}"
        elif opened and _INSTRUCTION.match(line):
            yield number, source


def _changes(line: str) -> Iterator[str]:
    """Yield every changed form of one instruction; an empty line drops it."""
    match = _INSTRUCTION.match(line)
    if match is None:
        return
    guard, opcode, operands = match["guard"] or "", match["opcode"], match["operands"]
    indent, rest = match["indent"], match["rest"]

    def write(new_opcode: str = opcode, new_operands: str = operands, new_guard: str = guard) -> str:
        return f"{indent}{new_guard}{new_opcode} \t{new_operands};{rest}"

    name = opcode.partition(".")[0]
    if name in _DROPPED and (guard or name != "ret"):
        yield indent.rstrip("\t ") + rest.strip()
    if guard:
        yield write(new_guard=guard.replace("@!", "@") if "@!" in guard else guard.replace("@", "@!"))
        if name != "bra":
            yield write(new_guard="")
    for rule in (_opcodes, _operands, _addresses, _constants):
        yield from rule(opcode, operands, write)


Write = Callable[..., str]


def _opcodes(opcode: str, operands: str, write: Write) -> Iterator[str]:
    name, *parts = opcode.split(".")
    for other in _SWAPS.get(name, ()):
        if name == "mul" and parts[0] in ("lo", "hi", "wide"):
            continue
        if name in ("and", "or", "xor") or (name, other) != ("shl", "shr"):
            kept = [part for part in parts if not (name == "div" and part == "full")]
            if name in ("ex2", "rsqrt", "rcp") and kept[0] != "approx":
                continue  # only the approximate forms exist for all of them
            yield write(".".join([other, *kept]))
        else:
            yield write(".".join([other, *parts]))
    if name in ("setp", "set"):
        for other in _COMPARISONS.get(parts[0], ()):
            yield write(".".join([name, other, *parts[1:]]))
    if name == "cvt" and "rn" in parts:
        yield write(opcode.replace(".rn.", ".rz."))
    if name == "mma":
        for a, b in ((".row.col.", ".col.col."), (".row.col.", ".row.row.")):
            if a in opcode:
                yield write(opcode.replace(a, b))
    if name == "shfl" and "bfly" in parts:
        yield write(opcode.replace("bfly", "down"))
    if name == "shfl" and "down" in parts:
        yield write(opcode.replace("down", "up"))
    if name in _PLAIN and _TYPED.search(opcode) and "wide" not in parts:
        target, *sources = _split(operands)
        for source in sources[:2]:
            if source.startswith("%") or name not in ("selp",):
                yield write("mov." + _moved(opcode), f"{target}, {source}")


def _moved(opcode: str) -> str:
    """The type a register of this opcode's result moves with."""
    kind = opcode.rsplit(".", 1)[1]
    if kind == "f16":
        return "b16"
    return "b32" if kind == "f16x2" else kind


def _operands(opcode: str, operands: str, write: Write) -> Iterator[str]:
    parts = _split(operands)
    name, *kinds = opcode.split(".")
    if name in ("setp", "selp") and kinds[0] in ("eq", "ne"):
        return  # the same either way round
    if name in ("sub", "setp", "selp", "div", "shl", "shr", "fma", "mad", "prmt", "lop3") and len(parts) >= 3:
        first, second = (2, 3) if name in ("fma", "mad") else (1, 2)
        if len(parts) > second and all(parts[i].startswith("%") for i in (first, second)):
            parts[first], parts[second] = parts[second], parts[first]
            yield write(new_operands=", ".join(parts))
    for group in re.finditer(r"\{([^{}]*)\}", operands):
        inner = [item.strip() for item in group[1].split(",")]
        if len(inner) > 1 and inner[0] != inner[1]:
            inner[0], inner[1] = inner[1], inner[0]
            yield write(new_operands=operands[: group.start()] + "{" + ", ".join(inner) + "}" + operands[group.end() :])


def _addresses(opcode: str, operands: str, write: Write) -> Iterator[str]:
    if opcode.partition(".")[0] not in ("ld", "st", "atom", "red") or ".param" in opcode:
        return
    width = _WIDTH.search(opcode)
    step = int(width[1]) // 8 * next((count for count in (2, 4) if f".v{count}." in opcode), 1) if width else 4
    for match in _OFFSET.finditer(operands):
        moved = int(match["offset"] or 0) + step
        yield write(new_operands=f"{operands[: match.start()]}[{match['base']}+{moved}]{operands[match.end() :]}")


def _constants(opcode: str, operands: str, write: Write) -> Iterator[str]:
    if opcode.partition(".")[0] in ("bra", "ld", "st", "atom", "red", "bar", "barrier", "shfl", "vote", "ret", "call", "mma", "cvta"):
        return
    for match in _IMMEDIATE.finditer(operands):
        value = int(match[0])
        for moved in (value + 1, value - 1 if value > 0 else value + 2):
            yield write(new_operands=operands[: match.start()] + str(moved) + operands[match.end() :])


def _split(operands: str) -> list[str]:
    """Split operands at the commas outside braces and brackets."""
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", operands)]
