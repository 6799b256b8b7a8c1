"""Runs PTX for SM70 on the CPU, finds its faults and counts what it does.

    counters = emulate(ptx, "rms_norm", grid, block, x, w, out, eps)

The very text that ships is executed, instruction by instruction, over NumPy arrays that hold one element for each thread.
"""

from sm70kernels.emulator.counters import Counters, Site
from sm70kernels.emulator.faults import EmulatorError, Fault, UnknownInstruction
from sm70kernels.emulator.launch import emulate

__all__ = ["Counters", "EmulatorError", "Fault", "Site", "UnknownInstruction", "emulate"]
