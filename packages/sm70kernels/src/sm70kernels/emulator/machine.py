"""The scheduler: which lanes run which block next, and how they part and meet.

Lanes at the piece that comes first (see reconverge) run first, which brings a warp together again after a branch or a loop. Since that
alone would let a spinning lane starve the one it waits for, the group that waited longest gets a turn now and then where atomics or
strong loads are executed. With a seed, block, warps and turn are drawn at random instead, as independent thread scheduling allows.

A `*.sync` instruction begins a block of its own; when every warp of the group is whole, it and what precedes run as one chain, and
otherwise its lanes wait until those their mask names have come.
"""

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.access import Access
from sm70kernels.emulator.barriers import Barriers
from sm70kernels.emulator.emitter import SPECIAL
from sm70kernels.emulator.faults import DEADLOCK, ENDLESS, TRAP, Fault
from sm70kernels.emulator.group import Group, Shape
from sm70kernels.emulator.syntax import Instruction

if TYPE_CHECKING:
    from sm70kernels.emulator.launch import Launch

Array = NDArray[Any]

PATIENCE = 16
"""Atomics and strong loads (what a spinning lane executes) after which the group that waited longest runs, however high its block."""

STRETCH = 16
"""Pieces it may then run before the lowest come first again."""

HERE = -1
"""Result of a block's code: the lanes have been sent on already."""


