"""The table of parameters: complete, every value of every tensor used exactly once over the ranks, every value of a parameter filled."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest

from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.names import Piece, parameters
from support.published import TEXT, read

SMALL: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 4, "layer_types": None, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
    "vocab_size": 19, "eos_token_id": 18, "rope_parameters": {"partial_rotary_factor": 0.5}, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 2, "linear_value_head_dim": 3, "hc_count": 2, "hc_lowrank": 3, "ple_embed_dim": 8,
    "heads_per_ngram": 2, "ngram_vocab_size_base": 5, "make_ngram_vocab_size_divisible_by": 1, "split_ngram_parts": 3,
    "indexer_n_heads": 2, "indexer_head_dim": 4, "indexer_budget": 8, "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 4, "shared_expert_intermediate_size": 8,
}  # fmt: skip


def small() -> ModelConfig:
    """A model small enough to count every value."""
    return ModelConfig.from_dict({name: value for name, value in (TEXT | SMALL).items() if value is not None})


REPLICATED = ("hyper", "mixer", "_norm", ".norm", "index_qk", "layernorm", ".gate.weight", "shared_expert_gate", "ple.key", "ple.value")
REPLICATED += ("ple.conv", "layer_multipliers", "ngram_heads", "_scale")


def cells(piece: Piece, which: str) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, b) for a, b in getattr(piece, which))))


def test_published_model_has_its_published_counts() -> None:
    """1,294 text tensors and 176,943,899,520 text values: 125,743,653,760 beside the n-gram table of 51,200,245,760."""
    config = read()
    sources: dict[str, tuple[int, ...]] = {}
    for parameter in parameters(config):
        if not parameter.optional:
            sources |= {piece.source: piece.shape for piece in parameter.sources[0]}
    assert len(sources) == 1294
    table = sum(math.prod(shape) for name, shape in sources.items() if ".ngram_embedding." in name)
    buffers = sum(math.prod(shape) for name, shape in sources.items() if "layer_multipliers" in name or "ngram_heads_" in name)
    assert (table, buffers) == (51_200_245_760, 35)
    assert sum(map(math.prod, sources.values())) - table - buffers == 125_743_653_760
    assert sum(p.name.endswith("_scale") for p in parameters(config)) == 24


def test_shapes_of_a_rank_of_the_published_model() -> None:
    shapes = {p.name: p.shape for p in parameters(read(), 3, 4)}
    assert shapes["embed"] == shapes["lm_head"] == (62080, 2560)
    assert shapes["layers.0.gdn.in_proj"] == (2560 + 1536 + 2 * 12, 2560)
    assert shapes["layers.0.gdn.out_proj"] == (2560, 1536)
    assert shapes["layers.3.qsa.in_proj"] == ((2 * 6 + 2) * 256 + 5 * 128, 2560)
    assert shapes["layers.0.moe.w13"] == (512, 320, 2560)
    assert shapes["layers.0.moe.w2"] == (2560, 512, 160)
    assert shapes["layers.1.ple.table"] == (80000384, 160)
    assert shapes["mixer.w_in"] == (320, 10240)
    assert shapes["layers.0.attn_hyper.w_in"] == (324, 10240)


def test_ranks_share_kv_heads_pairwise() -> None:
    taken = []
    for rank in range(4):
        (pieces,) = next(p for p in parameters(read(), rank, 4) if p.name == "layers.3.qsa.in_proj").sources
        taken.append([piece.take[0] for piece in pieces if piece.source.endswith(".k_proj.weight")])
    assert taken == [[(0, 256)], [(0, 256)], [(256, 512)], [(256, 512)]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_value_is_used_and_every_parameter_filled(ranks: int) -> None:
    config: ModelConfig = small()
    used: Counter[tuple[str, tuple[int, ...]]] = Counter()
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(ranks):
        names = set()
        for parameter in parameters(config, rank, ranks):
            assert parameter.name not in names
            names.add(parameter.name)
            for pieces in parameter.sources:
                filled = Counter(cell for piece in pieces for cell in cells(piece, "put"))
                assert set(filled.values()) <= {1}
                assert parameter.padded or sum(filled.values()) == parameter.elements
                assert all(c < n for cell in filled for c, n in zip(cell, parameter.shape, strict=True))
                for piece in pieces:
                    assert len(cells(piece, "put")) == len(cells(piece, "take"))
                    assert shapes.setdefault(piece.source, piece.shape) == piece.shape
                    used.update((piece.source, cell) for cell in cells(piece, "take"))
    for name, shape in shapes.items():
        counts = {used[name, cell] for cell in itertools.product(*map(range, shape))}
        replicated = any(word in name for word in REPLICATED)
        shared_kv = ranks // config.kv_heads if ".k_proj.weight" in name or ".v_proj.weight" in name else 1
        assert counts == {ranks if replicated else max(1, shared_kv)}, name


def test_odd_vocabulary_is_padded_on_the_last_rank() -> None:
    embed = [next(p for p in parameters(small(), rank, 2) if p.name == "embed") for rank in range(2)]
    assert [p.shape for p in embed] == [(10, 8), (10, 8)]
    assert [p.padded for p in embed] == [False, True]
