"""Decode rows are laid out in Python numbers, prefill rows in numpy: two forms of the same formulas, held to each other."""

import random
from pathlib import Path

import pytest
import torch

from revolta_serve.model.rope import Rotary
from revolta_serve.parallel.groups import Group
from revolta_serve.runner.batch import BatchBuilder
from revolta_serve.types import SamplingParams, Slice
from revolta_serve.weights.tiny import make_tiny

FIELDS = ("ids", "context", "position", "cos", "sin", "block_cos", "block_sin", "kv_index", "key_index", "visible", "row_slot")
PER_SEQUENCE = ("slot", "rows", "fresh", "block_table")


@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_a_decode_row_is_where_prefill_would_put_it(tmp_path: Path, ratio: int, rank: int, ranks: int) -> None:
    config = make_tiny(tmp_path, layers=4, ratio=ratio)
    builder = BatchBuilder(config, Rotary(config, torch.float32), Group(rank, ranks), 8, 16)
    rng = random.Random(ratio * 10 + rank)
    stored = 0
    for number in range(200):
        position = rng.randrange(1000)
        piece = Slice(
            request=number,
            kind="decode",
            slot=rng.randrange(8),
            start=position,
            tokens=(rng.randrange(config.vocab),),
            before=tuple(rng.randrange(config.vocab) for _ in range(config.ngram - 1)),
            blocks=tuple(rng.sample(range(500), position // 64 + 1)),
            sampling=SamplingParams(temperature=0.0),
            rope_delta=rng.randrange(50),
        )
        builder.admit(piece)
        decode, (prefill, _) = builder.decode([piece]), builder.prefill([piece])
        builder.forget(number)
        for name in FIELDS:
            assert torch.equal(getattr(decode, name), getattr(prefill, name)[:1]), (name, position)
        for name in PER_SEQUENCE:
            assert torch.equal(getattr(decode, name), getattr(prefill, name)), (name, position)
        assert decode.sparse == prefill.sparse
        stored += int(decode.kv_index[0] >= 0)
    assert stored == 200 if ranks == 1 else 0 < stored < 200