class Machine:
    """A chunk of blocks in flight. R: the registers, each an array of one element (the same for all lanes) or of one for each lane."""

    def __init__(self, launch: "Launch", first: int, blocks: int) -> None:
        self.launch = launch
        self.program = launch.program
        self.shape = Shape(launch.threads, blocks, first)
        self.everyone = Group(self.shape, None)
        self.rank = self.program.rank.__getitem__
        # A register nobody wrote holds anything on a GPU; here every bit is set, which is NaN or an address that is nowhere.
        self.R: list[Array] = [np.frombuffer(b"\xff" * np.dtype(kind).itemsize, kind).copy() for kind in self.program.kinds]
        self._special_registers()
        self.live = self.shape.existing.copy()
        self.access = Access(self)
        self.barriers = Barriers(self)
        self.exits = 0
        self.links: dict[int, Array] = {}
        self.ready: dict[int, tuple[int, list[Group]]] = {}
        self.turn = self.polls = self.favoured = self.stretch = 0
        self.common_steps = 0
        self.steps = np.zeros(self.shape.warps, np.int64)
        self.waits = np.full(self.shape.lanes, HERE)
        self.wait_key = np.zeros(self.shape.lanes, np.int64)
        self.wait_mask = np.zeros(self.shape.lanes, np.uint32)
        self.random = None if launch.order is None else Random(launch.order * 1000003 + first)
        self.put_back(self.program.entry, self.everyone)

    def _special_registers(self) -> None:
        shape, (nx, ny, nz), (gx, gy, gz) = self.shape, self.launch.block, self.launch.grid
        thread = shape.thread.astype(np.uint32)
        block = (shape.block + shape.first).astype(np.uint32)
        place = shape.place.astype(np.uint32)
        bit = np.uint32(1) << place
        known: dict[str, Any] = {
            "%tid.x": thread % nx, "%tid.y": thread // nx % ny, "%tid.z": thread // (nx * ny),
            "%ctaid.x": block % gx, "%ctaid.y": block // gx % gy, "%ctaid.z": block // (gx * gy),
            "%ntid.x": nx, "%ntid.y": ny, "%ntid.z": nz, "%nctaid.x": gx, "%nctaid.y": gy, "%nctaid.z": gz,
            "%laneid": place, "%warpid": thread // 32, "%nwarpid": shape.block_warps, "%smid": block % 80, "%nsmid": 80, "%gridid": 1,
            "%lanemask_eq": bit, "%lanemask_lt": bit - np.uint32(1), "%lanemask_le": (bit << np.uint32(1)) - np.uint32(1),
            "%lanemask_gt": ~((bit << np.uint32(1)) - np.uint32(1)), "%lanemask_ge": ~(bit - np.uint32(1)),
            "%dynamic_smem_size": self.launch.dynamic_shared, "%total_smem_size": self.launch.shared_size,
        }  # fmt: skip
        for name, kind in SPECIAL.items():
            value = np.atleast_1d(np.asarray(known[name], kind))
            if value.size > 1 and (value == value[0]).all():
                value = value[:1].copy()
            self.R[self.program.registers[name][0]] = value

    # Registers

    def put(self, index: int, value: Array, lanes: Array) -> None:
        """Assign to a register in some lanes only."""
        register = self.R[index]
        if register.size != self.shape.lanes:
            self.R[index] = register = np.full(self.shape.lanes, register[0])
        register[lanes] = value

    def clock(self, name: str) -> Array:
        """A clock that advances by one with every block executed, and by 2^20 nanoseconds a chunk for %globaltimer."""
        now = self.launch.now
        value = now >> 32 if name.endswith("_hi") else now
        return np.array([value & 0xFFFFFFFF if "64" not in name and name != "%globaltimer" else value],
                        np.uint64 if name in ("%clock64", "%globaltimer") else np.uint32)  # fmt: skip

    # Control flow, called by generated code

    def branch(self, group: Group, condition: Array, taken: int, other: int) -> int:
        """Send the lanes where the condition holds to `taken`, the rest to `other`."""
        if condition.size == 1:
            return taken if condition[0] else other
        count = int(np.count_nonzero(condition))
        if count == group.n:
            return taken
        if count == 0:
            return other
        self.put_back(taken, group.part(condition))
        self.put_back(other, group.part(~condition))
        return HERE

    def table(self, group: Group, index: Array, targets: tuple[int, ...], instruction: Instruction) -> int:
        """brx.idx: send every lane to the target of its index."""
        index = group.spread(index)
        if int(index.max()) >= len(targets):
            lane = int(np.argmax(index >= len(targets)))
            detail = f"{instruction.base} with index {index[lane]} of {len(targets)} targets"
            raise self.fault("out of bounds", instruction, detail, int(group.lanes[lane]))
        for target in set(targets):
            chosen = np.isin(index, [place for place, pc in enumerate(targets) if pc == target])
            if chosen.any():
                self.put_back(target, group.part(chosen))
        return HERE

    def call(self, group: Group, function: int, entry: int, back: int) -> int:
        """Enter a device function; its lanes return to block `back`."""
        link = self.links.setdefault(function, np.full(self.shape.lanes, HERE))
        link[group.lanes] = back
        return entry

    def ret(self, group: Group, function: int) -> int:
        """Return from a device function, each lane to where it came from."""
        link = group.pick(self.links[function])
        targets = np.unique(link)
        if len(targets) == 1:
            return int(targets[0])
        for target in targets:
            self.put_back(int(target), group.part(link == target))
        return HERE

    def exit(self, group: Group) -> int:
        """The lanes have ended."""
        self.live[group.warps] &= ~group.active
        self.exits += 1
        self.barriers.check(np.unique(group.warps // self.shape.block_warps))
        return HERE

    def trap(self, group: Group, instruction: Instruction) -> int:
        raise self.fault(TRAP, instruction, instruction.text, int(group.lanes[0]))

    # Scheduling

    def put_back(self, pc: int, group: Group) -> None:
        """Lanes are ready to run block `pc`."""
        if pc in self.ready:
            self.ready[pc][1].append(group)
        else:
            self.ready[pc] = (self.turn, [group])

    def _merge(self, groups: list[Group]) -> Group:
        if len(groups) == 1:
            return groups[0]
        index = np.sort(np.concatenate([group.lanes for group in groups]))
        return self.everyone if len(index) == self.shape.lanes else Group(self.shape, index)

    def _pick(self) -> tuple[int, Group]:
        self.turn += 1
        if self.random is None:
            pc = min(self.ready, key=self.rank)
            self.stretch = 0
            if len(self.ready) > 1 and self.polls - self.favoured > PATIENCE:
                pc = min(self.ready, key=lambda place: self.ready[place][0])
                self.favoured, self.stretch = self.polls, STRETCH
            return pc, self._merge(self.ready.pop(pc)[1])
        pc = self.random.choice(sorted(self.ready))
        group = self._merge(self.ready.pop(pc)[1])
        if len(group.warps) > 1 and self.random.random() < 0.5:
            chosen = np.array([self.random.random() < 0.5 for _ in group.warps])
            if chosen.any() and not chosen.all():
                lanes = np.repeat(chosen, group.counts)
                self.put_back(pc, group.part(~lanes))
                group = group.part(lanes)
        return pc, group

    def _gives_way(self, pc: int) -> bool:
        """True when others come before a group that has just reached `pc`, or may join it there."""
        if not self.ready or (self.random is None and self.stretch > 0):
            return False
        return self.random is not None or self.rank(pc) >= min(map(self.rank, self.ready)) or self.polls - self.favoured > PATIENCE

    def whole(self, group: Group) -> bool:
        """True when every warp of the group has all its living lanes in it."""
        if group.index is None:
            return True
        version, known = group.memory.get("whole", (-1, False))
        if version != self.exits:
            known = bool((self.live[group.warps] == group.active).all())
            group.memory["whole"] = (self.exits, known)
        return bool(known)

    def run(self, polls: int) -> bool:
        """Run until every lane has ended, or for a number of atomics and strong loads; return whether all lanes have ended."""
        blocks = self.program.blocks
        last = self.polls + polls
        while True:
            while self.ready:
                if self.polls >= last:
                    return False
                pc, group = self._pick()
                while pc != HERE:
                    block = blocks[pc]
                    if self.whole(group):
                        pc = self._execute(block.chain(), block.chain_pieces, group)
                    elif block.sync is None:
                        pc = self._execute(block.single(), block.pieces, group)
                    else:
                        self._arrive(pc, group)
                        break
                    self.polls += block.polls
                    self.stretch -= 1
                    if pc != HERE and (self._gives_way(pc) or self.polls >= last):
                        self.put_back(pc, group)
                        break
            if not self.live.any():
                return True
            if not self.barriers.check(np.arange(self.shape.blocks)) and not self.ready:
                self._deadlock()

    def _execute(self, code: Any, pieces: tuple[int, ...], group: Group) -> int:
        launch = self.launch
        launch.now += 1
        length = launch.account(pieces, group)
        if group.index is None:
            self.common_steps += length
        else:
            self.steps[group.warps] += length
        if self.common_steps > launch.steps or (group.index is not None and self.steps[group.warps[0]] + self.common_steps > launch.steps):
            self._endless(pieces[0], group)
        result: int = code(self, self.R, group)
        return result

    def _arrive(self, pc: int, group: Group) -> None:
        """Lanes of warps that are not whole come to a `*.sync`: run it in those whose mask is complete."""
        block = self.program.blocks[pc]
        assert block.sync is not None
        key = block.sync
        lanes = group.lanes
        self.waits[lanes] = pc
        self.wait_key[lanes] = key
        self.wait_mask[lanes] = block.mask()(self, self.R, group)
        waiting = np.flatnonzero(self.wait_key == key)
        warp = self.shape.warp[waiting]
        present = np.zeros(self.shape.warps, np.uint32)
        np.bitwise_or.at(present, warp, np.uint32(1) << self.shape.place[waiting].astype(np.uint32))
        needed = self.wait_mask[waiting] & self.shape.existing[warp]
        released = waiting[(needed & ~present[warp]) == 0]
        if not len(released):
            return
        self.wait_key[released] = 0
        places = self.waits[released]
        self.waits[released] = HERE
        for place in np.unique(places):
            part = Group(self.shape, released[places == place])
            block = self.program.blocks[place]
            following = self._execute(block.single(), block.pieces, part)
            if following != HERE:
                self.put_back(following, part)

    # Faults

    def fault(self, kind: str, instruction: Instruction | None, detail: str, lane: int | None, address: int | None = None) -> Fault:
        """Build the Fault for an instruction and a lane of the chunk."""
        block = thread = None
        if lane is not None:
            thread = self.launch.thread_index(int(self.shape.thread[lane]))
            block = self.launch.block_index(int(self.shape.block[lane]) + self.shape.first)
        line, ptx_line = (instruction.source, instruction.ptx_line) if instruction else ("", 0)
        return Fault(kind, self.program.name, detail, line=line, ptx_line=ptx_line, block=block, thread=thread, address=address)

    def _endless(self, pc: int, group: Group) -> None:
        instruction = self.program.blocks[pc].instructions[0] if self.program.blocks[pc].instructions else None
        detail = f"a warp has executed more than {self.launch.steps} instructions (pass steps= to allow more)"
        raise self.fault(ENDLESS, instruction, detail, int(group.lanes[0]))

    def _deadlock(self) -> None:
        waiting = np.flatnonzero(self.wait_key)
        if len(waiting):
            lane = int(waiting[0])
            warp = self.shape.warp[lane]
            block = self.program.blocks[self.waits[lane]]
            needed = int(self.wait_mask[lane] & self.shape.existing[warp])
            same = waiting[(self.shape.warp[waiting] == warp) & (self.wait_key[waiting] == self.wait_key[lane])]
            present = int(np.bitwise_or.reduce(np.uint32(1) << self.shape.place[same].astype(np.uint32)))
            missing = needed & ~present
            ended = missing & ~int(self.live[warp])
            detail = f"{block.instructions[0].text} waits for lanes {missing:#010x} of mask {int(self.wait_mask[lane]):#010x}"
            detail += f", of which {ended:#010x} have exited" if ended else ", which never arrive"
            raise self.fault(DEADLOCK, block.instructions[0], detail, lane)
        raise self.barriers.deadlock()
