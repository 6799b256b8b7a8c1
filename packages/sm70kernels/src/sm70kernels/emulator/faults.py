"""What the emulator raises.

    EmulatorError (RuntimeError)
        UnknownInstruction      translation met an instruction, modifier or directive it does not implement
        Fault                   the kernel did something a GPU would punish, or would not notice

A Fault's message is one line: kernel, kind, what happened, CUDA source line, block and thread.
"""

Index = tuple[int, int, int]

OUT_OF_BOUNDS = "out of bounds"
MISALIGNED = "misaligned"
UNINITIALISED_SHARED = "uninitialised shared memory"
UNINITIALISED_LOCAL = "uninitialised local memory"
RACE_WARPS = "race between warps"
RACE_LANES = "race between lanes"
RACE_BLOCKS = "race between blocks"
DEADLOCK = "deadlock"
ENDLESS = "endless loop"
NULL_POINTER = "null pointer"
TRAP = "trap"
CONSTANT_WRITE = "write to constant memory"
READ_ONLY_WRITE = "write to a read-only argument"
STALE_READ = "write to memory read through ld.global.nc"


class EmulatorError(RuntimeError):
    """Base of everything the emulator raises about a kernel; wrong calls of the emulator are ValueError."""


class UnknownInstruction(EmulatorError):
    """PTX that the emulator does not implement: it never guesses. Names the text, its PTX line and its CUDA line."""


class Fault(EmulatorError):
    """A fault of the running kernel.

    kind: one of the constants of this module. kernel: the entry's name. line: "file.cu:31", or "" without -lineinfo. ptx_line:
    line of the PTX text, 0 when no single instruction is at fault. block, thread: (x, y, z), or None where many are concerned.
    address: the byte address in the instruction's state space, or None. detail: the middle part of the message.
    """

    def __init__(self, kind: str, kernel: str, detail: str, *, line: str = "", ptx_line: int = 0, block: Index | None = None,
                 thread: Index | None = None, address: int | None = None) -> None:  # fmt: skip
        self.kind = kind
        self.kernel = kernel
        self.detail = detail
        self.line = line
        self.ptx_line = ptx_line
        self.block = block
        self.thread = thread
        self.address = address
        places = [line] if line else []
        if ptx_line:
            places.append(f"PTX line {ptx_line}")
        where = " ".join(f"{name} ({','.join(map(str, index))})" for name, index in (("block", block), ("thread", thread)) if index)
        super().__init__(", ".join([f"{kernel}: {kind}: {detail}", *places, *([where] if where else [])]))
