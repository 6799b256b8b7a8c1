"""Tiny checkpoints of the real architecture: a few megabytes that exercise every part of the model, for development, tests and the demo."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.names import parameters
from revolta_serve.weights.tiny_files import MARK, MARK_FIELD, check_target, encode_json, encode_weights, replace_files
from revolta_serve.weights.tiny_shape import TinyShape
from revolta_serve.weights.tiny_tensors import WHOLE, text_tensors, vision_tensors
from revolta_serve.weights.tiny_tokenizer import tokenizer_files

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

MOST_VALUES = 2**28
"""Numbers in the largest checkpoint that counts as tiny: a gigabyte in float32, held in memory twice while it is made."""


def make_tiny(
    directory: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    kv_scales: bool = True,
    text_only: bool = False,
    per_expert: bool = False,
    force: bool = False,
    **shape: Any,
) -> ModelConfig:
    """Write a complete checkpoint into `directory` (created) and return its checked config.

    seed        of all weights; the same arguments give the same bytes
    dtype       float32, float16 or bfloat16, of every tensor
    shards      weight files; more than one comes with model.safetensors.index.json
    kv_scales   calibrated K and V scales (scalars, float32), which other readers report as unexpected and ignore
    text_only   `model.` names, a flat config and no vision tower, as text exports have
    per_expert  one tensor per expert and projection instead of fused banks
    force       replace a checkpoint that this function did not write, its weight files included
    shape       fields of TinyShape

    Written, after everything has been checked and made in memory: config.json, generation_config.json, the weights, tokenizer.json,
    tokenizer_config.json, chat_template.jinja. A checkpoint that this function wrote before is replaced.
    Raises ConfigError, with the directory as it was, for a shape the architecture cannot have, a directory that holds anybody else's
    checkpoint, or one that cannot be written; TypeError for a field TinyShape does not know.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; must be one of {', '.join(DTYPES)}", param="dtype")
    if shards < 1:
        raise ConfigError(f"shards is {shards}; must be an integer >= 1", param="shards")
    where = Path(directory)
    check_target(where, force=force)
    form = TinyShape(**shape)
    tokenizer, ids = tokenizer_files(form.tokens, form.extra_tokens)
    raw = config_json(form, ids, dtype, text_only=text_only)
    config = ModelConfig.from_dict(raw, file=str(where / "config.json"))
    values = sum(parameter.elements for parameter in parameters(config))
    if values > MOST_VALUES:
        raise ConfigError(f"this shape has {values:,} values, a tiny checkpoint at most {MOST_VALUES:,}; make its dimensions smaller")
    prefix = "model." if text_only else WHOLE
    tensors = text_tensors(config, seed, prefix=prefix, per_expert=per_expert)
    if not text_only:
        tensors |= vision_tensors(raw["vision_config"], seed)
    stored = {name: t.to(DTYPES[dtype]) if t.is_floating_point() else t for name, t in tensors.items()}
    if kv_scales:
        stored |= _kv_scales(config, stored, prefix)
    stops = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    generation = {"eos_token_id": stops, "pad_token_id": ids["<|endoftext|>"], **sampling}
    # config.json is moved into place first: its mark tells a later run that the files beside it may be replaced.
    files = {"config.json": encode_json(raw | {MARK_FIELD: MARK}), "generation_config.json": encode_json(generation), **tokenizer}
    replace_files(where, files | encode_weights(stored, shards), force=force)
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
