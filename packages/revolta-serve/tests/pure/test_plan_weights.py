"""Weights by group: the published model's own sizes, every packed format, and real files."""

import json
import math

import pytest

from revolta_serve.commands.plan_files import survey
from revolta_serve.commands.plan_weights import bank_bytes, table_bytes, weights
from revolta_serve.config import CacheConfig, ModelSource, ParallelConfig, ServeConfig, SpeculateConfig
from revolta_serve.errors import CheckpointError, ConfigError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.header import BITS
from revolta_serve.weights.index import CheckpointIndex
from support import published


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return published.write(tmp_path_factory.mktemp("published"))


def config(path, tensor=1, **fields):
    speculate = SpeculateConfig(method=fields.pop("method", "none"), drafter=str(fields.pop("drafter", "")))
    cache = CacheConfig(kv_format=fields.pop("kv", "auto"))
    source = ModelSource(path=str(path), dtype=fields.pop("dtype", "float16"), **fields)
    return ServeConfig(model=source, parallel=ParallelConfig(tensor=tensor), cache=cache, speculate=speculate)


def sizes(config, stated="checkpoint", found=None):
    parts = weights(config, ModelConfig.load(config.model.path), stated, found)
    assert len({part.name for part in parts}) == len(parts)
    return {part.name: part.bytes for part in parts}


def test_all_groups_add_up_to_the_published_number_of_parameters(directory):
    parts = sizes(config(directory, vision=True, method="mtp"), "dense")
    # The decay, its bias and the gated norm of 36 layers are float32; hash constants are 3 + 16 + 16 int64.
    single, constants = 36 * (48 + 48 + 128), 35 * 8
    text, table, vision, head = 125_743_653_760, 51_200_245_760, 448_931_056, 2_607_150_848
    assert sum(parts.values()) == 2 * (text + table + vision + head) + 2 * single + constants
    assert parts["vision tower"] == 2 * vision
    assert parts["MTP"] == 2 * head
    assert parts["n-gram tables"] == 2 * table
    assert sum(sizes(config(directory, dtype="float32"), "dense").values()) == 4 * (text + table) + constants


def test_a_rank_of_four_with_packed_experts(directory):
    parts = sizes(config(directory, 4, vision=True, method="mtp", kv="fp8_e4m3", ngram_tables="host"), "awq-g32")
    rows = 248320 // 4
    narrow = 160  # of the experts' 640
    qsa_layer = (3072 + 256 + 256 + 640) * 2560 + 2 * 256 + 2 * 128 + 2560 * 1536
    mix = 10240 + 320 * 10240 + 10240 * 320
    inject = 4 * 10240
    shared = 3 * narrow * 2560 + 2560
    group_of_32 = 16 + 2 + 0.5  # bytes: 32 codes of 4 bits, a scale, a zero point
    fp8_bank = 512 * (3 * narrow * 2560 + 3 * 2 * 20 * 4)  # a slice of 160 rows touches two blocks of 128
    assert parts == {
        "embedding": rows * 2560 * 2,
        "lm_head": rows * 2560 * 2,
        "n-gram tables": 320_001_536 // 4 * 160 + 2,
        "n-gram layers": 2 * (10240 * 2560 + 2560 * 2560 + 3 * 10240 + 10240 * 4) + 35 * 8,
        "GDN": 36 * (2 * ((2560 + 1536 + 24) * 2560 + 2560 * 4 + 2560 * 1536) + 4 * (12 + 12 + 128)),
        "QSA": 12 * (2 * qsa_layer + 2 * 4),
        "hyper-connections": 2 * (96 * (mix + inject) + mix),
        "experts": 48 * 512 * int(3 * narrow * 2560 / 32 * group_of_32),
        "shared experts": 48 * 2 * shared,
        "router": 48 * 2 * 512 * 2560,
        "vision tower": 2 * (vision_on_a_rank_of_four()),
        "MTP": fp8_bank + 2 * (qsa_layer + 2 * (mix + inject) + mix + 512 * 2560 + shared + 2560 + 10240 + 2 * 2560 * 2560) + 2 * 4,
    }


def vision_on_a_rank_of_four():
    """Values: matrices of the blocks and the merger cut by four, the rest whole; biases of cut outputs are cut too."""
    h, inner, merged = 1152, 4304, 4608
    cut = 27 * (3 * h * h + 3 * h + h * h + inner * h + inner + h * inner) + merged * merged + merged + 2560 * merged
    whole = 27 * (6 * h) + 2 * h + 2560 + h * 1536 + h + 2304 * h
    assert cut + whole == 448_931_056
    return cut // 4 + whole


