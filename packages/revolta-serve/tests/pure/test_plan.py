"""The account of a rank: everything adds up, more memory never means less, and what cannot be is refused with the way out."""

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from revolta_serve import profile
from revolta_serve.cache.capacity import capacity
from revolta_serve.commands.plan_account import account, files
from revolta_serve.commands.plan_computable import check_computable
from revolta_serve.commands.plan_text import as_json, lines
from revolta_serve.commands.plan_work import work_space
from revolta_serve.errors import CheckpointError, ConfigError
from revolta_serve.model.model_config import ModelConfig
from support import published

SMALL = dict(
    num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"], num_experts=8, num_experts_per_tok=2,
    ngram_vocab_size_base=5000,
)  # fmt: skip
"""Fewer layers, experts and n-grams of the published dimensions: quick to plan often."""

DRAFTER = {
    "num_hidden_layers": 5, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "sliding_window": 2048, "layer_types": ["sliding_attention"] * 5,
    "dflash_config": {
        "block_size": 8, "target_layer_ids": [0, 1, 2, 3], "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return published.write(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return published.write(tmp_path_factory.mktemp("small"), **SMALL)


def config(path, *sets, profile_name="v100x4"):
    return profile.load(profile_name, {"model.path": str(path)}, sets).config


def made(path, *sets, stated="awq-g32", profile_name="v100x4"):
    return account(config(path, *sets, profile_name=profile_name), ModelConfig.load(path), stated=stated)


@pytest.fixture(scope="module")
def whole(directory):
    return made(directory)


def test_the_shipped_profile_plans_the_published_model(whole):
    plan = whole
    assert plan.planned == math.floor(34_057_748_480 * 0.95)
    parts = [part.bytes for part in (*plan.weights, *plan.work) if part.place == "device"]
    pools = plan.capacity.num_blocks * plan.capacity.block_bytes + plan.capacity.num_slots * plan.capacity.slot_bytes
    assert sum(parts) + 700 * 2**20 + pools + plan.left == plan.planned
    assert 0 <= plan.left < plan.capacity.block_bytes + plan.capacity.slot_bytes
    assert [part.name for part in plan.weights if part.place == "host"] == ["n-gram tables"]
    assert plan.host_weights == 320_001_536 // 4 * 160 + 2
    # 13 layers: 32 tokens of a rank with 512 bytes each, 8 of the 16 index keys with 256 bytes each.
    assert plan.capacity.block_bytes == 13 * (32 * 512 + 8 * 256)
    # 36 float32 states of 12 heads and windows of three columns; n-gram history; rings of 12 raw keys; four streams of the last token.
    assert plan.capacity.slot_bytes == 36 * (12 * 128 * 128 * 4 + 3 * 2560 * 2) + 9 * 10240 * 2 + 13 * 12 * 128 * 2 + 10240 * 2
    budget = plan.config.cache.memory_bytes
    assert plan.capacity.num_slots == 16 + budget * 15 // 100 // plan.capacity.slot_bytes
    assert plan.capacity.num_blocks == (budget - 16 * plan.capacity.slot_bytes - budget * 15 // 100) // plan.capacity.block_bytes
    assert plan.largest == 524_288 == plan.config.schedule.max_model_len


@pytest.mark.parametrize("sets", [(), ("cache.memory_bytes=3000000000",), ("cache.num_blocks=9000",)])
def test_the_pools_are_those_that_the_server_computes_from_the_resolved_configuration(small, sets):
    plan = made(small, *sets)
    assert capacity(plan.config, ModelConfig.load(small), plan.window) == plan.capacity


def test_work_space_of_the_published_model(directory):
    model = ModelConfig.load(directory)
    resolved = config(directory).resolve(model)
    rows, verify = 8192, 8 * 5
    qsa = [
        rows * (6 * 512 + 512 + 640) * 2,  # projected
        rows * 12 * 256 * (2 + 4 + 4),  # queries of both ranks, partial outputs there and back
        64 * 131_072 * 4,  # scores of a tile
        rows * 2051 * 4 * 2,  # selection, and the local part of it
        262_144 * 256 * 2 * 2,  # keys and values of a layer, expanded to float16
    ]
    assert {part.name: part.bytes for part in work_space(resolved, model)} == {
        "streams, and normalised": 2 * rows * 10240 * 2,
        "block input, output and gates": rows * (2 * 2560 + 320 + 4) * 2,
        "widest layer (QSA)": sum(qsa),
        "sums over ranks, two buffers": 2 * rows * 2560 * 2,
        "logits": verify * (62_080 + 248_320) * 4,
        "inputs of verified rows": 8 * 8 * (36 * (2560 + 24) + 10240) * 2,
        "image and video features": rows * 2560 * 2,
        "block tables": 8 * 8192 * 4,
    }
    plain = replace(resolved, cache=replace(resolved.cache, kv_format="auto"), speculate=replace(resolved.speculate, method="none"))
    names = {part.name: part.bytes for part in work_space(plain, model)}
    assert names["widest layer (QSA)"] == sum(qsa[:-1])
    assert names["inputs of verified rows"] == 64 * (36 * (2560 + 24) + 10240) * 2, "answers are computed again without drafts too"
    for seqs, most in ((1, 8), (32, 64)):
        few = replace(plain, schedule=replace(plain.schedule, max_num_seqs=seqs))
        assert {part.name: part.bytes for part in work_space(few, model)}["inputs of verified rows"] == most * (36 * 2584 + 10240) * 2


@pytest.mark.parametrize(
    "sets", [(), ("speculate.method=none",), ("cache.kv_format=int8", "cache.index_ranks=1"), ("model.ngram_tables=device",)]
)
def test_parts_add_up_and_the_object_has_the_same_numbers(small, sets):
    plan = made(small, "schedule.max_model_len=100000", *sets)
    found = json.loads(json.dumps(as_json(plan)))
    device = found["device"]
    parts = [part["bytes"] for part in found["weights"] if part["place"] == "device"] + [
        part["bytes"] for part in found["work_space_estimated"]
    ]
    pools = 0
    for kind in ("blocks", "slots"):
        pool = found[kind]
        for plane in pool["planes"]:
            assert plane["bytes"] == plane["layers"] * math.prod(plane["shape"]) * plane["element_bytes"]
        assert pool["bytes_each"] == sum(plane["bytes"] for plane in pool["planes"])
        assert pool["bytes"] == pool["count"] * pool["bytes_each"]
        pools += pool["bytes"]
    assert sum(parts) + found["graph_reserve_bytes"] + pools == device["used_bytes"] == device["planned_bytes"] - device["left_bytes"]
    assert found["tokens"] == 64 * found["blocks"]["count"] == plan.capacity.tokens
    assert found["concurrency"] == found["blocks"]["count"] / math.ceil(100_000 / 64)
    assert (found["largest_context"], found["max_model_len"]) == (plan.largest, 100_000)
    assert {plane["name"] for plane in found["blocks"]["planes"]} >= {"k", "v", "keys"}
    assert ("mtp_k" in {plane["name"] for plane in found["blocks"]["planes"]}) == (plan.config.speculate.method == "mtp")


def test_lines_say_what_the_object_says(whole):
    plan = whole
    text = "\n".join(lines(plan))
    assert "4 ranks, 2 of them share a context, float16, keys and values fp8_e4m3, index keys shared by 2, mtp with 4 drafts" in text
    assert f"{plan.capacity.num_blocks:,} blocks of 64 tokens = {plan.capacity.tokens:,} tokens" in text
    assert f"{plan.capacity.num_slots} state slots" in text
    assert "the longest context that fits is 524,288 tokens" in text
    assert "reserve for graphs 700.00 MiB" in text
    for plane in (*plan.shape.block, *plan.shape.slot):
        assert f"{plane.name} {plane.bytes:,}" in text
    for part in (*plan.weights, *plan.work):
        assert re.search(rf"{re.escape(part.name)} [\d.]+ [KMG]iB", text), part.name
    assert "in host memory 11.92 GiB: n-gram tables 11.92 GiB" in text
    assert "planned 95.0% = 30.13 GiB" in text


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    device=st.integers(2 * 10**9, 8 * 10**9), more=st.integers(1, 10**9), length=st.integers(2, 524_288),
    seqs=st.integers(1, 12), method=st.sampled_from(["none", "mtp"]),
)  # fmt: skip
def test_more_memory_never_means_less(small, device, more, length, seqs, method):
    def plan(size, tokens=length):
        return made(
            small, f"cache.device_bytes={size}", f"schedule.max_model_len={tokens}", f"schedule.max_num_seqs={seqs}",
            f"speculate.method={method}",
        )  # fmt: skip

    message = ""
    try:
        less = plan(device)
    except ConfigError as error:
        message = error.message
    event("refused" if message else "planned")
    if message:
        way = re.search(r"use --max-model-len (\d+) or less", message)
        if way is None:
            assert "use weights in a packed format, more ranks (--tensor-parallel-size), fewer --max-num-seqs" in message
            with pytest.raises(ConfigError):
                plan(device, 2)
            return
        assert int(way[1]) < length
        assert plan(device, int(way[1])).largest == int(way[1]), "the way out works, and is the longest"
        with pytest.raises(ConfigError):
            plan(device, int(way[1]) + 1)
        return
    greater = plan(device + more)
    assert greater.capacity.tokens >= less.capacity.tokens
    assert greater.capacity.num_slots >= less.capacity.num_slots
    assert greater.largest >= less.largest >= length
    assert less.used + less.left == less.planned
    assert less.left >= 0


def test_a_refusal_names_both_numbers(directory, whole):
    with pytest.raises(ConfigError) as caught:
        made(directory, "cache.device_bytes=26500000000")
    plan = whole
    needed = 8192 * plan.capacity.block_bytes + 8 * plan.capacity.slot_bytes
    others = plan.device_weights + plan.work_bytes + plan.reserve
    planned = 26_500_000_000 * 95 // 100
    assert (
        f"8 state slots take {needed:,} bytes of each rank, {planned - others:,} remain of the {planned:,} planned (95% of"
        in caught.value.message
    )
    assert f"beside {others:,} of weights, work space and graphs; use --max-model-len" in caught.value.message


def test_weights_alone_may_be_too_much(directory):
    with pytest.raises(ConfigError, match=r", 0 remain of the .*; use weights in a packed format, more ranks"):
        made(directory, stated="dense")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["cache.memory_bytes=200000000"],
            r"200,000,000 are given with --kv-cache-memory-bytes; use at least \d+ or --max-model-len \d+ or less",
        ),
        (["cache.num_blocks=300"], r"takes 8192 blocks of 64 tokens, cache.num_blocks=300 are there; use --max-model-len 19200 or less"),
        (
            ["cache.memory_bytes=40000000000"],
            r"more than the 32,354,861,056 planned of each device; use --kv-cache-memory-bytes (\d+) or less",
        ),
        (["cache.num_blocks=2000000"], r"more than the 32,354,861,056 planned of each device"),
        (["parallel.tensor=3", "parallel.decode_context=1"], "tensor parallel size is 3"),
        (["cache.index_ranks=3"], "index_ranks=3 must divide parallel.tensor=4 and the 16 index keys of a block; use a common divisor"),
        (["schedule.max_model_len=524289"], "more than the checkpoint's 524288 positions"),
        (["parallel.tensor=8", "parallel.decode_context=4"], "cuts the experts' width 640 into 80"),
    ],
)
def test_refusals(small, sets, message):
    with pytest.raises(ConfigError, match=message) as caught:
        made(small, *sets)
    if way := re.search(r"use at least (\d+) or --max", caught.value.message):
        assert made(small, f"cache.memory_bytes={way[1]}").capacity.tokens == 524_288
        with pytest.raises(ConfigError):
            made(small, f"cache.memory_bytes={int(way[1]) - 1}")
    if way := re.search(r"--kv-cache-memory-bytes (\d+) or less", caught.value.message):
        assert made(small, f"cache.memory_bytes={way[1]}").left >= 0
        with pytest.raises(ConfigError):
            made(small, f"cache.memory_bytes={int(way[1]) + 10**8}")


