"""Sharding over processes changes who computes, not what: the tolerance class of the law, bytes per rank, collectives counted."""

import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.names import parameters
from revolta_serve.weights.tiny import make_tiny
from support.ranks import Ranked, run_ranks

LAYERS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory, seed=11, layers=LAYERS, heads=4, kv_heads=1, budget=16, index_heads=12, gdn_key_heads=2, gdn_value_heads=4)
    return directory


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> tuple[list[int], list[int]]:
    rng = random.Random(0)
    vocab = ModelConfig.load(checkpoint).vocab
    return [rng.randrange(vocab) for _ in range(333)], [rng.randrange(vocab) for _ in range(100)]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, text: tuple[list[int], list[int]]) -> Ranked:
    return run_ranks(checkpoint, 1, 1, *text)[0]


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (2, 2)], ids=["tp2", "tp2-dcp2"])
def test_answers_equal_one_process(
    checkpoint: Path, text: tuple[list[int], list[int]], alone: Ranked, tensor: int, context: int
) -> None:
    ranks = run_ranks(checkpoint, tensor, context, *text)
    for rank in ranks[1:]:
        assert rank.tokens == ranks[0].tokens
        assert all(torch.equal(a, b) for a, b in zip(rank.logits, ranks[0].logits, strict=True)), "ranks disagree among themselves"
    ours = torch.stack(ranks[0].logits).log_softmax(-1)
    theirs = torch.stack(alone.logits).log_softmax(-1)
    close = ((ours - theirs).abs() <= 1e-4).float().mean()
    assert float(close) >= 0.99
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) >= 0.99
    for rank in ranks:
        expected = LAYERS * 2 + 2  # one sum after each block and each expert layer, one each for token and n-gram embeddings
        assert rank.collectives["tensor.sum"] == expected * rank.steps
        if context > 1:
            assert rank.collectives["context.gather"] == 3 * rank.steps  # queries out, partial results and their weights back


def sharded_elements(config: ModelConfig, rank: int, ranks: int) -> int:
    """Values a rank takes from the checkpoint tensors that it does not take whole."""
    taken: Counter[str] = Counter()
    whole: dict[str, int] = {}
    for parameter in parameters(config, rank, ranks):
        for piece in parameter.sources[0] if parameter.sources else ():
            taken[piece.source] += math.prod(b - a for a, b in piece.take)
            whole[piece.source] = math.prod(piece.shape)
    return sum(count for name, count in taken.items() if count < whole[name])


def whole_elements(config: ModelConfig, rank: int, ranks: int) -> int:
    """All values of those same tensors."""
    names = {
        piece.source: math.prod(piece.shape)
        for parameter in parameters(config, rank, ranks)
        for piece in (parameter.sources[0] if parameter.sources else ())
        if math.prod(b - a for a, b in piece.take) < math.prod(piece.shape)
    }
    return sum(names.values())


def test_bytes_per_rank(checkpoint: Path, text: tuple[list[int], list[int]], alone: Ranked) -> None:
    """Sharded weights and K/V of a rank take at most 55% of the whole."""
    config = ModelConfig.load(checkpoint)
    for rank in range(2):
        share, whole = sharded_elements(config, rank, 2), whole_elements(config, rank, 2)
        assert whole * 4 > 0.6 * alone.weight_bytes, "most of the weights must be sharded for this to mean anything"
        assert share <= 0.55 * whole
    shared = run_ranks(checkpoint, 2, 2, text[0][:64], [])
    assert max(rank.kv_bytes for rank in shared) <= 0.55 * alone.kv_bytes
