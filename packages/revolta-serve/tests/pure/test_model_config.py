"""config.json: the published model, every spelling that means the same, and one complaint per broken invariant."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import ModelConfig
from support.published import TEXT, raw, read


def test_published_model() -> None:
    config = read()
    assert config.layer_types.count("qsa") == 12
    assert [i for i, kind in enumerate(config.layer_types) if kind == "qsa"] == list(range(3, 48, 4))
    assert (config.ple_layers, config.eos, config.seed) == ((1,), 248044, 1234)
    assert (config.index_topk, config.index_ratio, config.selection, config.dense_positions) == (512, 4, 2051, 2051)
    assert (config.gdn_channels, config.gdn_width, config.ngram_width, config.ple_history) == (10240, 6144, 160, 9)
    assert (config.image_token, config.video_token, config.vision_start, config.vision_end) == (248056, 248057, 248053, 248054)
    assert config.has_vision
    assert config.quantization is None


def test_hash_constants_of_the_published_model() -> None:
    config = read()
    assert config.ngram_multipliers(1) == (23703573157769, 20109073645365, 8052911324071)
    assert config.ngram_primes(1) == tuple(
        20_000_000 + n for n in (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
    )  # fmt: skip
    assert config.ngram_offsets(1)[:3] == (0, 20000003, 40000026)
    assert config.ngram_rows(1) == 320001536


def test_hash_rows_of_the_published_model() -> None:
    """The golden vector of ids 1, 2, 3, eos, 5, 6 at its third and fifth token."""
    config = read()
    m, primes, offsets = config.ngram_multipliers(1), config.ngram_primes(1), config.ngram_offsets(1)

    def rows(c0: int, c1: int, c2: int) -> list[int]:
        bigram = (c0 * m[0]) ^ (c1 * m[1])
        return [((bigram if j < 8 else bigram ^ (c2 * m[2])) % p) + o for j, (p, o) in enumerate(zip(primes, offsets, strict=True))]

    assert rows(3, 2, 1)[:2] == [14605717, 24410875]
    assert rows(3, 2, 1)[8:10] == [161523077, 195939126]
    assert rows(5, 248044, 248044)[7:9] == [155458159, 179763390]


@pytest.mark.parametrize("name", ["full_attention", "qwen_sparse_attention", "indexed_attention"])
def test_sparse_attention_has_three_spellings(name: str) -> None:
    assert read(layer_types=["linear_attention", "linear_attention", "linear_attention", name] * 12) == read()


def test_layer_types_follow_the_interval_when_absent() -> None:
    assert read(layer_types=None) == read()
    assert read(layer_types=None, full_attention_interval=2, ple_layer_ids=[1]).layer_types == ("gdn", "qsa") * 24


def test_eos_list_hashes_with_its_first_id() -> None:
    config = read(eos_token_id=[248044, 248046])
    assert (config.eos, config.eos_ids) == (248044, (248044, 248046))


def test_old_model_type_and_text_only_export() -> None:
    assert ModelConfig.from_dict(raw() | {"model_type": "qwen3_8_flash_next"}) == read()
    flat = ModelConfig.from_dict(dict(TEXT))
    assert (flat.hidden, flat.has_vision, flat.image_token) == (2560, False, None)


def test_absent_fields_take_the_reference_defaults() -> None:
    config = read(ple_embed_dim=None, split_ngram_parts=None, output_gate_type=None, dtype=None, hc_count=None, ngram_size=None)
    assert (config.ple_dim, config.ngram_shards, config.output_gate, config.dtype) == (2560, 512, "silu", "bfloat16")
    assert (config.streams, config.ngram) == (4, 3)


def test_old_spelling_of_the_dtype() -> None:
    assert read(dtype=None, torch_dtype="float16").dtype == "float16"
    assert ModelConfig.from_dict(raw(dtype=None) | {"torch_dtype": "float32"}).dtype == "float32"


def test_rope_of_the_published_model() -> None:
    rope = read().rope
    assert (rope.kind, rope.dims, rope.sections, rope.attention_factor) == ("default", 64, (11, 11, 10), 1.0)
    assert rope.inverse_frequencies()[0] == 1.0
    assert math.isclose(rope.inverse_frequencies()[16], 1e7**-0.5, rel_tol=1e-6)
    axes = rope.axes()
    assert [i for i, a in enumerate(axes) if a == 1] == list(range(1, 32, 3))
    assert [i for i, a in enumerate(axes) if a == 2] == list(range(2, 30, 3))
    assert axes.count(0) == 11


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}},
        {"rope_parameters": TEXT["rope_parameters"] | YARN},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 262144},
    ],
    ids=["scaling alone", "both", "parameters alone", "old spelling"],
)
def test_yarn(fields: dict[str, Any]) -> None:
    """Frequencies by the reference's rule: the correction range uses the original length as it is."""
    rope = read(**fields).rope
    assert (rope.kind, rope.factor, rope.original) == ("yarn", 2.0, 262144)
    assert math.isclose(rope.attention_factor, 1.0693147, rel_tol=1e-7)
    expected = [4.905929e-4, 2.766993e-4, 1.552649e-4, 8.660865e-5, 4.797585e-5, 2.635603e-5, 1.433417e-5, 7.699633e-6, 4.652860e-6]
    assert rope.inverse_frequencies()[15:24] == pytest.approx(expected, rel=1e-6)
    plain = read().rope.inverse_frequencies()
    assert rope.inverse_frequencies()[:15] == plain[:15]
    assert rope.inverse_frequencies()[24:] == pytest.approx([f / 2 for f in plain[24:]], rel=1e-6)