def test_without_a_device_the_pools_follow_from_the_lengths(small):
    plan = made(small, stated="dense", profile_name="cpu")
    assert plan.capacity.tokens == 524_288 + 7 * 8192
    assert (plan.planned, plan.left, plan.largest) == (0, None, 524_288)
    assert not [line for line in lines(plan) if "device" in line]
    assert plan.config.cache.memory_bytes == 0
    given = made(small, "cache.memory_bytes=4000000000", stated="dense", profile_name="cpu")
    assert given.left == 4_000_000_000 - given.pool_bytes


def drafter(path, **changes):
    below = DRAFTER["dflash_config"] | changes.pop("dflash_config", {})
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(DRAFTER | {"dflash_config": below} | changes))
    return f"speculate.drafter={path}"


def test_a_block_drafter_is_planned_from_its_config(small, tmp_path):
    plan = made(small, "speculate.method=dflash", "speculate.drafts=7", drafter(tmp_path / "d"), "schedule.max_model_len=100000")
    layer = (8 + 2) * 128 * 2560 * 2 + 2 * 128 + 3 * 2432 * 2560 + 2 * (2 * 2 * 2560 + 2 * 2 * 160 * 2560) + 2 * 2560
    selector = 2 * 62_080 * 256 + 256 * 2560
    assert {part.name: part.bytes for part in plan.weights}["drafter"] == 2 * (5 * layer + 4 * 2560 * 2560 + 2 * 2560 + selector)
    planes = {plane.name: plane.bytes for plane in plan.shape.slot}
    assert planes["window_k"] == planes["window_v"] == 5 * (2047 + 8) * 2 * 128 * 2
    assert not {"mtp_ring", "mtp_hidden"} & planes.keys()
    assert not [plane for plane in plan.shape.block if plane.name.startswith("mtp")]


