"""Tiny checkpoints of the real architecture: a few megabytes that exercise every part of the model, for development, tests and the demo."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.tiny_tensors import WHOLE, text_tensors, vision_tensors
from revolta_serve.weights.tiny_tokenizer import write_tokenizer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SHARD = "model-{:05d}-of-{:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """Every dimension of a tiny checkpoint. The defaults make one of about 5 MB in float32."""

    hidden: int = 64
    layers: int = 8
    interval: int = 4
    """Layer i is sparse attention when i mod interval = interval - 1."""
    layer_types: tuple[str, ...] | None = None
    """Overrides `interval`: names as config.json spells them."""
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rotary: float = 0.5
    theta: float = 10_000.0
    yarn: float | None = None
    """YaRN factor; the original length is then max_positions / yarn."""
    index_heads: int = 4
    index_dim: int = 32
    budget: int = 32
    ratio: int = 4
    gdn_key_heads: int = 2
    gdn_value_heads: int = 4
    gdn_key_dim: int = 16
    gdn_value_dim: int = 16
    conv_width: int = 4
    output_gate: Literal["sigmoid", "silu"] | None = "sigmoid"
    """None leaves the field out: the model then uses hidden_act."""
    streams: int = 4
    rank: int = 16
    experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 32
    shared_width: int = 32
    ple_layers: tuple[int, ...] = (2,)
    """Counted from 1, as config.json counts."""
    ple_dim: int | None = None
    """None leaves the field out: the model then uses hidden."""
    ple_conv_width: int = 4
    ngram: int = 3
    ngram_heads: int = 4
    ngram_base: int = 997
    ngram_divisor: int = 128
    ngram_shards: int = 4
    hash_seed: int | None = None
    """None leaves the field out: the model then uses 1234."""
    tokens: int = 1024
    """Ids of the tokenizer."""
    extra_tokens: tuple[str, ...] = ()
    """Some of them, in the byte-level alphabet, that encoding never yields but decoding knows."""
    vocab: int | None = None
    """Rows of the embedding; None for as many as the tokenizer has ids."""
    max_positions: int = 8192
    eos_list: bool = False
    """Write eos_token_id as a list whose first id is the n-gram mark."""


def make_tiny(
    directory: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    kv_scales: bool = True,
    text_only: bool = False,
    per_expert: bool = False,
    **shape: Any,
) -> ModelConfig:
    """Write a complete checkpoint into `directory` (created; files of the same names are replaced) and return its checked config.

    seed        of all weights; the same arguments give the same bytes
    dtype       float32, float16 or bfloat16, of every tensor
    shards      weight files; more than one comes with model.safetensors.index.json
    kv_scales   calibrated K and V scales (scalars, float32), which other readers report as unexpected and ignore
    text_only   `model.` names, a flat config and no vision tower, as text exports have
    per_expert  one tensor per expert and projection instead of fused banks
    shape       fields of TinyShape

    Written: config.json, generation_config.json, the weights, tokenizer.json, tokenizer_config.json, chat_template.jinja.
    Raises ConfigError for a shape the architecture cannot have, TypeError for a field TinyShape does not know.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; must be one of {', '.join(DTYPES)}", param="dtype")
    if shards < 1:
        raise ConfigError(f"shards is {shards}; must be an integer >= 1", param="shards")
    where = Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    form = TinyShape(**shape)
    ids = write_tokenizer(where, form.tokens, form.extra_tokens)
    raw = config_json(form, ids, dtype, text_only=text_only)
    config = ModelConfig.from_dict(raw, file=str(where / "config.json"))
    prefix = "model." if text_only else WHOLE
    tensors = text_tensors(config, seed, prefix=prefix, per_expert=per_expert)
    if not text_only:
        tensors |= vision_tensors(raw["vision_config"], seed)
    stored = {name: t.to(DTYPES[dtype]) if t.is_floating_point() else t for name, t in tensors.items()}
    if kv_scales:
        stored |= _kv_scales(config, stored, prefix)
    write_weights(where, stored, shards)
    write_json(where / "config.json", raw)
    stops = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    write_json(where / "generation_config.json", {"eos_token_id": stops, "pad_token_id": ids["<|endoftext|>"], **sampling})
    return config


