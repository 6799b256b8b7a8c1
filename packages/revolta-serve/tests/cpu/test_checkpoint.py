"""Loading: the right values in the right place for every rank, spelling and dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.checkpoint import load
from revolta_serve.weights.index import CheckpointIndex
from revolta_serve.weights.tiny import make_tiny

SHAPE: dict[str, Any] = {
    "layers": 4, "hidden": 32, "heads": 8, "kv_heads": 2, "head_dim": 16, "index_dim": 16, "gdn_key_heads": 4, "gdn_value_heads": 8,
    "gdn_key_dim": 8, "gdn_value_dim": 8, "experts": 6, "expert_width": 16, "shared_width": 8, "tokens": 401, "ngram_base": 101,
    "ngram_divisor": 1, "ngram_shards": 5, "ple_layers": (1, 2),
}  # fmt: skip
PREFIX = "model.language_model."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig, dict[str, Tensor]]:
    directory = tmp_path_factory.mktemp("tiny")
    config = make_tiny(directory, seed=4, kv_scales=True, **SHAPE)
    raw = {name.removeprefix(PREFIX): t for name, t in load_file(directory / "model.safetensors").items()}
    return directory, config, raw


def expected(config: ModelConfig, raw: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Every parameter of a rank, built from whole tensors with plain indexing."""

    def part(t: Tensor, axis: int = 0) -> Tensor:
        size = -(-t.shape[axis] // ranks)
        return t.narrow(axis, min(rank * size, t.shape[axis]), max(0, min(size, t.shape[axis] - rank * size)))

    def tall(t: Tensor) -> Tensor:
        mine, height = part(t), -(-t.shape[0] // ranks)
        return torch.cat([mine, mine.new_zeros(height - mine.shape[0], mine.shape[1])])

    def groups(t: Tensor, *sizes: int) -> Tensor:
        return torch.cat([part(g) for g in t.split_with_sizes(list(sizes))])

    keys, values, s, e = config.gdn_key_heads * config.gdn_key_dim, config.gdn_width, config.streams, config.hidden
    held = max(1, config.kv_heads // ranks)
    first = rank * config.kv_heads // ranks
    out = {"embed": tall(raw["embed_tokens.weight"]), "lm_head": tall(raw["lm_head.weight"])}

    def hyper(name: str, path: str) -> None:
        inject = [raw[f"{path}.block_inject_weight.weight"]] if f"{path}.block_inject_weight.weight" in raw else []
        out[f"{name}.norm"] = raw[f"{path}.hc_norm.weight"].view(s, e)
        out[f"{name}.w_in"] = torch.cat([raw[f"{path}.input_mix_weight_down.weight"], *inject])
        out[f"{name}.w_up"] = raw[f"{path}.input_mix_weight_up.weight"]

    hyper("mixer", "hyper_connection_mixer")
    for i, kind in enumerate(config.layer_types):
        w = {name.removeprefix(f"layers.{i}."): t for name, t in raw.items() if name.startswith(f"layers.{i}.")}
        mine: dict[str, Tensor] = {}
        hyper(f"layers.{i}.attn_hyper", f"layers.{i}.attn_hyper_connection")
        hyper(f"layers.{i}.mlp_hyper", f"layers.{i}.mlp_hyper_connection")
        if kind == "gdn":
            a = {name.removeprefix("linear_attn."): t for name, t in w.items()}
            heads = [part(a[f"in_proj_{p}.weight"]) for p in "zba"]
            mine["gdn.in_proj"] = torch.cat([groups(a["in_proj_qkv.weight"], keys, keys, values), *heads])
            mine["gdn.conv"] = groups(a["conv1d.weight"], keys, keys, values)[:, 0]
            mine |= {"gdn.A_log": part(a["A_log"]), "gdn.dt_bias": part(a["dt_bias"]), "gdn.norm": a["norm.weight"]}
            mine["gdn.out_proj"] = part(a["out_proj.weight"], 1)
        else:
            a = {name.removeprefix("self_attn."): t for name, t in w.items()}
            rows = slice(first * config.head_dim, (first + held) * config.head_dim)
            kv = [a["k_proj.weight"][rows], a["v_proj.weight"][rows]]
            mine["qsa.in_proj"] = torch.cat([part(a["q_proj.weight"]), *kv, a["indexer.index_qk_proj.weight"]])
            mine |= {"qsa.q_norm": a["q_norm.weight"], "qsa.k_norm": a["k_norm.weight"], "qsa.out_proj": part(a["o_proj.weight"], 1)}
            mine |= {"qsa.iq_norm": a["indexer.q_layernorm.weight"], "qsa.ik_norm": a["indexer.k_layernorm.weight"]}
            mine |= {"qsa.k_scale": a["k_scale"], "qsa.v_scale": a["v_scale"]}
        gate, up = w["mlp.experts.gate_up_proj"].chunk(2, 1)
        mine["moe.w13"] = torch.cat([part(gate, 1), part(up, 1)], 1)
        mine |= {"moe.router": w["mlp.gate.weight"], "moe.w2": part(w["mlp.experts.down_proj"], 2).transpose(0, 1)}
        shared = {p: w[f"mlp.shared_expert.{p}_proj.weight"] for p in ("gate", "up", "down")}
        mine["moe.shared13"] = torch.cat([part(shared["gate"]), part(shared["up"])])
        mine |= {"moe.shared2": part(shared["down"], 1), "moe.shared_gate": w["mlp.shared_expert_gate.weight"]}
        if i in config.ple_layers:
            shards = [w[f"ple.ple_embedding.ngram_embedding.shard_{n}.weight"] for n in range(config.ngram_shards)]
            mine["ple.table"] = tall(torch.cat(shards))
            mine["ple.multipliers"] = w["ple.ple_embedding.layer_multipliers"]
            mine["ple.primes"] = w["ple.ple_embedding.ngram_heads_vocab_sizes"]
            mine["ple.offsets"] = w["ple.ple_embedding.ngram_heads_offsets"]
            mine |= {"ple.key": w["ple.key_proj.weight"], "ple.value": w["ple.value_proj.weight"], "ple.conv": w["ple.conv1d.weight"][:, 0]}
            mine |= {f"ple.{n}": w[f"ple.{n}.weight"].view(s, e) for n in ("norm_key", "norm_query", "norm_conv")}
        out |= {f"layers.{i}.{name}": t for name, t in mine.items()}
    return out


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_its_part(tiny: tuple[Path, ModelConfig, dict[str, Tensor]], ranks: int) -> None:
    directory, config, raw = tiny
    for rank in range(ranks):
        assert_same(load(config, directory, rank, ranks, torch.float32), expected(config, raw, rank, ranks))


@pytest.mark.parametrize(
    "form",
    [{"shards": 3}, {"per_expert": True}, {"text_only": True}, {"text_only": True, "per_expert": True, "shards": 4}],
    ids=str,
)
def test_every_spelling_loads_the_same(
    tiny: tuple[Path, ModelConfig, dict[str, Tensor]], tmp_path: Path, form: dict[str, Any]
) -> None:  # fmt: skip
    config = make_tiny(tmp_path, seed=4, kv_scales=True, **form, **SHAPE)
    for rank in range(2):
        assert_same(load(config, tmp_path, rank, 2, torch.float32), expected(tiny[1], tiny[2], rank, 2))


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("target", [torch.float32, torch.float16])
def test_dtypes(tmp_path: Path, source: str, target: torch.dtype) -> None:
    config = make_tiny(tmp_path, dtype=source, **SHAPE)
    raw = {name.removeprefix(PREFIX): t for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert raw["lm_head.weight"].dtype == getattr(torch, source)
    got = load(config, tmp_path, 0, 1, target)
    assert torch.equal(got["lm_head"], raw["lm_head.weight"].to(target))
    assert torch.equal(got["layers.0.moe.w2"], raw["layers.0.mlp.experts.down_proj"].transpose(0, 1).to(target))
    for name, tensor in got.items():
        if name.endswith(("A_log", "dt_bias", "gdn.norm", "_scale")):
            assert tensor.dtype == torch.float32
        elif name.endswith(("multipliers", "primes", "offsets")):
            assert tensor.dtype == torch.int64
        else:
            assert tensor.dtype == target, name


def test_progress_counts_this_ranks_bytes(tiny: tuple[Path, ModelConfig, dict[str, Tensor]]) -> None:
    directory, config, _ = tiny
    seen: list[tuple[int, int, str]] = []
    got = load(config, directory, 1, 2, torch.float32, progress=lambda done, total, name: seen.append((done, total, name)))
    done = [d for d, _, _ in seen]
    assert done == sorted(done)
    assert {total for _, total, _ in seen} == {done[-1]}
    padding = 2 * config.hidden * 4
    tables = sum((got[f"layers.{i}.ple.table"].shape[0] * 2 - config.ngram_rows(i)) * config.ngram_width * 4 for i in config.ple_layers)
    assert done[-1] == sum(t.nbytes for t in got.values()) - padding - tables
    assert "layers.0.moe.w13" in {name for _, _, name in seen}


def test_big_tensors_are_read_in_parts(tiny: tuple[Path, ModelConfig, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, config, raw = tiny
    monkeypatch.setattr("revolta_serve.weights.checkpoint.CHUNK", 1000)
    calls: list[str] = []
    got = load(config, directory, 0, 2, torch.float32, progress=lambda done, total, name: calls.append(name))
    assert_same(got, expected(config, raw, 0, 2))
    assert calls.count("layers.0.moe.w13") == 2 * config.experts


def test_inventory_and_fingerprint(tiny: tuple[Path, ModelConfig, dict[str, Tensor]], tmp_path: Path) -> None:
    directory, _, raw = tiny
    index = CheckpointIndex.open(directory)
    whole = {name.removeprefix(PREFIX): (info.dtype, info.shape) for name, info in index.tensors.items()}
    assert whole == {name: ("I64" if t.dtype == torch.int64 else "F32", tuple(t.shape)) for name, t in raw.items()}
    make_tiny(tmp_path, seed=4, kv_scales=True, **SHAPE)
    assert CheckpointIndex.open(tmp_path).fingerprint() == index.fingerprint()
    prints = {index.fingerprint()}
    for change in ({"seed": 5}, {"max_positions": 4096}, {"shards": 2}, {"dtype": "bfloat16"}):
        make_tiny(tmp_path, **{"seed": 4, "kv_scales": True, **SHAPE, **change})
        prints.add(CheckpointIndex.open(tmp_path).fingerprint())
    assert len(prints) == 5