@pytest.mark.parametrize(
    ("changes", "sets", "message"),
    [
        (
            {},
            ["speculate.drafts=4"],
            r"drafts=4 and the token before them are 5 rows, but .* has block_size 8; use --set speculate.drafts=7",
        ),
        ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, [], r"layer_types is .*must be 5 times sliding_attention"),
        ({"hidden_size": 5120}, [], r"hidden_size is 5120; must be 2560, the model's"),
        ({"sliding_window": None}, [], r"sliding_window missing; must be an integer"),
        ({"dflash_config": {"target_layer_ids": [47]}}, [], r"target_layer_ids is \[47\]; must be an integer in \[0, 3\]"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(small, tmp_path, changes, sets, message):
    with pytest.raises(ConfigError, match=message):
        made(small, "speculate.method=dflash", drafter(tmp_path / "d", **changes), *(sets or ["speculate.drafts=7"]))


def test_a_drafter_needs_a_config(small, tmp_path):
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        made(small, "speculate.method=dflash", "speculate.drafts=7", f"speculate.drafter={tmp_path}")


def test_what_cannot_be_computed_yet_is_refused_all_at_once(small):
    model = ModelConfig.load(small)
    with pytest.raises(ConfigError) as caught:
        check_computable(config(small), model)
    for name in ("cache.kv_format=fp8_e4m3", "cache.index_ranks=2", "cache.device_bytes=34057748480", "speculate.method=mtp",
                 "model.vision=true", "model.ngram_tables=host"):  # fmt: skip
        assert name in caught.value.message
    check_computable(config(small, profile_name="cpu"), model)
    check_computable(config(small, "cache.kv_format=float16", "model.dtype=float16", profile_name="cpu"), model)
    for wrong in ("cache.kv_format=float16", "cache.kv_format=int8", "parallel.tensor=2 cache.index_ranks=2", "speculate.method=mtp",
                  "model.vision=true", "model.ngram_tables=host", "cache.device_bytes=1"):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"can plan but not serve {wrong.split()[-1]} \(use "):
            check_computable(config(small, *wrong.split(), profile_name="cpu"), model)


@pytest.mark.parametrize(
    ("top", "changes", "name"),
    [({"quantization_config": {"quant_method": "awq"}}, {}, "awq"), (None, {"ple_embedding_dtype": "nvfp4"}, "ple_embedding_dtype nvfp4")],
)
def test_packed_checkpoints_are_refused_before_anything_is_loaded(tmp_path, top, changes, name):
    path = published.write(tmp_path, top, **SMALL, **changes)
    with pytest.raises(CheckpointError, match=f"stored as {name}; this version serves float32"):
        check_computable(config(path, profile_name="cpu"), ModelConfig.load(path))


def test_a_directory_without_weight_files_has_no_index(tmp_path):
    assert files(str(tmp_path)) is None
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        files(str(tmp_path))
