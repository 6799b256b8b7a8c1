"""make-tiny destroys nothing: it refuses what it did not write, checks everything first, and writes all of it or none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from revolta_serve.errors import ConfigError
from revolta_serve.testing import scripted_checkpoint
from revolta_serve.weights import tiny_files
from revolta_serve.weights.checkpoint import load
from revolta_serve.weights.header import read_metadata
from revolta_serve.weights.tiny import make_tiny
from revolta_serve.weights.tiny_files import write_weights
from revolta_serve.weights.tiny_shape import TinyShape

SMALL: dict[str, Any] = {
    "layers": 2, "interval": 2, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 16, "index_heads": 1, "index_dim": 16,
    "experts": 4, "experts_per_token": 2, "expert_width": 8, "shared_width": 8, "tokens": 300, "ngram_base": 53, "ple_layers": (1,),
}  # fmt: skip
REAL = ("model.safetensors", "model-00001-of-00002.safetensors", "weights.safetensors", "mtp.safetensors")
"""Names under which somebody's weights may lie."""


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def somebodys(directory: Path, *names: str) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        if name.endswith(".safetensors"):
            save_file({"x": torch.ones(3)}, directory / name, metadata={"format": "pt"})
        else:
            (directory / name).write_text("{}")


WRITERS: dict[str, Callable[[Path], object]] = {
    "make_tiny": lambda path: make_tiny(path, **SMALL),
    "make_tiny shards": lambda path: make_tiny(path, shards=2, **SMALL),
    "write_weights": lambda path: write_weights(path, {"x": torch.zeros(2)}),
    "scripted_checkpoint": lambda path: scripted_checkpoint(path, "Hello"),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("names", [*((name,) for name in REAL), *((name,) for name in tiny_files.COMPANIONS), REAL], ids=" ".join)
def test_files_of_somebody_else_are_refused_and_untouched(tmp_path: Path, write: Callable[[Path], object], names: tuple[str, ...]) -> None:
    somebodys(tmp_path, "notes.txt", *names)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="which make-tiny did not write; choose another directory, or say --force") as error:
        write(tmp_path)
    assert sorted(names)[0] in error.value.message
    assert str(tmp_path) in error.value.message
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", REAL)
def test_weights_put_into_one_of_our_directories_are_somebodys(tmp_path: Path, name: str) -> None:
    """The mark of config.json says nothing about weights: each file answers for itself."""
    make_tiny(tmp_path, **SMALL)
    somebodys(tmp_path, name)
    before = snapshot(tmp_path)
    for write in WRITERS.values():
        with pytest.raises(ConfigError, match=f"holds {name}, which"):
            write(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("damage", [b"", b"\x07", b"not a safetensors file at all"])
def test_a_file_that_cannot_be_read_is_somebodys(tmp_path: Path, damage: bytes) -> None:
    make_tiny(tmp_path, **SMALL)
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"holds model\.safetensors"):
        make_tiny(tmp_path, **SMALL)


def test_force_replaces_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    somebodys(tmp_path, "notes.txt", *REAL, *tiny_files.COMPANIONS)
    target = tmp_path.with_name("target")
    target.mkdir()
    (target / "data").write_text("kept")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(target / "data")
    config = make_tiny(tmp_path, force=True, **SMALL)
    load(config, tmp_path, 0, 1, torch.float32)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"model.safetensors"}
    assert (tmp_path / "notes.txt").read_text() == "{}"
    assert (target / "data").read_text() == "kept", "a link is replaced, not written through"


def test_our_own_checkpoints_are_replaced_without_being_asked(tmp_path: Path) -> None:
    somebodys(tmp_path, "notes.txt")
    for arguments in ({"shards": 3}, {}, {"text_only": True, "kv_scales": False}, {"per_expert": True, "shards": 2}):
        config = make_tiny(tmp_path, **SMALL, **arguments)
        load(config, tmp_path, 0, 1, torch.float32)
        assert all(read_metadata(path)["made_by"] == "revolta-serve make-tiny" for path in tmp_path.glob("*.safetensors"))
    assert scripted_checkpoint(tmp_path, "Hello")
    write_weights(tmp_path, load_file(tmp_path / "model.safetensors"))
    assert json.loads((tmp_path / "config.json").read_text())["made_by"] == "revolta-serve make-tiny"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


