"""Damaged and incomplete checkpoints: an error before serving that names tensor, file and the way out; never a silent default."""

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from revolta_serve.errors import CheckpointError, ConfigError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.checkpoint import load
from revolta_serve.weights.header import read_header
from revolta_serve.weights.index import CheckpointIndex
from revolta_serve.weights.tiny import make_tiny
from revolta_serve.weights.tiny_files import write_weights

SHAPE: dict[str, Any] = {"layers": 2, "interval": 2, "hidden": 32, "experts": 4, "tokens": 300, "ngram_base": 53, "ple_layers": (1,)}
PREFIX = "model.language_model."
Tensors = dict[str, Tensor]


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Path, ModelConfig]:
    return tmp_path, make_tiny(tmp_path, shards=2, kv_scales=True, **SHAPE)


def tensors_of(directory: Path) -> Tensors:
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def refuse(config: ModelConfig, directory: Path, *words: str, dtype: torch.dtype = torch.float32) -> None:
    with pytest.raises(CheckpointError) as error:
        load(config, directory, 0, 1, dtype)
    for word in words:
        assert word in error.value.message


def drop(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[PREFIX + name]

    return edit


def put(name: str, tensor: Tensor) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = tensor

    return edit


def value(name: str, number: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[PREFIX + name].view(-1)[-1:] = number

    return edit


CASES: list[tuple[Callable[[Tensors], None], tuple[str, ...]]] = [
    (drop("layers.1.mlp.gate.weight"), ("layers.1.mlp.gate.weight", "layers.1.moe.router", "download")),
    (drop("layers.0.ple.ple_embedding.ngram_embedding.shard_3.weight"), ("shard_3", "layers.0.ple.table")),
    (drop("layers.0.mlp.experts.down_proj"), ("layers.0.mlp.experts.down_proj", "layers.0.moe.w2")),
    (put(PREFIX + "layers.0.mlp.experts.3.down_proj.weight", torch.zeros(32, 32)), ("experts.3.down_proj", "both", "keep one")),
    (put(PREFIX + "layers.2.mlp.gate.weight", torch.zeros(4, 32)), ("layers.2.mlp.gate.weight", "no part of the model", "remove")),
    (put("rotary.inv_freq", torch.zeros(4)), ("rotary.inv_freq", "no part of the model")),
    (put("model.embed_tokens.weight", torch.zeros(300, 32)), ("model.embed_tokens.weight", "same tensor", "keep one")),
    (put(PREFIX + "layers.1.self_attn.attn.k_scale", torch.tensor(1.0)), ("k_scale", "keep one")),
    (put("lm_head.weight", torch.zeros(301, 32)), ("lm_head.weight", "[301, 32]", "[300, 32]", "same model")),
    (put("lm_head.weight", torch.zeros(300, 32, dtype=torch.int8)), ("lm_head.weight", "I8", "BF16")),
    (put(PREFIX + "layers.0.ple.ple_embedding.layer_multipliers", torch.tensor([1, 3, 5])), ("layer_multipliers", "[1, 3, 5]", "seed")),
    (put(PREFIX + "layers.0.ple.ple_embedding.ngram_heads_offsets", torch.zeros(8)), ("ngram_heads_offsets", "F32", "I64")),
    (value("layers.0.mlp.gate.weight", float("nan")), ("layers.0.mlp.gate.weight", "nan", "download it again")),
    (value("layers.1.self_attn.v_scale", 0.0), ("layers.1.self_attn.v_scale", "0.0", "> 0")),
    (value("layers.1.self_attn.k_scale", -1.0), ("layers.1.self_attn.k_scale", "-1.0", "> 0")),
    (value("layers.0.linear_attn.A_log", float("inf")), ("A_log", "inf")),
]


@pytest.mark.parametrize(("edit", "words"), CASES, ids=[" ".join(words[:2]) for _, words in CASES])
def test_mutation_is_refused(tiny: tuple[Path, ModelConfig], edit: Callable[[Tensors], None], words: tuple[str, ...]) -> None:
    directory, config = tiny
    tensors = tensors_of(directory)
    edit(tensors)
    write_weights(directory, tensors, shards=2)
    refuse(config, directory, *words)


def test_overflow_in_float16_names_the_value(tiny: tuple[Path, ModelConfig]) -> None:
    directory, config = tiny
    tensors = tensors_of(directory)
    tensors[PREFIX + "layers.0.mlp.experts.gate_up_proj"][2, 3, 4] = -70000.0
    write_weights(directory, tensors)
    assert load(config, directory, 0, 1, torch.float32)["layers.0.moe.w13"][2, 3, 4] == -70000.0
    refuse(config, directory, "experts.gate_up_proj", "-70000.0", "float16", "float32 activations", dtype=torch.float16)


def test_values_that_stay_float32_do_not_overflow(tiny: tuple[Path, ModelConfig]) -> None:
    directory, config = tiny
    tensors = tensors_of(directory)
    tensors[PREFIX + "layers.0.linear_attn.dt_bias"][0] = 70000.0
    write_weights(directory, tensors)
    assert load(config, directory, 0, 1, torch.float16)["layers.0.gdn.dt_bias"][0] == 70000.0


def test_missing_file(tiny: tuple[Path, ModelConfig]) -> None:
    directory, config = tiny
    (directory / "model-00002-of-00002.safetensors").unlink()
    refuse(config, directory, "model-00002-of-00002.safetensors", "no such file", "download it")


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file(tiny: tuple[Path, ModelConfig], keep: int) -> None:
    directory, config = tiny
    path = directory / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuse(config, directory, "model-00001-of-00002.safetensors", "again")


@pytest.mark.parametrize(
    "head", [b"not a safetensors file at all", (20).to_bytes(8, "little") + b'{"a":1}' + b" " * 13], ids=["text", "entry"]
)
def test_malformed_file(tiny: tuple[Path, ModelConfig], head: bytes) -> None:
    directory, config = tiny
    (directory / "model-00001-of-00002.safetensors").write_bytes(head)
    refuse(config, directory, "model-00001-of-00002.safetensors")


def entry(begin: Any, end: Any, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADERS: list[tuple[str, Any, int, str]] = [
    ("sizes disagree", {"x": entry(0, 8, [4])}, 8, r"x is F32 \[4\] but occupies 8 bytes"),
    ("runs backwards", {"x": entry(8, 0)}, 8, r"x is F32 \[2\] but occupies -8 bytes"),
    ("two over each other", {"x": entry(0, 8), "y": entry(4, 12)}, 12, "y at data bytes 4 to 12 overlaps x"),
    ("two in one place", {"x": entry(0, 8), "y": entry(0, 8)}, 8, "y at data bytes 0 to 8 overlaps x"),
    ("a gap", {"x": entry(0, 8), "y": entry(12, 20)}, 20, "y at data bytes 12 to 20 leaves 4 bytes of nobody's after x"),
    ("a gap in front", {"x": entry(4, 12)}, 12, "x at data bytes 4 to 12 leaves 4 bytes of nobody's after the header"),
    ("bytes at the end", {"x": entry(0, 8)}, 9, "1 bytes follow x, the last tensor"),
    ("bytes and no tensor", {}, 3, "3 bytes follow the header"),
    ("too short", {"x": entry(0, 8)}, 7, "truncated: x ends at byte"),
    ("texts as offsets", {"x": entry("0", "8")}, 8, "entry of x is malformed"),
    ("floats as offsets", {"x": entry(0.0, 8.0)}, 8, "entry of x is malformed"),
    ("truth as offset", {"x": entry(False, 8)}, 8, "entry of x is malformed"),
    ("negative offset", {"x": entry(-8, 0)}, 8, "entry of x is malformed"),
    ("three offsets", {"x": {**entry(0, 8), "data_offsets": [0, 8, 8]}}, 8, "entry of x is malformed"),
    ("no offsets", {"x": {"dtype": "F32", "shape": [2]}}, 8, "entry of x is malformed"),
    ("offsets as text", {"x": {**entry(0, 8), "data_offsets": "08"}}, 8, "entry of x is malformed"),
    ("text as shape", {"x": entry(0, 8, "2")}, 8, "entry of x is malformed"),
    ("float in shape", {"x": entry(0, 8, [2.0])}, 8, "entry of x is malformed"),
    ("negative shape", {"x": entry(0, 8, [-1, -2])}, 8, "entry of x is malformed"),
    ("list as dtype", {"x": entry(0, 8, [2], ["F32"])}, 8, "entry of x is malformed"),
    ("null as entry", {"x": None}, 8, "entry of x is malformed"),
    ("list as entry", {"x": [1, 2, 3]}, 8, "entry of x is malformed"),
    ("unknown dtype", {"x": entry(0, 8, [2], "F31")}, 8, "x has dtype F31"),
    ("a list", [], 0, "its header is no object"),
    ("metadata of numbers", {"__metadata__": {"format": 1}, "x": entry(0, 8)}, 8, "__metadata__ is no object of texts"),
    ("twice", b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{}}', 0, "lists x twice"),
    ("not utf-8", b'{"\xff":1}', 0, "not a safetensors file"),
    ("nested without end", b'{"x":' + b"[" * 200_000, 0, "not a safetensors file"),
]


@pytest.mark.parametrize(("header", "data", "message"), [case[1:] for case in HEADERS], ids=[case[0] for case in HEADERS])
def test_a_header_that_lies_is_refused_with_file_and_tensor(tmp_path: Path, header: Any, data: int, message: str) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    for read in (read_header, lambda path: CheckpointIndex.open(path.parent)):
        with pytest.raises(CheckpointError, match=message) as error:
            read(path)
        assert error.value.message.startswith(f"{path}: ")


@given(data=st.data())
def test_whatever_happens_to_a_header_it_is_refused_by_name_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(save({"x": torch.arange(3.0), "y": torch.zeros(2, 2, dtype=torch.int64)}))
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, end - 1))
        raw[at] = data.draw(st.one_of(st.sampled_from(b'0123456789"[]{},:- '), st.integers(0, 255)))
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(raw)
    try:
        ours = {name: list(info.shape) for name, info in read_header(path).items()}
    except CheckpointError as error:
        message = error.message
    else:
        with contextlib.suppress(SafetensorError), safe_open(path, framework="pt") as file:
            assert ours == {name: file.get_slice(name).get_shape() for name in file.offset_keys()}
        return
    assert str(path) in message


@pytest.mark.parametrize("when", ["replaced", "gone", "folder"])
@pytest.mark.parametrize("name", ["lm_head.weight", PREFIX + "layers.0.ple.ple_embedding.layer_multipliers"])
def test_a_file_that_changes_after_its_header_was_read_is_named(
    tiny: tuple[Path, ModelConfig], monkeypatch: pytest.MonkeyPatch, when: str, name: str
) -> None:
    directory, config = tiny
    path = directory / CheckpointIndex.open(directory).files[name]
    opened = CheckpointIndex.open

    def then_it_changes(where: str | Path) -> CheckpointIndex:
        index = opened(where)
        path.unlink()
        if when == "replaced":
            save_file({"other": torch.zeros(1)}, path)
        elif when == "folder":
            path.mkdir()
        return index

    monkeypatch.setattr(CheckpointIndex, "open", then_it_changes)
    refuse(config, directory, str(path), "cannot be read", "download")


def test_a_file_that_goes_before_it_is_sampled_is_named(tiny: tuple[Path, ModelConfig]) -> None:
    directory, _ = tiny
    index = CheckpointIndex.open(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: cannot be read"):
        index.fingerprint()


def edit_index(directory: Path, edit: Callable[[dict[str, str]], None]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_index_entry_in_the_wrong_file(tiny: tuple[Path, ModelConfig]) -> None:
    directory, config = tiny
    edit_index(directory, lambda files: files.update({"lm_head.weight": "model-00002-of-00002.safetensors"}))
    refuse(config, directory, "lm_head.weight", "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors holds it")


def test_index_entry_nobody_holds(tiny: tuple[Path, ModelConfig]) -> None:
    directory, config = tiny
    edit_index(directory, lambda files: files.update({"model.ghost": "model-00002-of-00002.safetensors"}))
    refuse(config, directory, "model.ghost", "no file of the index holds it")


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "a/b", "model\0.safetensors", "..", "", ".", "x" * 300])
def test_index_entry_that_is_no_file_of_the_directory(tiny: tuple[Path, ModelConfig], name: str) -> None:
    directory, config = tiny
    edit_index(directory, lambda files: files.update({"lm_head.weight": name}))
    refuse(config, directory, str(directory))


def test_index_that_lists_a_name_twice(tiny: tuple[Path, ModelConfig]) -> None:
    directory, config = tiny
    path = directory / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"weight_map": {', '"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors",'))
    refuse(config, directory, "lm_head.weight", "twice", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", "[" * 200_000, '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "{}"])
def test_malformed_index(tiny: tuple[Path, ModelConfig], text: str) -> None:
    directory, config = tiny
    (directory / "model.safetensors.index.json").write_text(text)
    refuse(config, directory, "model.safetensors.index.json", "weight_map")


def test_no_index(tiny: tuple[Path, ModelConfig]) -> None:
    """Several files and no index leave open which tensor counts; one file says all."""
    directory, config = tiny
    before = load(config, directory, 0, 1, torch.float32)
    (directory / "model.safetensors.index.json").unlink()
    refuse(config, directory, "2 safetensors files", "no model.safetensors.index.json")
    tensors = tensors_of(directory)
    for file in directory.glob("*.safetensors"):
        file.unlink()
    refuse(config, directory, "no safetensors file")
    save_file(tensors, directory / "weights.safetensors")
    after = load(config, directory, 0, 1, torch.float32)
    assert all(torch.equal(after[name], t) for name, t in before.items())


def test_nothing_outside_the_index_is_read(tiny: tuple[Path, ModelConfig], caplog: pytest.LogCaptureFixture) -> None:
    """A stale shard with the same names, and a listed file that holds more than the index says, change nothing."""
    directory, config = tiny
    before = load(config, directory, 0, 1, torch.float32)
    poison = {name: torch.full_like(t, 9) for name, t in tensors_of(directory).items()}
    save_file(poison, directory / "model-00003-of-00003.safetensors")
    second = directory / "model-00002-of-00002.safetensors"
    held = load_file(second)
    save_file({**{name: t for name, t in poison.items() if name not in held}, **held}, second)
    with caplog.at_level(logging.INFO):
        after = load(config, directory, 0, 1, torch.float32)
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert f"not read: {len(poison) - len(held)} tensors" in caplog.text


def test_parts_of_other_models_are_counted_and_left_aside(tiny: tuple[Path, ModelConfig], caplog: pytest.LogCaptureFixture) -> None:
    directory, config = tiny
    tensors = tensors_of(directory)
    visual = sum(name.startswith("model.visual.") for name in tensors)
    tensors |= {"mtp.fc_hidden.weight": torch.zeros(2), "model.mtp.layers.0.mlp.gate.weight": torch.zeros(2)}
    tensors |= {PREFIX + "hyper_connection_mixer.block_inject_weight.weight": torch.zeros(4, 128)}
    tensors |= {PREFIX + "layers.0.ple.hashstats_3": torch.zeros(1), PREFIX + "layers.0.ple.token_lookup.table": torch.zeros(1)}
    write_weights(directory, tensors)
    with caplog.at_level(logging.INFO):
        load(config, directory, 0, 1, torch.float32)
    assert len(caplog.messages) == 1
    for count in (
        f"{visual} tensors (vision tower)",
        "2 tensors (draft head)",
        "2 tensors (hash statistics)",
        "1 tensors (unused injection",
    ):
        assert count in caplog.messages[0]


def test_hash_constants_may_be_absent(tiny: tuple[Path, ModelConfig]) -> None:
    directory, config = tiny
    before = load(config, directory, 0, 1, torch.float32)
    tensors = {name: t for name, t in tensors_of(directory).items() if "layer_multipliers" not in name and "ngram_heads_" not in name}
    write_weights(directory, tensors)
    after = load(config, directory, 0, 1, torch.float32)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())


def test_merged_ngram_table(tiny: tuple[Path, ModelConfig]) -> None:
    directory, config = tiny
    before = load(config, directory, 1, 2, torch.float32)
    tensors = tensors_of(directory)
    path = f"{PREFIX}layers.0.ple.ple_embedding.ngram_embedding."
    tensors[f"{path}weight"] = torch.cat([tensors.pop(f"{path}shard_{i}.weight") for i in range(config.ngram_shards)])
    write_weights(directory, tensors)
    after = load(config, directory, 1, 2, torch.float32)
    assert torch.equal(after["layers.0.ple.table"], before["layers.0.ple.table"])


@pytest.mark.parametrize("alias", ["k_proj.k_scale", "k_proj.output_scale", "attn.k_scale", "attn._k_scale", "_k_scale"])
def test_scale_aliases(tiny: tuple[Path, ModelConfig], alias: str) -> None:
    directory, config = tiny
    tensors = tensors_of(directory)
    scale = tensors.pop(f"{PREFIX}layers.1.self_attn.k_scale")
    tensors[f"{PREFIX}layers.1.self_attn.{alias}"] = scale.reshape(1)
    write_weights(directory, tensors)
    loaded = load(config, directory, 0, 1, torch.float16)["layers.1.qsa.k_scale"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, scale)


def test_quantized_checkpoints_are_refused(tiny: tuple[Path, ModelConfig]) -> None:
    directory, _ = tiny
    raw = json.loads((directory / "config.json").read_text())
    refuse(ModelConfig.from_dict(raw | {"quantization_config": {"quant_method": "awq"}}), directory, "awq")
    raw["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn"
    refuse(ModelConfig.from_dict(raw), directory, "float8_e4m3fn")


def test_impossible_targets(tiny: tuple[Path, ModelConfig]) -> None:
    directory, config = tiny
    with pytest.raises(ConfigError, match="bfloat16"):
        load(config, directory, 0, 1, torch.bfloat16)
    with pytest.raises(ConfigError, match="tensor parallel size is 3"):
        load(config, directory, 0, 3, torch.float32)