def config_json(form: TinyShape, ids: dict[str, int], dtype: str, *, text_only: bool = False) -> dict[str, Any]:
    """Return the object of config.json for a shape; `ids` are the tokenizer's control tokens."""
    types = form.layer_types or tuple(
        "full_attention" if i % form.interval == form.interval - 1 else "linear_attention" for i in range(form.layers)
    )
    end = ids["<|endoftext|>"]
    pairs = int(form.head_dim * form.rotary) // 2
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": form.theta, "partial_rotary_factor": form.rotary}
    rope |= {"mrope_section": [pairs - (pairs + 1) // 3 - pairs // 3, (pairs + 1) // 3, pairs // 3], "mrope_interleaved": True}
    if form.yarn is not None:
        original = int(form.max_positions / form.yarn)
        rope |= {"rope_type": "yarn", "factor": form.yarn, "original_max_position_embeddings": original}
    text = {
        "model_type": "qwen4_exp_text", "dtype": dtype, "hidden_size": form.hidden, "num_hidden_layers": form.layers,
        "layer_types": list(types), "num_attention_heads": form.heads, "num_key_value_heads": form.kv_heads, "head_dim": form.head_dim,
        "vocab_size": form.vocab or form.tokens, "max_position_embeddings": form.max_positions, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": False, "bos_token_id": end, "pad_token_id": None,
        "eos_token_id": [end, ids["<|im_end|>"]] if form.eos_list else end, "rope_parameters": rope, "tie_word_embeddings": False,
        "linear_num_key_heads": form.gdn_key_heads, "linear_num_value_heads": form.gdn_value_heads,
        "linear_key_head_dim": form.gdn_key_dim, "linear_value_head_dim": form.gdn_value_dim,
        "linear_conv_kernel_dim": form.conv_width, "mamba_ssm_dtype": "float32", "output_gate_type": form.output_gate,
        "indexer_n_heads": form.index_heads, "indexer_kv_heads": 1, "indexer_head_dim": form.index_dim,
        "indexer_budget": form.budget, "indexer_compress_ratio": form.ratio,
        "num_experts": form.experts, "num_experts_per_tok": form.experts_per_token, "moe_intermediate_size": form.expert_width,
        "shared_expert_intermediate_size": form.shared_width, "hc_count": form.streams, "hc_lowrank": form.rank,
        "ple_layer_ids": list(form.ple_layers), "ple_embed_dim": form.ple_dim, "ple_conv_kernel_size": form.ple_conv_width,
        "ngram_size": form.ngram, "heads_per_ngram": form.ngram_heads, "ngram_vocab_size_base": form.ngram_base,
        "make_ngram_vocab_size_divisible_by": form.ngram_divisor, "split_ngram_parts": form.ngram_shards, "seed": form.hash_seed,
    }  # fmt: skip
    for optional in ("output_gate_type", "ple_embed_dim", "seed"):
        if text[optional] is None:
            del text[optional]
    if text_only:
        return {"architectures": ["Qwen4ExpForCausalLM"], **text}
    vision = {
        "model_type": "qwen4_exp_vision", "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48,
        "out_hidden_size": form.hidden, "in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "num_position_embeddings": 16, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
    }  # fmt: skip
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "language_model_only": False,
        "tie_word_embeddings": False,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": text,
        "vision_config": vision,
    }


def write_weights(directory: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """Write `tensors` as model.safetensors, or as `shards` files of about equal size with an index."""
    for stale in [*directory.glob("model*.safetensors"), directory / "model.safetensors.index.json"]:
        stale.unlink(missing_ok=True)
    ready = {name: t.contiguous() for name, t in tensors.items()}
    if shards == 1:
        save_file(ready, directory / "model.safetensors", metadata={"format": "pt"})
        return
    total, seen = sum(t.nbytes for t in ready.values()), 0
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for name, tensor in ready.items():
        parts[min(seen * shards // total, shards - 1)][name] = tensor
        seen += tensor.nbytes
    names = [SHARD.format(i + 1, shards) for i in range(shards)]
    for file, part in zip(names, parts, strict=True):
        save_file(part, directory / file, metadata={"format": "pt"})
    where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one JSON object, indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _kv_scales(config: ModelConfig, tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Scales that cover what the layers can produce: K by its norm's bound, V by eight standard deviations of a unit input."""
    scales: dict[str, Tensor] = {}
    for layer, kind in enumerate(config.layer_types):
        if kind == "qsa":
            name = f"{prefix}layers.{layer}.self_attn."
            bound = config.head_dim**0.5 * (1 + tensors[f"{name}k_norm.weight"].float()).abs().max() * config.rope.attention_factor
            spread = 8 * tensors[f"{name}v_proj.weight"].float().std() * config.hidden**0.5
            scales |= {f"{name}k_scale": (bound / 448).reshape(()), f"{name}v_scale": (spread / 448).reshape(())}
    return scales