def test_sections_default_to_the_reference_cut_to_the_pairs() -> None:
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.0625}
    assert read(rope_parameters=rope).rope.sections == (3, 3, 2)


BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"hidden_size": None}, "text_config.hidden_size missing", "integer >= 1"),
    ({"hidden_size": "2560"}, 'hidden_size is "2560"', "integer"),
    ({"hidden_size": True}, "hidden_size is true", "integer"),
    ({"num_hidden_layers": 47}, "layer_types", "num_hidden_layers = 47"),
    ({"layer_types": ["mamba"] * 48}, "layer_types", "not mamba"),
    ({"num_key_value_heads": 5}, "num_key_value_heads is 5", "divisor of num_attention_heads 24"),
    ({"linear_num_value_heads": 40}, "linear_num_value_heads is 40", "multiple of linear_num_key_heads 16"),
    ({"hc_count": 1}, "hc_count is 1", ">= 2"),
    ({"num_experts_per_tok": 513}, "num_experts_per_tok is 513", "[1, 512]"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0", ">= 1"),
    ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2", "[1, 1]"),
    ({"indexer_budget": 2047}, "indexer_budget is 2047", "multiple of indexer_compress_ratio 4"),
    ({"indexer_budget": None}, "indexer_budget missing", "integer"),
    ({"indexer_compress_ratio": 3}, "indexer_compress_ratio is 3", "divisor of 64"),
    ({"indexer_head_dim": 32}, "indexer_head_dim is 32", "64 rotary dims"),
    ({"ple_layer_ids": [4]}, "ple_layer_ids is [4]", "linear_attention"),
    ({"ple_layer_ids": [49]}, "ple_layer_ids is [49]", "[1, 48]"),
    ({"ple_embed_dim": 2561}, "ple_embed_dim is 2561", "16"),
    ({"ngram_size": 1}, "ngram_size is 1", ">= 2"),
    ({"eos_token_id": None}, "eos_token_id missing", "id"),
    ({"eos_token_id": []}, "eos_token_id is []", "id"),
    ({"eos_token_id": 248320}, "eos_token_id is 248320", "[0, 248319]"),
    ({"norm_topk_prob": False}, "norm_topk_prob is false", "true"),
    ({"attention_bias": True}, "attention_bias is true", "false"),
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu"', '"silu"'),
    ({"output_gate_type": "tanh"}, 'output_gate_type is "tanh"', '"sigmoid"'),
    ({"dtype": "float8"}, 'dtype is "float8"', '"bfloat16"'),
    ({"rms_norm_eps": -1}, "rms_norm_eps is -1", "> 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN", "> 0"),
    ({"model_type": "llama"}, 'text_config.model_type is "llama"', "qwen4_exp"),
    ({"rope_parameters": {"rope_type": "longrope"}}, 'rope_parameters.rope_type is "longrope"', '"yarn"'),
    ({"rope_parameters": {"partial_rotary_factor": 0.005}}, "partial_rotary_factor is 0.005", "even"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25, "mrope_section": [11, 11, 11]}}, "mrope_section", "add up to 32"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25, "mrope_section": [0, 21, 11]}}, "mrope_section", "fit into 32"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25, "mrope_interleaved": False}}, "mrope_interleaved is false", "true"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "rope_scaling.factor is 0.5", ">= 1"),
    ({"rope_parameters": [1]}, "text_config.rope_parameters is [1]", "object"),
    ({"ple_embedding_dtype": "int4"}, 'ple_embedding_dtype is "int4"', "nvfp4"),
]


@pytest.mark.parametrize(("changes", "field", "legal"), BROKEN, ids=[field for _, field, _ in BROKEN])
def test_broken_field_is_named_with_its_value_and_what_is_legal(changes: dict[str, Any], field: str, legal: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**changes)
    assert field in error.value.message
    assert legal in error.value.message
    assert error.value.message.startswith("config.json: ")


def test_tied_embeddings_and_foreign_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings is true"):
        ModelConfig.from_dict(raw() | {"tie_word_embeddings": True})
    with pytest.raises(ConfigError, match='model_type is "qwen3_moe"'):
        ModelConfig.from_dict(raw() | {"model_type": "qwen3_moe"})


def test_quantization_is_recorded() -> None:
    assert ModelConfig.from_dict(raw() | {"quantization_config": {"quant_method": "awq", "bits": 4}}).quantization == "awq"
    assert read(ple_embedding_dtype="float8_e4m3fn").ple_storage == "float8_e4m3fn"
    with pytest.raises(ConfigError, match=r"quantization_config\.quant_method missing"):
        ModelConfig.from_dict(raw() | {"quantization_config": {}})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_published_model_divides_over(size: int) -> None:
    read().check_tensor_parallel(size)


@pytest.mark.parametrize(("size", "field"), [(3, "linear_num_key_heads 16"), (16, "num_attention_heads 24"), (5, "num_attention_heads 24")])
def test_sizes_that_do_not_divide_are_refused(size: int, field: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor parallel size is {size}.*{field}"):
        read().check_tensor_parallel(size)


def test_kv_heads_need_a_divisor_or_a_multiple() -> None:
    config = read(num_key_value_heads=6, num_attention_heads=24)
    with pytest.raises(ConfigError, match="num_key_value_heads 6"):
        config.check_tensor_parallel(4)


def test_load_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not readable as JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"must be an object"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw()))
    assert ModelConfig.load(tmp_path) == read()


def test_floor_modules_do_not_import_torch() -> None:
    code = (
        "import sys, revolta_serve.model.model_config, revolta_serve.weights.names, revolta_serve.weights.index\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
