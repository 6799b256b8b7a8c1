"""bar and barrier: sync, arrive and red, by barrier number, for the blocks of a chunk.

A warp has arrived at a barrier when all its living lanes have; it counts as 32 threads then, as the hardware counts. Without a thread
count a barrier waits for every warp of the block that still lives. Source: PTX ISA 8.7, section 9.7.13.1.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.faults import DEADLOCK, Fault
from sm70kernels.emulator.group import Group
from sm70kernels.emulator.syntax import Instruction

if TYPE_CHECKING:
    from sm70kernels.emulator.machine import Machine

Array = NDArray[Any]

BARRIERS = 16


class Barriers:
    """State of the 16 barriers of every block: who has arrived, who waits, what was reduced."""

    def __init__(self, machine: "Machine") -> None:
        shape = machine.shape
        self.machine = machine
        self.arrived = np.zeros((shape.warps, BARRIERS), np.uint32)
        self.expected = np.full((shape.blocks, BARRIERS), -1)
        self.waits = np.full(shape.lanes, -1)
        self.barrier = np.full(shape.lanes, -1)
        self.votes = np.zeros(shape.lanes, bool)
        self.voters = np.full(shape.lanes, -1)
        self.reductions: dict[int, tuple[str, int]] = {}
        self.instructions: dict[int, Instruction] = {}
        self.busy = False

    def meet(self, group: Group, number: Array, count: Array | None, back: int, instruction: Instruction, *, wait: bool = True,
             vote: Array | None = None, reduction: tuple[str, int] | None = None) -> int:  # fmt: skip
        """Lanes arrive, and wait unless told otherwise; they go on at block `back`. reduction: (operator, register of the result)."""
        machine = self.machine
        if wait and reduction is None and not self.busy and number.size == 1 and int(number[0]) < BARRIERS:
            everyone = count is None or (count.size == 1 and int(count[0]) == 32 * machine.shape.block_warps)
            if everyone and self._whole_blocks(group):
                if machine.access.races:
                    machine.access.races.barrier_all(group)
                return back
        number = group.spread(number).astype(np.int64)
        self._check_operands(group, number, count, instruction)
        self.busy = True
        self.instructions[back] = instruction
        blocks = group.block
        wanted = np.full(group.n, 0) if count is None else group.spread(count).astype(np.int64)
        known = self.expected[blocks, number]
        wrong = (known != -1) & (known != wanted)
        if wrong.any():
            lane = int(np.argmax(wrong))
            detail = f"{instruction.text} of {wanted[lane] or 'all'} threads joins barrier {number[lane]}, "
            detail += f"which others use with {known[lane] or 'all'}"
            raise machine.fault(DEADLOCK, instruction, detail, int(group.lanes[lane]))
        self.expected[blocks, number] = wanted
        again = (self.arrived[group.warp, number] & group.bit) != 0
        if again.any():
            lane = int(np.argmax(again))
            detail = f"{instruction.text} arrives at barrier {number[lane]} a second time before it is complete"
            raise machine.fault(DEADLOCK, instruction, detail, int(group.lanes[lane]))
        np.bitwise_or.at(self.arrived, (group.warp, number), group.bit)
        if vote is not None and reduction is not None:
            self.votes[group.lanes] = vote
            self.voters[group.lanes] = number
            self.reductions[back] = reduction
        if wait:
            self.waits[group.lanes] = back
            self.barrier[group.lanes] = number
        else:
            if machine.access.races:
                machine.access.races.arrive(group, number)
            machine.put_back(back, group)
        self.check(np.unique(blocks))
        return -1

    def _whole_blocks(self, group: Group) -> bool:
        """True when all living lanes of the blocks that the group touches are in it."""
        if group.index is None:
            return True
        version, known = group.memory.get("whole blocks", (-1, False))
        if version != self.machine.exits:
            live = self.machine.live.reshape(-1, self.machine.shape.block_warps)
            here = np.zeros_like(self.machine.live)
            here[group.warps] = group.active
            blocks = np.unique(group.block)
            known = bool((here.reshape(live.shape)[blocks] == live[blocks]).all())
            group.memory["whole blocks"] = (self.machine.exits, known)
        return bool(known)

    def _check_operands(self, group: Group, number: Array, count: Array | None, instruction: Instruction) -> None:
        bad = (number < 0) | (number >= BARRIERS)
        if bad.any():
            lane = int(np.argmax(bad))
            detail = f"{instruction.text} names barrier {number[lane]} of {BARRIERS}"
            raise self.machine.fault(DEADLOCK, instruction, detail, int(group.lanes[lane]))
        if count is not None and (count % np.uint32(32)).any():
            detail = f"{instruction.text} with a thread count of {int(count.max())}, which is no multiple of 32"
            raise self.machine.fault(DEADLOCK, instruction, detail, int(group.lanes[0]))

    def check(self, blocks: Array) -> bool:
        """Complete the barriers of these blocks that have everyone they wait for; True if there was one."""
        if not self.busy:
            return False
        machine = self.machine
        per = machine.shape.block_warps
        arrived = self.arrived.reshape(-1, per, BARRIERS)[blocks]
        live = machine.live.reshape(-1, per)[blocks][:, :, None]
        there = (arrived != 0) & ((live & ~arrived) == 0)
        threads = 32 * there.sum(axis=1)
        every = 32 * ((live != 0) | (arrived != 0)).sum(axis=1)
        expected = self.expected[blocks]
        complete = (expected != -1) & (threads >= np.where(expected == 0, every, expected)) & (threads > 0)
        for place, number in zip(*np.nonzero(complete), strict=True):
            self._release(int(blocks[place]), int(number))
        return bool(complete.any())

    def _release(self, block: int, number: int) -> None:
        machine = self.machine
        shape = machine.shape
        first = block * shape.threads
        here = np.arange(first, first + shape.threads)
        lanes = here[self.barrier[here] == number]
        warps = slice(block * shape.block_warps, (block + 1) * shape.block_warps)
        if machine.access.races:
            machine.access.races.barrier(block, number, self.arrived[warps, number], lanes)
        self.arrived[warps, number] = 0
        self.expected[block, number] = -1
        self.barrier[lanes] = -1
        voters = here[self.voters[here] == number]
        votes = self.votes[voters]
        self.voters[voters] = -1
        places = self.waits[lanes]
        for back in np.unique(places):
            part = Group(shape, lanes[places == back])
            if reduction := self.reductions.get(int(back)):
                how, register = reduction
                value = {"popc": np.uint32(np.count_nonzero(votes)), "and": votes.all(), "or": votes.any()}[how]
                machine.put(register, np.atleast_1d(np.asarray(value)), part.lanes)
            machine.put_back(int(back), part)
        if (self.expected == -1).all():
            self.busy = False

    def deadlock(self) -> Fault:
        """The Fault for lanes that wait at a barrier which cannot complete."""
        machine = self.machine
        lane = int(np.flatnonzero(self.barrier >= 0)[0])
        block, number = int(machine.shape.block[lane]), int(self.barrier[lane])
        warps = slice(block * machine.shape.block_warps, (block + 1) * machine.shape.block_warps)
        arrived, live = self.arrived[warps, number], machine.live[warps]
        missing = [str(place) for place in np.flatnonzero((live & ~arrived) != 0)]
        wanted = int(self.expected[block, number]) or "all"
        instruction = self.instructions[int(self.waits[lane])]
        detail = f"{instruction.text} waits for {wanted} threads at barrier {number}; {32 * int((arrived != 0).sum())} have arrived"
        detail += f", missing are lanes of warps {', '.join(missing)}" if missing else ""
        return machine.fault(DEADLOCK, instruction, detail, lane)
