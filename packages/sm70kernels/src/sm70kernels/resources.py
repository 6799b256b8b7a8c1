"""What an image takes of a V100: registers and shared memory, blocks that fit on a multiprocessor, and its machine instructions.

Registers, spills and shared memory are the assembler's own report. Instructions are read from the disassembly of the sm_70 machine code,
since PTX does not show them: the assembler merges loads, unrolls and spills. NVIDIA's disassembler for CUDA 13 no longer reads sm_70; the
one in Triton's wheel does.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

from sm70kernels.cuda import CACHE
from sm70kernels.nvrtc import Image

WARP = 32
REGISTER_UNIT = 256
"""Registers are given to a warp in units of so many."""
SUB_CORE_REGISTERS = 16384
SUB_CORES = 4
WARPS, BLOCKS, SHARED = 64, 32, 96 << 10
"""Most warps, blocks and bytes of shared memory on one multiprocessor of a V100."""
SHARED_UNIT = 256

_ENTRY = re.compile(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)
_SECTION = re.compile(r"^\.text\.(\w+):\n(.*?)(?=^\s*\.section|\Z)", re.DOTALL | re.MULTILINE)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)")
_WIDTHS = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
_MEMORY = frozenset({"LDG", "STG", "LDS", "STS", "LDL", "STL", "LD", "ST"})


class NoDisassembler(RuntimeError):
    """There is no disassembler for sm_70; the text says which package has one."""


@dataclass(frozen=True)
class Resources:
    """What the assembler reports of one entry: registers a thread; bytes of stack and of spills a thread, of shared memory a block."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    barriers: int

    def blocks(self, threads: int, dynamic: int = 0) -> int:
        """Return the blocks of `threads` with `dynamic` bytes of shared memory beside the static that run on one multiprocessor."""
        return blocks_per_multiprocessor(self.registers, threads, self.shared + dynamic)


@dataclass(frozen=True)
class Mix:
    """Machine instructions of one entry as they stand in the code (not as often as they run): all of them, and counts by kind.

    Kinds are opcodes; memory instructions carry the bits a lane moves ("LDG.128"), and tensor instructions are counted by step.
    """

    total: int
    kinds: Mapping[str, int]

    def count(self, *opcodes: str) -> int:
        """Return the number of instructions with one of these opcodes, of any width."""
        return sum(number for kind, number in self.kinds.items() if kind.partition(".")[0] in opcodes)

    @property
    def local(self) -> int:
        """Loads and stores of local memory: spills, and arrays that are indexed at run time."""
        return self.count("LDL", "STL")

    @property
    def wide_loads(self) -> float:
        """Share of global loads that move 16 bytes a lane; 1 where there are none."""
        loads = self.count("LDG", "LD")
        return self.kinds.get("LDG.128", 0) / loads if loads else 1.0

    def summary(self) -> str:
        """Return the kinds that decide speed, most frequent first, as one line."""
        shown = {"HMMA", "FFMA", "HFMA2", "MUFU", "SHFL", "BAR", "ATOM", "ATOMG", "ATOMS", "RED"} | _MEMORY
        picked = [(kind, number) for kind, number in self.kinds.items() if kind.partition(".")[0] in shown]
        return ", ".join(f"{kind} {number}" for kind, number in sorted(picked, key=lambda item: (-item[1], item[0])))


def read_report(report: str, entry: str) -> Resources:
    """Return the resources of an entry from Image.report. Raises ValueError when the report does not have them."""
    found: dict[str, str] = dict(_ENTRY.findall(report))
    if entry not in found:
        raise ValueError(f"{entry}: not in the assembler's report, which has {', '.join(found) or 'no entry'}")

    def number(pattern: str, default: int | None = None) -> int:
        match = re.search(pattern, found[entry])
        if match is None and default is None:
            raise ValueError(f"{entry}: the assembler's report has nothing like {pattern!r}:\n{found[entry]}")
        return int(match[1]) if match else int(default or 0)

    return Resources(
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        shared=number(r"(\d+) bytes smem", 0),
        barriers=number(r"used (\d+) barriers", 0),
    )


