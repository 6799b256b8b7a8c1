"""The rows of one model pass: what every layer needs to know about them and nothing about who asked.

Passes are of one kind: requests with one decode row, requests with several, prompts. Routes go by kind, never by row count.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from revolta_serve.model.record import Record

Kind = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Batch:
    """M rows of N sequences. Padding rows have position -1, slot -1 and indices -1; they are never read or stored.

    kind decode: M = N·T; sequence n owns the first rows[n] of rows n·T .. n·T+T-1. T = 1 in an ordinary step; more rows are a verify
    pass, which has a record.
    kind prefill: sequence n owns rows start[n] .. start[n]+rows[n]-1 and the padding up to the next multiple of 64.
    """

    kind: Kind
    ids: Tensor
    """i64[M] token ids."""
    context: Tensor
    """i64[M, G] the id of the row and the G-1 raw ids before it, newest first: the n-gram window."""
    position: Tensor
    """i32[M] index of the token in its sequence."""
    cos: Tensor
    sin: Tensor
    """act[M, RH] rotary factors at the row's position, attention factor included."""
    block_cos: Tensor
    block_sin: Tensor
    """act[M, RH] the same at the first token of the index block the row belongs to."""
    request: Tensor
    """i32[M] row of block_table."""
    block_table: Tensor
    """i32[N, PT] ids of the sequence's token blocks, in order."""
    kv_index: Tensor
    """i64[M] where this rank stores the row's K and V (block · plane + offset), -1 if another rank does."""
    key_index: Tensor
    """i64[M] where the index block closed by this row is stored, -1 if the row closes none."""
    visible: Tensor
    """i32[M] complete index blocks at this row, its own included."""
    row_slot: Tensor
    """i32[M] state slot of the row's sequence."""
    first: Tensor
    """i32[M] the first row of the same sequence in this batch."""
    slot: Tensor
    start: Tensor
    rows: Tensor
    fresh: Tensor
    """i32[N] state slot, first row, number of valid rows, and 1 where the sequence starts from an empty state."""
    keep_slot: Tensor
    keep_at: Tensor
    """i32[N, KS] snapshots: the state after keep_at rows of the sequence goes to slot keep_slot, -1 for none."""
    sparse: bool
    """Whether any row is beyond the reach of dense attention: otherwise index blocks need no scores."""
    record: Record | None = None
    """Where a verify pass leaves the inputs of recurrent states, which stay as they are until it is committed."""

    @property
    def write(self) -> bool:
        """Whether the pass advances the recurrent states itself."""
        return self.record is None
