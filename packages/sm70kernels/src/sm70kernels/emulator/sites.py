"""A memory instruction as generated code refers to it."""

from dataclasses import dataclass, field
from typing import Any

from sm70kernels.emulator.memory import Region
from sm70kernels.emulator.syntax import Instruction


@dataclass
class MemorySite:
    """One ld, st, atom or red. width: bytes of a word; count: words of a lane (.v2, .v4); offset: the immediate part of the address.

    `strong`: relaxed, acquire, release or atomic, which do not race with each other. `region` remembers where it last went.
    """

    number: int
    instruction: Instruction
    space: str
    width: int
    count: int
    offset: int
    strong: bool = False
    constant: bool = False
    acquire: bool = False
    release: bool = False
    region: Region | None = None
    parts: dict[str, "MemorySite"] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes a lane accesses."""
        return self.width * self.count

    @property
    def name(self) -> str:
        return ".".join(self.instruction.parts)

    def inside(self, space: str) -> "MemorySite":
        """The same instruction once its generic address is known to be in `space`; the offset is in the address by then."""
        if space not in self.parts:
            known: dict[str, Any] = {name: getattr(self, name) for name in ("strong", "constant", "acquire", "release")}
            self.parts[space] = MemorySite(self.number, self.instruction, space, self.width, self.count, 0, **known)
        return self.parts[space]