def blocks_per_multiprocessor(registers: int, threads: int, shared: int) -> int:
    """Return how many blocks one multiprocessor of a V100 holds; 0 when not even one fits.

    CUDA's occupancy rules for compute capability 7.0: 64 warps and 32 blocks; registers are given to warps in units of 256 out of each
    sub-core's 16384, and the sub-cores' warps are counted together; 96 KB of shared memory in units of 256 bytes.
    """
    warps = -(-threads // WARP)
    limits = [BLOCKS, WARPS // warps]
    if registers:
        per_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        limits.append(SUB_CORE_REGISTERS // per_warp * SUB_CORES // warps)
    if shared:
        limits.append(SHARED // (-(-shared // SHARED_UNIT) * SHARED_UNIT))
    return min(limits)


def threads(block: int | tuple[int, ...]) -> int:
    """Return the threads of a block given as a launch gives it."""
    return block if isinstance(block, int) else prod(block)


@cache
def disassembler() -> Path:
    """Return the path of a disassembler that reads sm_70: the one beside this Python, else Triton's. Raises NoDisassembler."""
    beside, spec = Path(sys.executable).parent, find_spec("triton")
    inside = [Path(folder) / "backends" / "nvidia" / "bin" for folder in (spec and spec.submodule_search_locations) or ()]
    for folder in (beside, *inside):
        program = folder / "nvdisasm"
        if program.is_file():
            return program
    raise NoDisassembler(
        f"there is no nvdisasm in {beside} and no triton that has one: in a clone python ci/fetch_nvdisasm.py gets it, elsewhere "
        "pip install --no-deps triton==3.6.0"
    )


def disassemble(cubin: bytes) -> str:
    """Return the text of an image's machine code. Raises NoDisassembler, also when the disassembler refuses it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "image.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([str(disassembler()), "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoDisassembler(f"{disassembler()}: {done.stderr.strip()}; the one of triton 3.6.0 reads sm_70")
    return done.stdout


def read_mixes(text: str) -> dict[str, Mix]:
    """Return the instruction mix of every function of a disassembly, by name."""
    mixes = {}
    for name, body in _SECTION.findall(text):
        found = Counter(_kind(opcode, modifiers) for opcode, modifiers in _INSTRUCTION.findall(body))
        del found["NOP"]  # padding after the last instruction
        mixes[name] = Mix(found.total(), dict(found))
    return mixes


def _kind(opcode: str, modifiers: str) -> str:
    if opcode not in _MEMORY:
        return opcode
    return f"{opcode}.{next((_WIDTHS[word] for word in modifiers.split('.') if word in _WIDTHS), 32)}"


def mixes(image: Image) -> dict[str, Mix]:
    """Return the instruction mix of every function of an image, by name.

    What was read once is kept in the user's cache, as compiled images are: a process of the disassembler takes a tenth of a second.
    Raises NoDisassembler.
    """
    digest = hashlib.blake2b(Path(__file__).read_bytes() + image.cubin, digest_size=12).hexdigest()
    path = CACHE / f"mix.{digest}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = read_mixes(disassemble(image.cubin))
        _keep(path, {name: asdict(mix) for name, mix in found.items()})
        return found
    return {name: Mix(**mix) for name, mix in stored.items()}


def _keep(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record whole or not at all; a folder nobody may write is let be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as part:
            json.dump(record, part)
        Path(part.name).replace(path)
    except PermissionError:
        return


def mix(image: Image, entry: str) -> Mix:
    """Return the instruction mix of an entry. Raises NoDisassembler, and ValueError when the image has no such entry."""
    found = mixes(image)
    if entry not in found:
        raise ValueError(f"{entry}: not in the machine code, which has {', '.join(found) or 'no function'}")
    return found[entry]
