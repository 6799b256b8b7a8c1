"""Tiny checkpoints: complete, deterministic, understood by transformers, with logits of a useful spread."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.tiny import make_tiny
from revolta_serve.weights.tiny_tokenizer import CONTROL_TOKENS, data, tokenizer_json
from support.oracle import Oracle

SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "bigrams, ratio 2": {
        "hidden": 32, "layers": 4, "heads": 2, "kv_heads": 1, "streams": 2, "rank": 8, "budget": 16, "ratio": 2, "ple_layers": (1,),
        "ngram": 2,
    },
    "four-grams, ratio 8, yarn, silu gate, eos list": {
        "hidden": 96, "layers": 6, "heads": 6, "head_dim": 16, "index_dim": 16, "streams": 3, "interval": 3, "ratio": 8,
        "ple_layers": (1, 4), "ngram": 4, "output_gate": "silu", "yarn": 4.0, "eos_list": True,
    },
    "listed layers, no gate field, one expert, larger embedding": {
        "layers": 5, "layer_types": ("linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"),
        "output_gate": None, "vocab": 1100, "rotary": 1.0, "gdn_key_heads": 1, "gdn_key_dim": 8, "experts_per_token": 1, "ple_layers": (3,),
    },
    "other widths and another hash seed": {"layers": 4, "hash_seed": 5, "ple_layers": (2, 3), "conv_width": 3, "ple_conv_width": 3},
    "no n-grams, five streams": {"layers": 4, "hidden": 48, "gdn_key_heads": 3, "gdn_value_heads": 3, "ple_layers": (), "streams": 5},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_transformers_loads_it_and_its_logits_spread(tmp_path: Path, shape: dict[str, Any]) -> None:
    from transformers import Qwen4ExpForConditionalGeneration

    config = make_tiny(tmp_path, seed=1, **shape)
    assert ModelConfig.load(tmp_path) == config
    model, report = Qwen4ExpForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    unknown = {name for name in report.pop("unexpected_keys") if not name.endswith((".k_scale", ".v_scale"))}
    assert not unknown
    assert not any(report.values()), report
    ids = torch.randint(0, 900, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    assert logits.shape[-1] == config.vocab
    assert 2 < float(logits.std()) < 4


def test_calibrated_scales_do_not_disturb_transformers(tmp_path: Path) -> None:
    plain, scaled = tmp_path / "plain", tmp_path / "scaled"
    make_tiny(plain, layers=4, kv_scales=False)
    make_tiny(scaled, layers=4)
    scales = {name: float(t) for name, t in load_file(scaled / "model.safetensors").items() if name.endswith("_scale")}
    assert set(scales) == {f"model.language_model.layers.3.self_attn.{which}_scale" for which in "kv"}
    assert all(0.005 < scale < 0.1 for scale in scales.values())
    ids = list(range(40))
    assert torch.equal(Oracle(plain).full_pass(ids).logits, Oracle(scaled).full_pass(ids).logits)


@pytest.mark.parametrize("form", [{"text_only": True}, {"per_expert": True, "shards": 3}], ids=str)
def test_other_forms_are_the_same_model_to_transformers(tmp_path: Path, form: dict[str, Any]) -> None:
    from transformers import Qwen4ExpForCausalLM

    make_tiny(tmp_path / "plain", layers=4)
    make_tiny(tmp_path / "form", layers=4, **form)
    ids = torch.arange(40)[None]
    both = []
    for name in ("plain", "form"):
        model = Qwen4ExpForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.inference_mode():
            both.append(model(input_ids=ids, use_cache=False).logits)
    assert torch.equal(*both)


def digest(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tokenizer_json.cache_clear()
        make_tiny(tmp_path / name, layers=4, shards=2, dtype="bfloat16")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    make_tiny(tmp_path / "c", layers=4, shards=2, dtype="bfloat16", seed=1)
    changed = {name for name, value in digest(tmp_path / "c").items() if value != digest(tmp_path / "a")[name]}
    assert changed == {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


def test_remaking_leaves_no_stale_weights(tmp_path: Path) -> None:
    make_tiny(tmp_path, layers=4, shards=3)
    make_tiny(tmp_path, layers=4)
    weights = {path.name for path in tmp_path.iterdir() if "safetensors" in path.name}
    assert weights == {"model.safetensors"}


def test_changing_one_part_leaves_the_others_alone(tmp_path: Path) -> None:
    make_tiny(tmp_path / "a", layers=4)
    make_tiny(tmp_path / "b", layers=4, experts=8)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    different = {name for name in a if a[name].shape != b[name].shape or not torch.equal(a[name], b[name])}
    assert different
    assert all(".mlp.experts." in name or name.endswith(".mlp.gate.weight") for name in different)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"shards": 0}, "shards is 0"),
        ({"heads": 3}, "num_key_value_heads is 2; must be a divisor of num_attention_heads 3"),
        ({"ple_layers": (4,)}, r"ple_layer_ids is \[4\]"),
        ({"budget": 30}, "indexer_budget is 30"),
    ],
)
def test_impossible_shapes_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny(tmp_path, **arguments)


def test_a_shape_that_is_not_tiny_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has [\d,]+ values, a tiny checkpoint at most 268,435,456"):
        make_tiny(tmp_path / "large", hidden=4096, experts=1024, expert_width=4096)
    assert not (tmp_path / "large").exists()


def test_unknown_shape_fields_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="hiden"):
        make_tiny(tmp_path, hiden=32)


TEXTS = [
    "Emma Woodhouse, handsome, clever, and rich, with a comfortable home.",
    "  leading\n\n\nand 12345 trailing \t ",
    "Ünïcödé é 日本語 🎉🎉 👩‍👩‍👧 \x00\x7f",
    "don't we'll I'M <think>\nhm\n</think>\n\n<tool_call>x</tool_call><|im_end|>",
    "",
]


def test_tokenizer_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tiny(tmp_path, layers=4)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_tokenizer_knows_every_byte_and_the_control_tokens_last(tmp_path: Path) -> None:
    config = make_tiny(tmp_path, layers=4, tokens=600)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS] == list(range(600 - len(CONTROL_TOKENS), 600))
    assert config.eos == tokenizer.token_to_id("<|endoftext|>")
    assert (config.image_token, config.video_token) == tuple(tokenizer.token_to_id(f"<|{kind}_pad|>") for kind in ("image", "video"))
    stops = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.token_to_id("<|im_end|>"), config.eos]
    every = "".join(map(chr, range(0x20, 0x2FF))) + "\U0001f389\u3042"
    assert tokenizer.decode(tokenizer.encode(every).ids) == every
    assert len([t for t in tokenizer.get_vocab() if len(t) == 1]) == 256


def test_tokenizer_sizes() -> None:
    assert Tokenizer.from_str(tokenizer_json(289)).get_vocab_size() == 289
    with pytest.raises(ConfigError, match="tokens is 288; must be at least 289"):
        tokenizer_json(288)
    with pytest.raises(ConfigError, match="yield only"):
        tokenizer_json(100_000)
    for strange in ("", "a b", "é\u3042"):
        with pytest.raises(ConfigError, match="extra_tokens holds"):
            tokenizer_json(400, (strange,))
    extra = Tokenizer.from_str(tokenizer_json(400, ("zqzq",)))
    assert extra.decode([extra.token_to_id("zqzq")]) == "zqzq"
    assert extra.token_to_id("zqzq") not in extra.encode("zqzq").ids


def test_excerpt_is_small_and_plain() -> None:
    assert 20_000 < len(data("austen_excerpt.txt").encode()) <= 60 * 1024
