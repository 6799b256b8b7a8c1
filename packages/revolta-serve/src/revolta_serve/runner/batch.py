"""From the slices of a step to the tensors of a model pass: block tables, indices, rotary factors, padding to row tiles."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from revolta_serve.cache.layout import BLOCK
from revolta_serve.model.batch import Batch, Kind
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.rope import Rotary
from revolta_serve.parallel.groups import Group
from revolta_serve.types import Slice
from sm70kernels.rows import TILE

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Rows:
    """Where the rows of each slice lie in a pass, in numpy before they become tensors."""

    first: list[int]
    """First row of each slice."""
    counts: list[int]
    """Valid rows of each slice."""
    total: int
    """Rows with padding."""


class BatchBuilder:
    """Keeps every request's block table and lays out passes.

    A plan carries only the blocks to append, so the work per step is proportional to its rows, not to the context.
    """

    def __init__(self, config: ModelConfig, rotary: Rotary, context: Group, requests: int, blocks_per_request: int) -> None:
        self.config, self.rotary, self.context = config, rotary, context
        self.table = np.zeros((requests, blocks_per_request), dtype=np.int32)
        self.lengths = np.zeros(requests, dtype=np.int64)
        self.free = list(range(requests))
        self.row_of: dict[int, int] = {}

    def admit(self, piece: Slice) -> None:
        """Append the slice's new blocks to its request's table, giving the request a table row on first sight."""
        row = self.row_of.get(piece.request)
        if row is None:
            row = self.row_of[piece.request] = self.free.pop()
            self.lengths[row] = 0
        if piece.blocks:
            end = self.lengths[row] + len(piece.blocks)
            self.table[row, self.lengths[row] : end] = piece.blocks
            self.lengths[row] = end

    def forget(self, request: int) -> None:
        """Drop a request's table; unknown requests were never seen by this worker and are ignored."""
        row = self.row_of.pop(request, None)
        if row is not None:
            self.free.append(row)

    def decode(self, slices: Sequence[Slice]) -> tuple[Batch, Rows]:
        """One row a request, in slice order. Products that need whole tiles pad by themselves."""
        count = len(slices)
        rows = Rows(list(range(count)), [1] * count, count)
        return self._build("decode", slices, rows), rows

    def prefill(self, slices: Sequence[Slice]) -> tuple[Batch, Rows]:
        """One ragged pass: every slice has its own 64-row tiles."""
        first, end = [], 0
        for piece in slices:
            first.append(end)
            end += -(-len(piece.tokens) // TILE["prefill"]) * TILE["prefill"]
        rows = Rows(first, [len(piece.tokens) for piece in slices], end)
        return self._build("prefill", slices, rows), rows

    def _build(self, kind: Kind, slices: Sequence[Slice], rows: Rows) -> Batch:
        c, total = self.config, rows.total
        window: Ints = np.full((total, c.ngram), c.eos, dtype=np.int64)
        position: Ints = np.full(total, -1, dtype=np.int64)
        rope: Ints = np.zeros(total, dtype=np.int64)
        request = np.zeros(total, dtype=np.int64)
        row_slot = np.full(total, -1, dtype=np.int32)
        first = np.zeros(total, dtype=np.int32)
        per_sequence = np.zeros((4, len(slices)), dtype=np.int32)
        tables = np.zeros(len(slices), dtype=np.int64)
        for n, (piece, begin, count) in enumerate(zip(slices, rows.first, rows.counts, strict=True)):
            span = slice(begin, begin + count)
            history = np.array(piece.before[::-1] + piece.tokens, dtype=np.int64)
            for back in range(c.ngram):
                window[span, back] = history[c.ngram - 1 - back : c.ngram - 1 - back + count]
            position[span] = np.arange(piece.start, piece.start + count)
            rope[span] = piece.rope_delta
            request[begin : begin + self._padded(kind, count)] = n
            row_slot[span], first[span] = piece.slot, begin
            per_sequence[:, n] = piece.slot, begin, count, piece.fresh
            tables[n] = self.row_of[piece.request]
        table = self.table[tables, : max(1, int(self.lengths[tables].max()))]
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
            sparse=bool(position.max() >= c.dense_positions),
        )

    @staticmethod
    def _padded(kind: Kind, count: int) -> int:
        """Rows that belong to a sequence with its padding."""
        return count if kind == "decode" else -(-count // TILE["prefill"]) * TILE["prefill"]

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
        cos, sin = self.rotary(np.broadcast_to(np.concatenate([p + rope, p // ratio * ratio + rope]), (3, 2 * len(p))))
        (cos, block_cos), (sin, block_sin) = cos.chunk(2), sin.chunk(2)
        return cos, sin, block_cos, block_sin
