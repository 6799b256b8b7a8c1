"""From the slices of a step to the tensors of a model pass: block tables, indices, rotary factors, padding to row tiles."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from revolta_serve.cache.layout import BLOCK, WIDEST
from revolta_serve.errors import EngineError
from revolta_serve.model.batch import Batch, Kind
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.record import Record
from revolta_serve.model.rope import Rotary
from revolta_serve.parallel.groups import Group
from revolta_serve.types import Slice
from sm70kernels.rows import TILE

Ints = NDArray[np.int64]


class BatchBuilder:
    """Keeps every request's block table and lays out passes.

    A plan carries only the blocks to append. A pass gets its block tables as one array copy: a fifth of a millisecond at 500,000 tokens.
    """

    def __init__(self, config: ModelConfig, rotary: Rotary, context: Group, requests: int, blocks_per_request: int) -> None:
        self.config, self.rotary, self.context = config, rotary, context
        self.table = np.zeros((requests, blocks_per_request), dtype=np.int32)
        self.lengths = [0] * requests
        self.free = list(range(requests))
        self.row_of: dict[int, int] = {}
        self.none = torch.empty((requests, 0), dtype=torch.int32)
        """Snapshots of a decode pass: it keeps them after the pass."""

    def admit(self, piece: Slice) -> None:
        """Append the slice's new blocks to its request's table and overwrite what it swaps; a first sight takes a table row.

        Raises EngineError for a slice that cannot be laid out, and for a first sight of a number that is still held: its blocks would
        become another request's.
        """
        _check(piece)
        name, row = f"request number {piece.request}", self.row_of.get(piece.request)
        if row is not None and piece.sampling is not None:
            raise EngineError(f"{name} is new in this step but already known here; forget it first")
        if row is None:
            if piece.sampling is None:
                raise EngineError(f"{name} is not known here and comes without sampling parameters; send them with its first slice")
            row = self.row_of[piece.request] = self.free.pop()
            self.lengths[row] = 0
        if piece.blocks:
            end, most = self.lengths[row] + len(piece.blocks), self.table.shape[1]
            if end > most:
                raise EngineError(f"{name}: {end} blocks, but a block table holds {most}; raise schedule.max_model_len or send fewer")
            self.table[row, self.lengths[row] : end] = piece.blocks
            self.lengths[row] = end
        held, end = self.lengths[row], piece.start + len(piece.tokens)
        if end > held * BLOCK:
            raise EngineError(f"{name}: rows up to position {end - 1}, but {held} blocks of {BLOCK} tokens; send the blocks they need")
        for index, block in piece.swaps:
            if not 0 <= index < held:
                raise EngineError(f"{name}: swap of block {index} of {held}; only a block it holds can be swapped")
            self.table[row, index] = block

    def forget(self, request: int) -> None:
        """Drop a request's table; unknown requests were never seen by this worker and are ignored."""
        row = self.row_of.pop(request, None)
        if row is not None:
            self.free.append(row)

    def decode(self, slices: Sequence[Slice]) -> Batch:
        """One row a request, in slice order. Products that need whole tiles pad by themselves.

        A few rows are laid out in Python numbers: every numpy call that this saves costs as much as a row.
        """
        c, ranks, ratio = self.config, self.context.size, self.config.index_ratio
        places, window, vectors, indices, angles, opening = [], [], [], [], [], []
        for n, piece in enumerate(slices):
            p, row = piece.start, self.row_of[piece.request]
            block, offset = self.table.item(row, p // BLOCK), p % BLOCK
            here, closes = p % ranks == self.context.rank, (p + 1) % ratio == 0
            places.append(row)
            window.append(piece.tokens + piece.before)
            vectors.append((p, n, (p + 1) // ratio, piece.slot, 1, piece.fresh))
            kv = block * (BLOCK // ranks) + offset // ranks if here else -1
            key = block * (BLOCK // ratio) + offset // ratio if closes else -1
            indices.append((piece.tokens[0], kv, key))
            angles.append(p + piece.rope_delta)
            opening.append(p // ratio * ratio + piece.rope_delta)
        table = self.table[places, : max(1, *(self.lengths[row] for row in places))]
        position, number, visible, slot, one, fresh = torch.from_numpy(np.array(vectors, np.int32).T.copy()).unbind(0)
        ids, kv_index, key_index = torch.from_numpy(np.array(indices, np.int64).T.copy()).unbind(0)
        cos, sin, block_cos, block_sin = self._factors(np.array(angles + opening, np.int64))
        return Batch(
            kind="decode", ids=ids, context=torch.from_numpy(np.array(window, np.int64)), position=position,
            cos=cos, sin=sin, block_cos=block_cos, block_sin=block_sin, request=number, block_table=torch.from_numpy(table),
            kv_index=kv_index, key_index=key_index, visible=visible, row_slot=slot, first=number,
            slot=slot, start=number, rows=one, fresh=fresh, keep_slot=self.none[: len(slices)], keep_at=self.none[: len(slices)],
            sparse=max(piece.start for piece in slices) >= c.dense_positions,
        )  # fmt: skip

    def verify(self, slices: Sequence[Slice]) -> Batch:
        """Several decode rows a request, as many a request as the longest slice has; the pass records and leaves the states alone."""
        widest = max(len(piece.tokens) for piece in slices)
        return self._lay_out(slices, "decode", [widest] * len(slices), Record())

    def prefill(self, slices: Sequence[Slice]) -> Batch:
        """One ragged pass: every slice has its own 64-row tiles."""
        tile = TILE["prefill"]
        return self._lay_out(slices, "prefill", [-(-len(piece.tokens) // tile) * tile for piece in slices], None)

    def _lay_out(self, slices: Sequence[Slice], kind: Kind, sizes: Sequence[int], record: Record | None) -> Batch:
        """Each slice's rows with padding up to its entry of `sizes`, slice after slice."""
        c, total = self.config, sum(sizes)
        window: Ints = np.full((total, c.ngram), c.eos, dtype=np.int64)
        position: Ints = np.full(total, -1, dtype=np.int64)
        rope: Ints = np.zeros(total, dtype=np.int64)
        request = np.zeros(total, dtype=np.int64)
        row_slot = np.full(total, -1, dtype=np.int32)
        first = np.zeros(total, dtype=np.int32)
        per_sequence = np.zeros((4, len(slices)), dtype=np.int32)
        # A commit takes one snapshot a request, prefill as many as its longest list.
        most = max(int(record is not None), *(len(piece.snapshots) for piece in slices))
        keep = np.full((2, len(slices), most), -1, dtype=np.int32)
        tables = [self.row_of[piece.request] for piece in slices]
        begin = 0
        for n, (piece, size) in enumerate(zip(slices, sizes, strict=True)):
            count = len(piece.tokens)
            span = slice(begin, begin + count)
            history = np.array(piece.before[::-1] + piece.tokens, dtype=np.int64)
            for back in range(c.ngram):
                window[span, back] = history[c.ngram - 1 - back : c.ngram - 1 - back + count]
            position[span] = np.arange(piece.start, piece.start + count)
            rope[span] = piece.rope_delta
            request[begin : begin + size] = n
            row_slot[span], first[span] = piece.slot, begin
            per_sequence[:, n] = piece.slot, begin, count, piece.fresh
            for place, (after, target) in enumerate(piece.snapshots):
                keep[:, n, place] = target, after
            begin += size
        table = self.table[tables, : max(1, *(self.lengths[row] for row in tables))]
        kv_index, key_index = self._indices(position, table, request)
        cos, sin, block_cos, block_sin = self._rotate(position, rope)
        slot, start, valid, fresh = (torch.from_numpy(vector) for vector in per_sequence)
        return Batch(
            kind=kind,
            ids=torch.from_numpy(np.ascontiguousarray(window[:, 0])),
            context=torch.from_numpy(window),
            position=torch.from_numpy(position.astype(np.int32)),
            cos=cos,
            sin=sin,
            block_cos=block_cos,
            block_sin=block_sin,
            request=torch.from_numpy(request.astype(np.int32)),
            block_table=torch.from_numpy(table),
            kv_index=kv_index,
            key_index=key_index,
            visible=torch.from_numpy(((position + 1) // c.index_ratio).astype(np.int32)),
            row_slot=torch.from_numpy(row_slot),
            first=torch.from_numpy(first),
            slot=slot,
            start=start,
            rows=valid,
            fresh=fresh,
            keep_slot=torch.from_numpy(keep[0]),
            keep_at=torch.from_numpy(keep[1]),
            sparse=bool(position.max() >= c.dense_positions),
            record=record,
        )

    def _indices(self, position: Ints, table: NDArray[np.int32], request: Ints) -> tuple[Tensor, Tensor]:
        """Flat pool indices of each row's K/V on this rank and of the index key it completes; -1 for none."""
        ratio, ranks = self.config.index_ratio, self.context.size
        valid = position >= 0
        p = np.where(valid, position, 0)
        block = table[request, p // BLOCK].astype(np.int64)
        here = valid & (p % ranks == self.context.rank)
        kv = np.where(here, block * (BLOCK // ranks) + (p % BLOCK) // ranks, -1)
        closes = valid & ((p + 1) % ratio == 0)
        key = np.where(closes, block * (BLOCK // ratio) + (p % BLOCK) // ratio, -1)
        return torch.from_numpy(kv), torch.from_numpy(key)

    def _rotate(self, position: Ints, rope: Ints) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """cos and sin at each row and at the first token of its index block, all axes equal (text)."""
        ratio = self.config.index_ratio
        p = np.maximum(position, 0)
        return self._factors(np.concatenate([p + rope, p // ratio * ratio + rope]))

    def _factors(self, angles: Ints) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """cos and sin at the first half of `angles`, then cos and sin at the second half."""
        cos, sin = self.rotary(angles[None].repeat(3, 0))
        (cos, block_cos), (sin, block_sin) = cos.chunk(2), sin.chunk(2)
        return cos, sin, block_cos, block_sin


def _check(piece: Slice) -> None:
    """Raise EngineError for a slice that would be computed from, or stored to, something that is not there."""
    rows, name = len(piece.tokens), f"request number {piece.request}"
    if piece.kind == "decode" and not (0 < rows <= WIDEST and not piece.fresh and len(piece.snapshots) <= 1):
        raise EngineError(
            f"{name}: a decode slice of {rows} rows, {len(piece.snapshots)} snapshots and fresh={piece.fresh}; it may have 1 to {WIDEST} "
            "rows and one snapshot, and it continues a state"
        )
    if piece.sampling is not None and piece.fresh == (piece.restore >= 0):
        raise EngineError(f"{name}: first seen with fresh={piece.fresh}, restore={piece.restore}; it starts from zero or from a snapshot")
    if piece.restore >= 0 and piece.start % BLOCK:
        raise EngineError(f"{name}: restore at position {piece.start}; snapshots exist at multiples of {BLOCK} only")
    for after, slot in piece.snapshots:
        if not 0 < after <= rows or (piece.start + after) % BLOCK:
            raise EngineError(
                f"{name}: snapshot after {after} of {rows} rows from position {piece.start} for slot {slot}; it must lie in the slice and "
                f"on a multiple of {BLOCK}"
            )
