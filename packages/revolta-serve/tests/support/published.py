"""The published model's config.json, and variations of it."""

import copy
import json
from pathlib import Path
from typing import Any

from revolta_serve.model.model_config import ModelConfig

TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text", "dtype": "bfloat16", "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False, "bos_token_id": 248044, "eos_token_id": 248044, "pad_token_id": None,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32", "output_gate_type": "sigmoid",
    "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ngram_size": 3,
    "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128,
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
}  # fmt: skip
TOP: dict[str, Any] = {
    "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "tie_word_embeddings": False,
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "vision_config": {"depth": 27},
}  # fmt: skip


def raw(**changes: Any) -> dict[str, Any]:
    """The published config with text fields changed; None removes one."""
    text = copy.deepcopy(TEXT) | changes
    return copy.deepcopy(TOP) | {"text_config": {name: value for name, value in text.items() if value is not None}}


def read(**changes: Any) -> ModelConfig:
    """The checked config of the published model with text fields changed."""
    return ModelConfig.from_dict(raw(**changes))


YARN = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 262144}


def write(directory: Path, top: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A directory with the published config.json, extended to twice its positions by YaRN; `top` changes fields beside text_config."""
    changes.setdefault("rope_parameters", TEXT["rope_parameters"] | YARN)
    (directory / "config.json").write_text(json.dumps(raw(**changes) | (top or {})))
    return directory
