"""Warp-wide exchange: shfl vote match activemask bar.warp.sync. Source: PTX ISA 8.7, sections 9.7.9.6, 9.7.13.

A mask may name lanes that do not exist because the block's last warp is not full, as the full mask of a 48-thread block does; it may
not name lanes that have exited. A value that shfl takes from a lane which does not take part is undefined on the GPU. Here it is POISON
(a NaN as float), so that a result which depends on it shows.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sm70kernels.emulator.emitter import Emitter, expect, form, handles, helper
from sm70kernels.emulator.faults import DEADLOCK
from sm70kernels.emulator.group import Group
from sm70kernels.emulator.syntax import Instruction

if TYPE_CHECKING:
    from sm70kernels.emulator.machine import Machine

Array = NDArray[Any]

POISON = np.uint32(0xFFFFDEAD)
EVERY = np.uint32(0xFFFFFFFF)


@helper
def join(machine: "Machine", group: Group, mask: Array, instruction: Instruction) -> None:
    """Check that every lane's mask names itself and lanes that take part only, and note that they have met."""
    races = machine.access.races
    if mask.size == 1 and mask[0] == EVERY and group.index is None:
        if races:
            races.sync(group, mask)
        return
    wanted = group.spread(mask) & machine.shape.existing[group.warp]
    active = np.repeat(group.active, group.counts)
    missing = wanted & ~active
    if missing.any():
        position = int(np.argmax(missing != 0))
        detail = f"{instruction.text} waits for lanes {int(missing[position]):#010x}, which have exited"
        raise machine.fault(DEADLOCK, instruction, detail, int(group.lanes[position]))
    outside = (wanted & group.bit) == 0
    if outside.any():
        position = int(np.argmax(outside))
        detail = f"{instruction.text} by a lane that its mask {int(group.spread(mask)[position]):#010x} does not name"
        raise machine.fault(DEADLOCK, instruction, detail, int(group.lanes[position]))
    if races:
        races.sync(group, mask)


