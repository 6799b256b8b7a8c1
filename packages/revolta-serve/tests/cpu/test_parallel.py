"""Sharding over processes changes who computes, not what: the tolerance class of the law, bytes per rank, collectives counted."""

import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.names import parameters
from revolta_serve.weights.tiny import make_tiny
from support.ranks import Ranked, run_ranks

LAYERS = 4
POSITIONS = 5120
TEXT = 512

# One KV head, so that two ranks hold the same one and may share its tokens; two, so that each rank has its own.
SHAPES = {1: dict(seed=11, kv_heads=1), 2: dict(seed=12, kv_heads=2)}


def random_ids(count: int, seed: int, vocab: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(count)]


@pytest.fixture(scope="module", params=[(2, 1, 2), (2, 2, 1)], ids=["tp2", "tp2-dcp2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Ranked, list[Ranked], int]:
    """The model's config, what one process saw, what two saw, and how many of them share K and V."""
    tensor, context, kv_heads = request.param
    directory: Path = tmp_path_factory.mktemp("tiny")
    config = make_tiny(directory, layers=LAYERS, budget=16, index_heads=12, **SHAPES[kv_heads])
    texts = [random_ids(TEXT, i, config.vocab) for i in range(POSITIONS // TEXT)]
    work = (random_ids(333, 100, config.vocab), random_ids(60, 101, config.vocab), texts)
    return config, run_ranks(directory, 1, 1, *work)[0], run_ranks(directory, tensor, context, *work), context


def changed(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Share of rows whose discrete choice differs."""
    different = sum(int((a != b).any(-1).sum()) for a, b in zip(ours, theirs, strict=True))
    return different / sum(len(a) for a in ours)


def test_answers_equal_one_process(pair: tuple[ModelConfig, Ranked, list[Ranked], int]) -> None:
    _, alone, ranks, _ = pair
    for rank in ranks[1:]:
        assert rank.tokens == ranks[0].tokens
        for a, b in zip(rank.passes + rank.logits, ranks[0].passes + ranks[0].logits, strict=True):
            assert torch.equal(a, b), "ranks disagree among themselves"
    ours = torch.cat([*ranks[0].passes, torch.stack(ranks[0].logits)]).log_softmax(-1)
    theirs = torch.cat([*alone.passes, torch.stack(alone.logits)]).log_softmax(-1)
    assert len(ours) > POSITIONS
    assert float(((ours - theirs).abs() <= 1e-4).float().mean()) >= 0.99
    experts, blocks = changed(ranks[0].experts, alone.experts), changed(ranks[0].blocks, alone.blocks)
    print(f"changed choices: experts {experts:.2e}, index blocks {blocks:.2e} of {len(ours)} positions")
    assert experts <= 0.01
    assert blocks <= 0.01


def test_several_rows_and_snapshots_change_nothing(pair: tuple[ModelConfig, Ranked, list[Ranked], int]) -> None:
    """On every rank, with its share of heads and of tokens: the bits of one row a step without interruption."""
    _, alone, ranks, _ = pair
    assert [rank.changed for rank in (alone, *ranks)] == [[], [], []]


def test_collectives_are_counted(pair: tuple[ModelConfig, Ranked, list[Ranked], int]) -> None:
    _, _, ranks, context = pair
    for rank in ranks:
        # A sum after each block and each expert layer, one each for token and n-gram embeddings; the vocabulary is gathered.
        assert rank.collectives["tensor.sum"] == (LAYERS * 2 + 2) * rank.steps
        assert rank.collectives["tensor.gather"] == 1 + len(ranks[0].tokens) - 1
        # Queries out, partial results and their weights back, in the one sparse attention layer.
        assert rank.collectives.get("context.gather", 0) == (3 * rank.steps if context > 1 else 0)


def sharded(config: ModelConfig, rank: int, ranks: int) -> tuple[int, int]:
    """Values a rank takes of the checkpoint tensors that it does not take whole, and all values of those tensors."""
    taken: Counter[str] = Counter()
    whole: dict[str, int] = {}
    for parameter in parameters(config, rank, ranks):
        for piece in parameter.sources[0] if parameter.sources else ():
            taken[piece.source] += math.prod(b - a for a, b in piece.take)
            whole[piece.source] = math.prod(piece.shape)
    names = [name for name in taken if taken[name] < whole[name]]
    return sum(taken[name] for name in names), sum(whole[name] for name in names)


def test_bytes_per_rank(pair: tuple[ModelConfig, Ranked, list[Ranked], int]) -> None:
    """Sharded weights and K/V of a rank take at most 55% of the whole."""
    config, alone, ranks, _ = pair
    for rank in range(2):
        share, whole = sharded(config, rank, 2)
        assert whole * 4 > 0.6 * alone.weight_bytes, "most of the weights must be sharded for this to mean anything"
        assert share <= 0.55 * whole
    assert max(rank.kv_bytes for rank in ranks) <= 0.55 * alone.kv_bytes