def test_formats_of_experts_and_tables():
    model = published.read()
    values = 3 * 160 * 2560
    assert bank_bytes(model, 4, "dense", 2) == 512 * values * 2
    assert bank_bytes(model, 4, "nvfp4", 2) == 512 * (values * 9 // 16 + 3 * 4)
    assert bank_bytes(model, 1, "fp8", 2) == 512 * (3 * 640 * 2560 + 3 * 5 * 20 * 4)
    # Rank 1 of 2 holds 320 to 639: blocks 2 to 4.
    assert bank_bytes(model, 2, "fp8", 2) == 512 * (3 * 320 * 2560 + 3 * 3 * 20 * 4)
    rows = 320_001_536
    assert table_bytes(model, 1, 1, "dense", 2) == rows * 320
    assert table_bytes(model, 1, 4, "nvfp4", 2) == rows // 4 * 90 + 4
    assert table_bytes(model, 1, 3, "fp8", 2) == -(-rows // 3) * 160 + 2


def test_a_group_of_inputs_is_not_cut():
    with pytest.raises(ConfigError, match=r"parallel.tensor=8 cuts the experts' width 640 into 80, not a multiple of the 32 .*size 4"):
        bank_bytes(published.read(), 8, "int4_g32", 2)
    assert bank_bytes(published.read(), 8, "nvfp4", 2) == 512 * (3 * 80 * 2560 * 9 // 16 + 12)
    with pytest.raises(ConfigError, match=r"into 40, not a multiple of the 16 .*--tensor-parallel-size 8"):
        bank_bytes(published.read(), 16, "nvfp4", 2)


AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
MIXED = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


@pytest.mark.parametrize(
    ("top", "tables", "stated"),
    [(None, None, "dense"), (AWQ, "float8_e4m3fn", "awq-g32"), (MIXED, None, "nvfp4"), (MIXED, "nvfp4", "fp4-local")],
)
def test_without_files_the_formats_are_those_that_config_json_announces(tmp_path, top, tables, stated):
    path = published.write(tmp_path, top, ple_embedding_dtype=tables, num_hidden_layers=4, layer_types=None)
    assert sizes(config(path, 4)) == sizes(config(path, 4), stated)


@pytest.mark.parametrize("quantization", [{"quant_method": "awq", "bits": 4, "group_size": 128}, {"quant_method": "gptq", "bits": 8}])
def test_an_unknown_format_is_refused_by_name(tmp_path, quantization):
    path = published.write(tmp_path, {"quantization_config": quantization})
    with pytest.raises(ConfigError, match=rf"{quantization['quant_method']} with {quantization['bits']} bits.*none of dense, awq-g32"):
        sizes(config(path))


def test_a_vision_tower_must_be_there(tmp_path):
    path = published.write(tmp_path, {"vision_config": None}, num_hidden_layers=4, layer_types=None)
    with pytest.raises(ConfigError, match=r"model.vision is on, but .*config.json has no vision_config; leave it off"):
        sizes(config(path, vision=True))


def test_the_place_of_the_tables_is_the_configured_one(tmp_path):
    path = published.write(tmp_path, num_hidden_layers=4, layer_types=None)
    for place in ("device", "host"):
        parts = weights(config(path, ngram_tables=place), ModelConfig.load(path), "dense", None)
        assert {part.name for part in parts if part.place == "host"} == ({"n-gram tables"} if place == "host" else set())


SMALL = dict(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], hidden_size=64, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=64, shared_expert_intermediate_size=64, vocab_size=1000, eos_token_id=1, ple_layer_ids=[1], ple_embed_dim=64,
    ngram_vocab_size_base=500, split_ngram_parts=2,
)  # fmt: skip
TOKENS = {"image_token_id": None, "video_token_id": None, "vision_start_token_id": None, "vision_end_token_id": None}
WHOLE = "model.language_model."


def files(path, tensors):
    """A checkpoint of empty tensors {name: (dtype, shape)}: a header and a hole."""
    published.write(path, TOKENS, **SMALL)
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return CheckpointIndex.open(path)


def experts(prefix, formats):
    return {f"{prefix}.{e}.{p}_proj.{field}": kind for e in range(4) for p in ("gate", "up", "down") for field, kind in formats[p].items()}


AWQ_EXPERT = {
    **{p: {"qweight": ("I32", [64, 8]), "qzeros": ("I32", [2, 8]), "scales": ("F16", [2, 64])} for p in ("gate", "up", "down")},
}
NVFP4_EXPERT = {
    p: {
        "weight": ("U8", [64, 32]), "weight_scale": ("F8_E4M3", [64, 4]), "weight_scale_2": ("F32", []), "input_scale": ("F32", []),
    } for p in ("gate", "up", "down")
}  # fmt: skip
CSF_EXPERT = {
    p: {
        "weight": ("U8", [64, 32]), "weight_scale.nvfp4_csf_fixed": ("U8", [4, 16 * 3]), "weight_scale.nvfp4_csf_exceptions": ("U32", [5]),
        "weight_scale_2": ("F32", []), "input_scale": ("F32", []),
    } for p in ("gate", "up", "down")
}  # fmt: skip


@pytest.mark.parametrize(
    ("formats", "stated"), [(AWQ_EXPERT, "awq-g32"), (NVFP4_EXPERT, "nvfp4"), (CSF_EXPERT, "fp4-local")], ids=["awq", "nvfp4", "csf"]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_experts_in_files_take_what_their_format_takes(tmp_path, formats, stated, ranks):
    tensors = {}
    for layer in range(2):
        tensors |= experts(f"{WHOLE}layers.{layer}.mlp.experts", formats)
    found = survey(files(tmp_path, tensors))
    real = sizes(config(tmp_path, ranks), found=found)
    assert real["experts"] == sizes(config(tmp_path, ranks), stated)["experts"]
    stored = {part.name: part.stored for part in weights(config(tmp_path, ranks), ModelConfig.load(tmp_path), "checkpoint", found)}
    assert stored["experts"] == sum(math.prod(shape) * BITS[dtype] // 8 for dtype, shape in tensors.values())
    assert stored["embedding"] == 0


def test_dense_files_are_counted_in_the_activation_type(tmp_path):
    tensors = {f"{WHOLE}layers.0.mlp.experts.gate_up_proj": ("BF16", [4, 128, 64]), f"{WHOLE}embed_tokens.weight": ("BF16", [1000, 64])}
    found = survey(files(tmp_path, tensors))
    for dtype in ("float16", "float32"):
        assert sizes(config(tmp_path, dtype=dtype), found=found) == sizes(config(tmp_path, dtype=dtype), "dense")
    assert found.stored("embedding") == 2 * 64_000


@pytest.mark.parametrize(("table", "scale", "width"), [("F8_E4M3", ("BF16", [1]), 4), ("U8", ("F32", []), 2)])
def test_a_packed_table_in_files(tmp_path, table, scale, width):
    name = f"{WHOLE}layers.0.ple.ple_embedding.ngram_embedding"
    tensors = {f"{name}.shard_{i}.weight": (table, [100, width]) for i in range(2)} | {f"{name}.weight_scale_2": scale}
    found = survey(files(tmp_path, tensors))
    assert sizes(config(tmp_path, 2), found=found)["n-gram tables"] == 100 * width + BITS[scale[0]] // 8


def test_scales_of_keys_and_values_are_those_of_the_files(tmp_path):
    names = [f"{WHOLE}layers.1.self_attn.{which}" for which in ("k_scale", "v_proj.output_scale", "q_proj.weight")]
    found = survey(files(tmp_path, {names[0]: ("F32", []), names[1]: ("F32", []), names[2]: ("F16", [4])}))
    assert sizes(config(tmp_path), found=found)["QSA"] == sizes(config(tmp_path), "dense")["QSA"] + 2 * 4


def test_tensors_of_no_group_are_named(tmp_path):
    found = survey(files(tmp_path, {"model.language_model.extra": ("F16", [4]), "lm_head.weight": ("F16", [4])}))
    assert found.unknown == ["model.language_model.extra"]


def test_a_draft_head_must_be_in_the_files(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "other").mkdir()
    found = survey(files(tmp_path / "own", {"lm_head.weight": ("F16", [4])}))
    with pytest.raises(CheckpointError, match=r"own: its files hold no draft head \(mtp.*name a directory that has one"):
        sizes(config(tmp_path / "own", method="mtp"), found=found)
    head = experts(
        "mtp.layers.0.mlp.experts", {p: {"weight": ("F8_E4M3", [64, 64]), "weight_scale_inv": ("F32", [1, 1])} for p in AWQ_EXPERT}
    )
    files(tmp_path / "other", head)
    real = sizes(config(tmp_path / "own", method="mtp", drafter=tmp_path / "other"), found=found)["MTP"]
    assert real == sizes(config(tmp_path / "own", method="mtp"), "awq-g32")["MTP"]
    dense = sizes(config(tmp_path / "own", method="mtp"), "dense")["MTP"]
    assert dense - real == 4 * 3 * (64 * 64 - 4)
