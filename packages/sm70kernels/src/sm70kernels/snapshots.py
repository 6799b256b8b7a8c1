"""Snapshots inside a call: the state of a sequence after its first rows, stored to further slots of the pool it runs in.

A call brings pairs (keep_slot, keep_at), i32 [N, KS]: what sequence i would hold after its first keep_at[i, j] rows goes to slot
keep_slot[i, j], with the bits a call of only those rows would leave in the running slot. A pair stores nothing when its slot is
negative, when keep_at is outside 1 .. rows[i], or when its sequence is inactive. The slots of all pairs differ from each other and
from every running slot of the call. The running slot is written last.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Kept(NamedTuple):
    """One snapshot to store: the state of sequence `i` after its first `at` rows, to `slot`."""

    i: int
    at: int
    slot: int


def kept(keep_slot: Tensor, keep_at: Tensor, slot: Sequence[int], rows: Sequence[int]) -> list[Kept]:
    """Return the pairs of a call that store something, sequence after sequence; slot and rows are those of the N sequences."""
    # Nearly every decode step keeps nothing: that answer must cost one look.
    if not keep_slot.numel() or keep_slot.numpy().max() < 0:
        return []
    sequences = enumerate(zip(slot, rows, keep_slot.tolist(), keep_at.tolist(), strict=True))
    return [
        Kept(i, at, target)
        for i, (held, count, targets, ends) in sequences
        for target, at in zip(targets, ends, strict=True)
        if held >= 0 and target >= 0 and 1 <= at <= count
    ]
