"""Random weights of a tiny checkpoint, scaled so that every part of the model moves the logits.

Each linear map gives outputs of a chosen spread for inputs of the spread it meets, so neither width nor depth lets a part vanish or
drown the others. A tensor's values depend on its name and the seed only: changing one part of a shape leaves the others alone.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from revolta_serve.model.model_config import ModelConfig

WHOLE = "model.language_model."
"""Prefix of the text model's tensors in a checkpoint of the whole model."""

MIXED = 0.45
"""Spread of a block's input: normalised streams gated by sigmoids around one half and averaged."""

BLOCK = 0.06
"""Spread of what a block adds to streams of spread one. Larger values make the model chaotic: rounding to float16 would then flip
experts and selections that change the answer, which no implementation could match."""


class _Draw:
    """Random tensors by name. Whatever prefix an export uses, a tensor's values are those of the whole model's name."""

    def __init__(self, seed: int, prefix: str = WHOLE) -> None:
        self.seed, self.prefix = seed, prefix
        self.tensors: dict[str, Tensor] = {}

    def _generator(self, name: str) -> torch.Generator:
        if name.startswith(self.prefix):
            name = WHOLE + name.removeprefix(self.prefix)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.tensors[name] = torch.randn(*shape, generator=self._generator(name)) * std + mean

    def linear(self, name: str, *shape: int, out: float, into: float = 1.0) -> None:
        """A map [..., N, K] whose outputs have spread `out` for independent inputs of spread `into`."""
        self.normal(name, *shape, std=out / (into * math.sqrt(shape[-1])))

    def uniform(self, name: str, *shape: int, low: float, high: float) -> Tensor:
        self.tensors[name] = low + (high - low) * torch.rand(*shape, generator=self._generator(name))
        return self.tensors[name]


def text_tensors(config: ModelConfig, seed: int, *, prefix: str, per_expert: bool = False) -> dict[str, Tensor]:
    """Return the text model's tensors in float32 (hash constants int64), by checkpoint name under `prefix`.

    per_expert writes `experts.E.gate_proj.weight` and its siblings instead of the fused banks.
    """
    draw = _Draw(seed, prefix)
    draw.normal(f"{prefix}embed_tokens.weight", config.vocab, config.hidden, std=1.0)
    draw.linear("lm_head.weight", config.vocab, config.hidden, out=2.6, into=MIXED)
    for layer, kind in enumerate(config.layer_types):
        name = f"{prefix}layers.{layer}."
        if layer in config.ple_layers:
            _ngram(draw, config, layer, f"{name}ple.")
        _hyper(draw, config, f"{name}attn_hyper_connection.")
        if kind == "gdn":
            _gdn(draw, config, f"{name}linear_attn.")
        else:
            _qsa(draw, config, f"{name}self_attn.")
        _hyper(draw, config, f"{name}mlp_hyper_connection.")
        _moe(draw, config, f"{name}mlp.", per_expert)
    _hyper(draw, config, f"{prefix}hyper_connection_mixer.", inject=False)
    return draw.tensors


def _hyper(draw: _Draw, config: ModelConfig, name: str, inject: bool = True) -> None:
    wide = config.streams * config.hidden
    draw.normal(f"{name}hc_norm.weight", wide, std=0.2)
    draw.linear(f"{name}input_mix_weight_down.weight", config.hc_rank, wide, out=float(config.streams))
    draw.linear(f"{name}input_mix_weight_up.weight", wide, config.hc_rank, out=1.5, into=0.6)
    if inject:
        draw.linear(f"{name}block_inject_weight.weight", config.streams, wide, out=float(config.streams))


def _gdn(draw: _Draw, config: ModelConfig, name: str) -> None:
    e, heads = config.hidden, config.gdn_value_heads
    draw.linear(f"{name}in_proj_qkv.weight", config.gdn_channels, e, out=1.5, into=MIXED)
    draw.linear(f"{name}in_proj_z.weight", config.gdn_width, e, out=1.5, into=MIXED)
    draw.linear(f"{name}in_proj_b.weight", heads, e, out=1.5, into=MIXED)
    draw.linear(f"{name}in_proj_a.weight", heads, e, out=1.0, into=MIXED)
    draw.normal(f"{name}conv1d.weight", config.gdn_channels, 1, config.conv_width, std=0.6)
    draw.uniform(f"{name}A_log", heads, low=math.log(0.5), high=math.log(4.0))
    step = torch.exp(draw.uniform(f"{name}dt_bias", heads, low=math.log(0.01), high=math.log(0.3)))
    draw.tensors[f"{name}dt_bias"] = torch.log(torch.expm1(step))
    draw.normal(f"{name}norm.weight", config.gdn_value_dim, std=0.1, mean=1.0)
    draw.linear(f"{name}out_proj.weight", e, config.gdn_width, out=BLOCK, into=0.5)