def _sources(machine: "Machine", group: Group, mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """Return (source position in the group or -1, predicate) for every lane."""
    place = group.place
    b, c = b.astype(np.int64) & 31, c.astype(np.int64)
    clamp, segment = c & 31, (c >> 8) & 31
    low = place & segment
    high = low | (clamp & ~segment)
    if mode == "up":
        source = place - b
        inside = source >= high
    elif mode == "down":
        source = place + b
        inside = source <= high
    elif mode == "bfly":
        source = place ^ b
        inside = source <= high
    else:
        source = low | (b & ~segment)
        inside = source <= high
    source = np.where(inside, source, place)
    exists = source < machine.shape.warp_size[group.warp]
    lane = machine.shape.warp_start[group.warp] + np.where(exists, source, place)
    return np.where(exists, group.position[lane], -1), np.broadcast_to(inside, (group.n,))


@helper
def shuffle(machine: "Machine", group: Group, mode: str, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """shfl.sync: return (values, predicate)."""
    if a.size == 1 and group.index is None and not (machine.shape.threads & 31):
        a = group.spread(a)
    key = ("shuffle", mode, int(b[0]), int(c[0])) if b.size == 1 and c.size == 1 else None
    found = group.memory.get(key) if key else None
    if found is None:
        source, inside = _sources(machine, group, mode, b, c)
        found = source, np.ascontiguousarray(inside), bool((source < 0).any())
        if key:
            group.memory[key] = found
    source, inside, holes = found
    values = group.spread(a).take(source, mode="wrap")
    if holes:
        values[source < 0] = POISON
    return values, inside.copy()


@handles("shfl")
def emit_shuffle(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "sync up down bfly idx")
    dst, a, b, c, mask = expect(i, 5)
    mode = modifiers - {"sync"}
    if kind != "b32" or "sync" not in modifiers or len(mode) != 1:
        raise i.unknown("shfl is shfl.sync.{up,down,bfly,idx}.b32")
    e.emit(f"join(M, G, {e.value(mask, 'b32')}, {e.share('I', i)})")
    values = ", ".join(e.value(operand, "b32") for operand in (a, b, c))
    pair = e.temporary(f"shuffle(M, G, {next(iter(mode))!r}, {values})")
    for place, target in enumerate(dst.inner or (dst,)):
        if target.kind != "sink":
            e.set(target, "b32" if place == 0 else "pred", f"{pair}[{place}]")


@helper
def vote(group: Group, how: str, condition: Array, mask: Array) -> Array:
    """vote.sync among the lanes of the mask: ballot gives uint32, the others predicates."""
    votes = np.bitwise_or.reduceat(np.where(group.spread(condition), group.bit, np.uint32(0)), group.starts)
    ballot = np.repeat(votes, group.counts) & mask
    if how == "ballot":
        return ballot
    electorate = np.repeat(group.active, group.counts) & mask
    everyone, nobody = ballot == electorate, ballot == 0
    results: dict[str, Array] = {"all": everyone, "any": ~nobody, "uni": everyone | nobody}
    return results[how]


@handles("vote")
def emit_vote(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "sync all any uni ballot")
    dst, condition, mask = expect(i, 3)
    how = modifiers - {"sync"}
    if "sync" not in modifiers or len(how) != 1 or (kind == "b32") != (how == {"ballot"}):
        raise i.unknown("vote is vote.sync.{all,any,uni}.pred or vote.sync.ballot.b32")
    members = e.value(mask, "b32")
    e.emit(f"join(M, G, {members}, {e.share('I', i)})")
    e.set(dst, kind, f"vote(G, {next(iter(how))!r}, {e.value(condition, 'pred')}, {members})")


@helper
def match(group: Group, value: Array, mask: Array, every: bool) -> tuple[Array, Array]:
    """match.sync: (lanes of the mask with an equal value, predicate); with `every`, the mask if all are equal, else 0."""
    rows = group.rows(value)
    bits = group.rows(group.bit) if group.full else None
    if bits is None:
        table = np.zeros(len(group.starts) * 32, np.uint32)
        table[group.rank * 32 + group.place] = group.bit
        bits = table.reshape(-1, 32)
    same = np.zeros(rows.shape, np.uint32)
    for place in range(32):
        same |= np.where(rows == rows[:, place : place + 1], bits[:, place : place + 1], np.uint32(0))
    found = same[group.rank, group.place] & mask
    if not every:
        return found, found != 0
    agreed = found == (np.repeat(group.active, group.counts) & mask)
    return np.where(agreed, group.spread(mask), np.uint32(0)), agreed


@handles("match")
def emit_match(e: Emitter, i: Instruction) -> None:
    modifiers, (kind,) = form(i, "sync any all")
    dst, a, mask = expect(i, 3)
    how = modifiers - {"sync"}
    if kind not in ("b32", "b64") or "sync" not in modifiers or len(how) != 1:
        raise i.unknown("match is match.{any,all}.sync.{b32,b64}")
    members = e.value(mask, "b32")
    e.emit(f"join(M, G, {members}, {e.share('I', i)})")
    pair = e.temporary(f"match(G, {e.value(a, kind)}, {members}, {how == {'all'}})")
    targets = dst.inner or (dst,)
    if len(targets) > (1 if how == {"any"} else 2):
        raise i.unknown("only match.all gives a predicate")
    for place, target in enumerate(targets):
        if target.kind != "sink":
            e.set(target, "b32" if place == 0 else "pred", f"{pair}[{place}]")


@helper
def active_mask(group: Group) -> Array:
    """activemask: the lanes of the warp that run together now."""
    return np.repeat(group.active, group.counts)


@handles("activemask")
def emit_active_mask(e: Emitter, i: Instruction) -> None:
    _, (kind,) = form(i, "")
    (dst,) = expect(i, 1)
    e.set(dst, kind, "active_mask(G)")
