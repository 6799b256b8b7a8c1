"""Decode rows are laid out in Python numbers, other rows in numpy: two forms of the same formulas, held to each other.

And what the block tables take, and refuse, from a plan.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from revolta_serve.errors import EngineError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.rope import Rotary
from revolta_serve.parallel.groups import Group
from revolta_serve.runner.batch import BatchBuilder
from revolta_serve.types import SamplingParams, Slice
from revolta_serve.weights.tiny import make_tiny

FIELDS = ("ids", "context", "position", "cos", "sin", "block_cos", "block_sin", "kv_index", "key_index", "visible", "row_slot")
PER_SEQUENCE = ("slot", "rows", "fresh", "block_table")


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return make_tiny(tmp_path, layers=4)


def builder_of(config: ModelConfig, rank: int = 0, ranks: int = 1) -> BatchBuilder:
    return BatchBuilder(config, Rotary(config, torch.float32), Group(rank, ranks), 8, 16)


def first_of(number: int, **changes: Any) -> Slice:
    """A first sight without rows: the request becomes known."""
    values = dict(
        request=number, kind="prefill", slot=0, start=0, tokens=(), before=(1, 1), fresh=True, sampling=SamplingParams(temperature=0.0)
    )
    return Slice(**{**values, **changes})


def random_slice(config: ModelConfig, rng: random.Random, number: int, rows: int) -> Slice:
    position = rng.randrange(1000 - rows)
    return Slice(
        request=number,
        kind="decode",
        slot=rng.randrange(8),
        start=position,
        tokens=tuple(rng.randrange(config.vocab) for _ in range(rows)),
        before=tuple(rng.randrange(config.vocab) for _ in range(config.ngram - 1)),
        blocks=tuple(rng.sample(range(500), (position + rows - 1) // 64 + 1)),
        rope_delta=rng.randrange(50),
    )


@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_a_decode_row_is_where_prefill_would_put_it(tmp_path: Path, ratio: int, rank: int, ranks: int) -> None:
    config = make_tiny(tmp_path, layers=4, ratio=ratio)
    builder = builder_of(config, rank, ranks)
    rng = random.Random(ratio * 10 + rank)
    stored = 0
    for number in range(200):
        piece = random_slice(config, rng, number, 1)
        builder.admit(first_of(number))
        builder.admit(piece)
        decode, prefill = builder.decode([piece]), builder.prefill([piece])
        builder.forget(number)
        for name in FIELDS:
            assert torch.equal(getattr(decode, name), getattr(prefill, name)[:1]), (name, piece.start)
        for name in PER_SEQUENCE:
            assert torch.equal(getattr(decode, name), getattr(prefill, name)), (name, piece.start)
        assert decode.sparse == prefill.sparse
        stored += int(decode.kv_index[0] >= 0)
    assert stored == 200 if ranks == 1 else 0 < stored < 200


@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_rows_of_a_verify_pass_are_single_rows_side_by_side(tmp_path: Path, ratio: int, rank: int, ranks: int) -> None:
    config = make_tiny(tmp_path, layers=4, ratio=ratio)
    builder = builder_of(config, rank, ranks)
    rng = random.Random(ratio)
    for _ in range(40):
        pieces = [random_slice(config, rng, number, rng.randrange(1, 9)) for number in range(3)]
        for piece in pieces:
            builder.admit(first_of(piece.request))
            builder.admit(piece)
        batch = builder.verify(pieces)
        width = max(len(piece.tokens) for piece in pieces)
        assert (batch.kind, batch.write, batch.ids.shape[0]) == ("decode", False, 3 * width)
        for n, piece in enumerate(pieces):
            for t in range(width):
                m = n * width + t
                if t >= len(piece.tokens):
                    assert (int(batch.position[m]), int(batch.row_slot[m]), int(batch.kv_index[m]), int(batch.key_index[m])) == (-1,) * 4
                    continue
                before = tuple(reversed(piece.tokens[:t])) + piece.before
                alone = replace(piece, start=piece.start + t, tokens=piece.tokens[t : t + 1], before=before[: config.ngram - 1], blocks=())
                single = builder.decode([alone])
                for name in FIELDS:
                    assert torch.equal(getattr(batch, name)[m], getattr(single, name)[0]), (name, piece.start, t)
                assert (int(batch.request[m]), int(batch.first[m])) == (n, n * width)
            assert (int(batch.slot[n]), int(batch.rows[n])) == (piece.slot, len(piece.tokens))
        for piece in pieces:
            builder.forget(piece.request)


def test_thousands_of_blocks_at_once_and_swaps(config: ModelConfig) -> None:
    builder = BatchBuilder(config, Rotary(config, torch.float32), Group(), 2, 5000)
    builder.admit(first_of(3, blocks=tuple(range(10_000, 14_000))))
    builder.admit(
        Slice(request=3, kind="decode", slot=0, start=4000 * 64, tokens=(5,), before=(1, 1), blocks=(7,), swaps=((0, 1), (3999, 2)))
    )
    (table,) = builder.decode([Slice(request=3, kind="decode", slot=0, start=4000 * 64, tokens=(5,), before=(1, 1))]).block_table
    assert table.tolist() == [1, *range(10_001, 13_999), 2, 7]


REFUSED = {
    "new again": (first_of(1), "already known"),
    "unknown": (Slice(request=2, kind="decode", slot=0, start=0, tokens=(1,), before=(1, 1)), "without sampling parameters"),
    "no block": (Slice(request=1, kind="decode", slot=0, start=64, tokens=(1,), before=(1, 1)), "1 blocks"),
    "too many blocks": (Slice(request=1, kind="decode", slot=0, start=0, tokens=(1,), before=(1, 1), blocks=(0,) * 16), "holds 16"),
    "swap of nothing": (Slice(request=1, kind="decode", slot=0, start=0, tokens=(1,), before=(1, 1), swaps=((1, 0),)), "block 1 of 1"),
    "too many rows": (Slice(request=1, kind="decode", slot=0, start=0, tokens=(1,) * 9, before=(1, 1)), "of 9 rows"),
    "fresh answer": (Slice(request=1, kind="decode", slot=0, start=0, tokens=(1,), before=(1, 1), fresh=True), "continues a state"),
    "no state": (first_of(2, fresh=False), "from zero or from a snapshot"),
    "two states": (first_of(2, restore=4), "from zero or from a snapshot"),
    "state off the grid": (first_of(2, fresh=False, restore=4, start=10), "multiples of 64"),
    "snapshot off the grid": (first_of(2, tokens=(1,) * 50, blocks=(0,), snapshots=((50, 3),)), "multiple of 64"),
    "snapshot outside": (first_of(2, tokens=(1,) * 50, blocks=(0,), snapshots=((64, 3),)), "must lie in the slice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plans_that_cannot_be_carried_out(config: ModelConfig, case: str) -> None:
    builder = builder_of(config)
    builder.admit(first_of(1, tokens=(1,), blocks=(9,)))
    piece, words = REFUSED[case]
    with pytest.raises(EngineError, match=words):
        builder.admit(piece)