MISTAKES: dict[str, Any] = {
    "layers=0": {"layers": 0}, "layers=2.0": {"layers": 2.0}, "layers=true": {"layers": True}, "layers=text": {"layers": "two"},
    "layers=none": {"layers": None}, "interval=0": {"interval": 0}, "hidden=-1": {"hidden": -1}, "hidden=huge": {"hidden": 10**30},
    "rotary=nan": {"rotary": float("nan")}, "rotary=2": {"rotary": 2}, "rotary=1e-6": {"rotary": 1e-6},
    "theta=inf": {"theta": float("inf")}, "theta=0": {"theta": 0}, "yarn=1e9": {"yarn": 1e9},
    "yarn too long": {"yarn": 1024.0, "max_positions": 512}, "yarn=true": {"yarn": True},
    "gate": {"output_gate": "tanh"}, "gate=1": {"output_gate": 1},
    "ple_layers=2": {"ple_layers": 2}, "ple_layers=[0]": {"ple_layers": (0,)}, "ple_layers text": {"ple_layers": ("1",)},
    "ple_layers sparse": {"ple_layers": (2,)}, "eos_list=5": {"eos_list": 5},
    "layer_types text": {"layer_types": "linear_attention"}, "layer_types count": {"layer_types": ("linear_attention",)},
    "layer_types names": {"layer_types": ("a", "b")}, "layer_types numbers": {"layer_types": (1, 2)}, "tokens=10": {"tokens": 10},
    "tokens=65536": {"tokens": 65536}, "tokens=10**9": {"tokens": 10**9}, "extra text": {"extra_tokens": "ab"},
    "extra control": {"extra_tokens": ("a b",)}, "extra twice": {"extra_tokens": ("qzq", "qzq")}, "extra known": {"extra_tokens": ("a",)},
    "vocab small": {"vocab": 299}, "vocab=0": {"vocab": 0}, "hash_seed": {"hash_seed": -1}, "hash_seed=2**63": {"hash_seed": 2**63},
    "ngram=1": {"ngram": 1}, "ngram_heads": {"ngram_heads": 3}, "ratio=3": {"ratio": 3}, "heads": {"heads": 3, "kv_heads": 2},
    "dtype": {"dtype": "float64"}, "shards=0": {"shards": 0}, "shards=many": {"shards": 100_000},
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_leaves_an_existing_checkpoint_as_it_was(tmp_path: Path, mistake: dict[str, Any]) -> None:
    make_tiny(tmp_path / "old", **SMALL)
    before = snapshot(tmp_path)
    for name in ("old", "new"):
        with pytest.raises(ConfigError) as error:
            make_tiny(tmp_path / name, **SMALL | mistake)
        assert "\n" not in error.value.message
        assert len(error.value.message) < 300
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_an_existing_checkpoint_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path, **SMALL)
    before = snapshot(tmp_path)
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "model.safetensors":
            write(path, data[:100])
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        make_tiny(tmp_path, seed=1, **SMALL)
    assert snapshot(tmp_path) == before


def test_places_that_are_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "odd/config.json").mkdir(parents=True)
    messages = {"file": "not a directory", "link": "not a directory", "odd": "is a folder", "file/in/it": "cannot be written"}
    for name, message in messages.items():
        for force in (False, True):
            with pytest.raises(ConfigError, match=message):
                make_tiny(tmp_path / name, force=force, **SMALL)
    assert (tmp_path / "file").read_text() == "kept"


def test_values_of_the_command_line_are_typed() -> None:
    numbers = ["layers=3", "rotary=1", "yarn=none", "hash_seed=none"]
    values = TinyShape.read([*numbers, "output_gate=silu", "ple_layers=[1, 2]", "extra_tokens=['a']", "eos_list=true"])
    assert values == {
        "layers": 3, "rotary": 1, "yarn": None, "output_gate": "silu", "ple_layers": (1, 2), "extra_tokens": ("a",), "eos_list": True,
        "hash_seed": None,
    }  # fmt: skip
    assert TinyShape(**values).layers == 3
    for text, message in (("layers", "write FIELD=VALUE"), ("layrs=1", "did you mean layers"), ("=1", "there is no field ''")):
        with pytest.raises(ConfigError, match=message):
            TinyShape.read([text])


DRAWN = st.fixed_dictionaries(
    {
        "layers": st.integers(2, 3), "interval": st.integers(1, 3), "hidden": st.sampled_from([4, 12, 16]),
        "heads": st.sampled_from([2, 4]), "kv_heads": st.integers(1, 2), "head_dim": st.sampled_from([4, 12, 16]),
        "rotary": st.sampled_from([0.5, 1.0]),
    },
    optional={
        "index_dim": st.sampled_from([16, 17]), "ratio": st.sampled_from([1, 4, 64]), "budget": st.sampled_from([64, 128]),
        "gdn_key_heads": st.integers(1, 2), "gdn_value_heads": st.sampled_from([2, 4]), "gdn_key_dim": st.integers(1, 3),
        "conv_width": st.integers(2, 5), "streams": st.integers(2, 3), "rank": st.integers(1, 3), "experts": st.integers(2, 4),
        "ngram": st.integers(2, 3), "ngram_heads": st.integers(1, 2), "ngram_base": st.sampled_from([2, 3, 50]),
        "ngram_divisor": st.integers(1, 9), "ngram_shards": st.sampled_from([1, 3, 4096]),
        "ple_layers": st.sampled_from([(), (1,), (2, 1)]), "yarn": st.sampled_from([1, 1.5, 4.0]), "vocab": st.integers(300, 302),
        "eos_list": st.booleans(), "text_only": st.booleans(),
        "per_expert": st.booleans(), "shards": st.integers(1, 3), "max_positions": st.integers(1, 200),
    },
)  # fmt: skip


@settings(max_examples=40)
@given(shape=DRAWN)
def test_every_shape_that_is_accepted_can_be_loaded(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    directory = tmp_path_factory.getbasetemp() / "drawn"
    try:
        config = make_tiny(directory, **SMALL | {"ple_layers": ()} | shape)
    except ConfigError:
        return  # a combination that the architecture does not have
    load(config, directory, 0, 1, torch.float32)
