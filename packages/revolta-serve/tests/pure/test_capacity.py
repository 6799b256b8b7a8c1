"""How many blocks and slots fit: golden figures of the full model, and properties of the division."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from revolta_serve.cache.capacity import Capacity, capacity, plan
from revolta_serve.cache.layout import BLOCK, Layout, Plane, layout
from revolta_serve.config import CacheConfig, ModelSource, ParallelConfig, ScheduleConfig, ServeConfig
from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import ModelConfig

FLASH_NEXT = {
    "model_type": "qwen4_exp_text", "num_hidden_layers": 48, "hidden_size": 2560, "vocab_size": 248320, "num_attention_heads": 24,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144, "indexer_n_heads": 4,
    "indexer_head_dim": 128, "indexer_kv_heads": 1, "indexer_compress_ratio": 4, "indexer_budget": 2048, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "eos_token_id": [248046, 248044],
    "ple_layer_ids": [2], "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000},
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return ModelConfig.from_dict(FLASH_NEXT)


def test_a_block_of_the_full_model(model):
    # model.md 4: a QSA layer keeps 2 KiB of FP16 K and V a token and 64 B of pooled index keys; E4M3 1 KiB; INT8 1 KiB + 16 B.
    per_token = {"float16": 2048, "fp8_e4m3": 1024, "int8": 1024 + 16}
    for kv, size in per_token.items():
        assert layout(model, tensor=1, context=1, dtype="float16", kv=kv).block_bytes == 12 * BLOCK * (size + 64)


def test_a_slot_of_the_full_model(model):
    shape = layout(model, tensor=1, context=1, dtype="float16", kv="float16")
    gdn = 36 * (48 * 128 * 128 * 4 + 3 * 10240 * 2)
    assert shape.slot_bytes == gdn + 9 * 10240 * 2 + 12 * 12 * 128 * 2
    # Four ranks share heads; the n-gram history and the index ring are on each.
    quarter = layout(model, tensor=4, context=1, dtype="float16", kv="float16")
    assert quarter.slot_bytes == gdn // 4 + 9 * 10240 * 2 + 12 * 12 * 128 * 2


def test_ranks_that_share_a_context_hold_part_of_each_block(model):
    alone = layout(model, tensor=4, context=1, dtype="float16", kv="float16")
    shared = layout(model, tensor=4, context=2, dtype="float16", kv="float16")
    keys = 12 * 16 * 128 * 2
    assert shared.block_bytes - keys == (alone.block_bytes - keys) // 2
    assert shared.slot_bytes == alone.slot_bytes


def config(**cache):
    length = cache.pop("max_model_len", 4096)
    return ServeConfig(
        model=ModelSource(dtype="float16"),
        cache=CacheConfig(**cache),
        parallel=ParallelConfig(),
        schedule=ScheduleConfig(max_model_len=length),
    )


def test_without_a_size_there_is_room_for_the_longest_request_and_8192_tokens_of_each_other(model):
    assert capacity(config(max_model_len=262144), model).tokens == 262144 + 7 * 8192
    assert capacity(config(max_model_len=16384), model).tokens == 16384 + 7 * 8192
    assert capacity(config(max_model_len=1000), model).tokens == 8 * 1024


def test_the_printed_plan_names_blocks_and_slots(model):
    result = capacity(config(max_model_len=16384), model)
    text = result.describe()
    assert f"{result.num_blocks:,} blocks" in text
    assert f"{result.num_slots} state slots" in text
    assert "4.50 requests of 16,384 tokens at the same time, or one of them and 57,344 tokens of others" in text


def test_explicit_numbers_win(model):
    result = capacity(config(num_blocks=64, num_slots=8), model)
    assert (result.num_blocks, result.num_slots) == (64, 8)
    with pytest.raises(ConfigError, match=r"num_blocks=63 holds 4032 tokens.*use at least 64 blocks or max_model_len=4032"):
        capacity(config(num_blocks=63), model)


def test_too_few_bytes_name_the_way_out(model):
    with pytest.raises(ConfigError, match=r"memory_bytes=1,000 holds 0 tokens beside 8 state slots.*use at least ([\d,]+) bytes") as caught:
        capacity(config(memory_bytes=1000), model)
    least = int(str(caught.value).split("use at least ")[1].split(" bytes")[0].replace(",", ""))
    assert capacity(config(memory_bytes=least), model).num_blocks == 64


def test_a_model_without_attention_has_blocks_of_no_bytes():
    raw = {**FLASH_NEXT, "layer_types": ["linear_attention"] * 48}
    result = capacity(config(memory_bytes=1 << 34), ModelConfig.from_dict(raw))
    assert result.kv_bytes == 0
    assert result.tokens == 8 * 4096


sizes = st.integers(1, 10**7)


@given(block=sizes, slot=sizes, seqs=st.integers(1, 64), length=st.integers(2, 10**6), memory=st.integers(1, 10**13))
def test_given_bytes_are_respected_and_nearly_used(block, slot, seqs, length, memory):
    shape = _shape(block, slot)
    try:
        result = plan(shape, max_num_seqs=seqs, max_model_len=length, memory_bytes=memory)
    except ConfigError:
        assert memory < seqs * slot + math.ceil(length / BLOCK) * block
        return
    used = result.kv_bytes + result.state_bytes
    assert used <= memory < used + block
    assert result.num_slots >= seqs
    assert result.tokens >= length
    assert result.num_slots <= 2 * seqs + 0.15 * memory / slot


@given(block=sizes, slot=sizes, seqs=st.integers(1, 64), length=st.integers(2, 10**6))
def test_derived_bytes_give_the_same_division(block, slot, seqs, length):
    derived = plan(_shape(block, slot), max_num_seqs=seqs, max_model_len=length)
    assume(derived.kv_bytes + derived.state_bytes)
    assert derived.tokens >= length + (seqs - 1) * min(length, 8192)
    total = math.ceil((derived.kv_bytes + 2 * seqs * slot) / 0.85)
    assert abs(plan(_shape(block, slot), max_num_seqs=seqs, max_model_len=length, memory_bytes=total).num_slots - derived.num_slots) <= 1


def _shape(block, slot):
    return Layout((Plane("k", 1, (block,), 1),), (Plane("gdn", 1, (slot,), 1),))


def test_resolve_takes_the_limit_of_the_checkpoint(model):
    assert ServeConfig().resolve(model).schedule.max_model_len == 262144
    with pytest.raises(ConfigError, match="max_model_len=262145 is more than the checkpoint's 262144"):
        replace(ServeConfig(), schedule=ScheduleConfig(max_model_len=262145)).resolve(model)


@pytest.mark.parametrize(
    ("tensor", "context", "fine"), [(4, 1, True), (4, 2, True), (4, 4, False), (2, 2, False), (3, 1, False), (8, 4, True)]
)
def test_resolve_checks_how_heads_divide(model, tensor, context, fine):
    wanted = replace(ServeConfig(), parallel=ParallelConfig(tensor=tensor, decode_context=context))
    if fine:
        assert isinstance(capacity(wanted.resolve(model), model), Capacity)
    else:
        with pytest.raises(ConfigError):
            wanted.resolve(model)