def _qsa(draw: _Draw, config: ModelConfig, name: str) -> None:
    e, d, width = config.hidden, config.head_dim, config.heads * config.head_dim
    draw.linear(f"{name}q_proj.weight", 2 * width, e, out=1.5, into=MIXED)
    draw.linear(f"{name}k_proj.weight", config.kv_heads * d, e, out=1.0, into=MIXED)
    draw.linear(f"{name}v_proj.weight", config.kv_heads * d, e, out=2.0, into=MIXED)
    draw.linear(f"{name}o_proj.weight", e, width, out=BLOCK, into=0.6)
    draw.normal(f"{name}q_norm.weight", d, std=0.2, mean=0.5)
    draw.normal(f"{name}k_norm.weight", d, std=0.2, mean=0.5)
    rows = (config.index_heads + 1) * config.index_dim
    draw.linear(f"{name}indexer.index_qk_proj.weight", rows, e, out=1.0, into=MIXED)
    draw.normal(f"{name}indexer.q_layernorm.weight", config.index_dim, std=0.2)
    draw.normal(f"{name}indexer.k_layernorm.weight", config.index_dim, std=0.2)


def _moe(draw: _Draw, config: ModelConfig, name: str, per_expert: bool) -> None:
    e, x, i, j = config.hidden, config.experts, config.expert_width, config.shared_width
    draw.linear(f"{name}gate.weight", x, e, out=1.5, into=MIXED)
    draw.linear(f"{name}experts.gate_up_proj", x, 2 * i, e, out=1.5, into=MIXED)
    draw.linear(f"{name}experts.down_proj", x, e, i, out=2 * BLOCK, into=1.5)
    draw.linear(f"{name}shared_expert.gate_proj.weight", j, e, out=1.5, into=MIXED)
    draw.linear(f"{name}shared_expert.up_proj.weight", j, e, out=1.5, into=MIXED)
    draw.linear(f"{name}shared_expert.down_proj.weight", e, j, out=1.5 * BLOCK, into=1.5)
    draw.linear(f"{name}shared_expert_gate.weight", 1, e, out=1.0, into=MIXED)
    if per_expert:
        bank, down = draw.tensors.pop(f"{name}experts.gate_up_proj"), draw.tensors.pop(f"{name}experts.down_proj")
        for k in range(x):
            draw.tensors[f"{name}experts.{k}.gate_proj.weight"] = bank[k, :i]
            draw.tensors[f"{name}experts.{k}.up_proj.weight"] = bank[k, i:]
            draw.tensors[f"{name}experts.{k}.down_proj.weight"] = down[k]


def _ngram(draw: _Draw, config: ModelConfig, layer: int, name: str) -> None:
    e, wide = config.hidden, config.streams * config.hidden
    draw.linear(f"{name}key_proj.weight", wide, config.ple_dim, out=1.0)
    draw.linear(f"{name}value_proj.weight", e, config.ple_dim, out=1.5 * BLOCK)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        draw.normal(f"{name}{norm}.weight", wide, std=0.2)
    draw.normal(f"{name}conv1d.weight", wide, 1, config.ple_conv_width, std=0.8 * BLOCK)
    table = f"{name}ple_embedding."
    for field, values in (
        ("layer_multipliers", config.ngram_multipliers(layer)),
        ("ngram_heads_vocab_sizes", config.ngram_primes(layer)),
        ("ngram_heads_offsets", config.ngram_offsets(layer)),
    ):
        draw.tensors[f"{table}{field}"] = torch.tensor(values, dtype=torch.int64)
    rows = config.ngram_rows(layer)
    draw.normal(f"{table}ngram_embedding", rows, config.ngram_width, std=1.0)
    draw.tensors[f"{table}ngram_embedding"][sum(config.ngram_primes(layer)) :] = 0
    whole = draw.tensors.pop(f"{table}ngram_embedding")
    step = -(-rows // config.ngram_shards)
    for shard, part in enumerate(torch.split(whole, step)):
        draw.tensors[f"{table}ngram_embedding.shard_{shard}.weight"] = part


def vision_tensors(vision: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Return the vision tower's tensors in float32 for a `vision_config`, under `model.visual.`."""
    draw = _Draw(seed)
    v, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = v * vision["spatial_merge_size"] ** 2
    name = "model.visual."

    def affine(path: str, n: int, *k: int) -> None:
        draw.normal(f"{path}.weight", n, *k, std=1 / math.sqrt(math.prod(k)))
        draw.normal(f"{path}.bias", n, std=0.1)

    def norm(path: str, n: int) -> None:
        draw.normal(f"{path}.weight", n, std=0.1, mean=1.0)
        draw.normal(f"{path}.bias", n, std=0.1)

    affine(f"{name}patch_embed.proj", v, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    draw.normal(f"{name}pos_embed.weight", vision["num_position_embeddings"], v, std=0.5)
    for block in range(vision["depth"]):
        at = f"{name}blocks.{block}."
        norm(f"{at}norm1", v)
        norm(f"{at}norm2", v)
        affine(f"{at}attn.qkv", 3 * v, v)
        affine(f"{at}attn.proj", v, v)
        affine(f"{at}mlp.linear_fc1", wide, v)
        affine(f"{at}mlp.linear_fc2", v, wide)
    norm(f"{name}merger.norm", v)
    affine(f"{name}merger.linear_fc1", merged, merged)
    affine(f"{name}merger.linear_fc2", vision["out_hidden_size"], merged)
    return draw.tensors
