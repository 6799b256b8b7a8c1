"""How many blocks and slots fit: golden figures of the full model, and properties of the division."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from revolta_serve.cache.capacity import Capacity, capacity, divide, pool_layout
from revolta_serve.cache.layout import BLOCK, Layout, Plane, Window, layout
from revolta_serve.config import CacheConfig, ModelSource, ParallelConfig, ScheduleConfig, ServeConfig, SpeculateConfig
from revolta_serve.errors import ConfigError
from support import published


@pytest.fixture(scope="module")
def model():
    return published.read()


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


def test_the_draft_head_adds_one_layer_its_ring_and_the_last_hidden_state(model):
    # One more QSA layer of 32 tokens a rank (E4M3: 256 + 256 bytes) with 16 index keys of 256 bytes, and 4 streams of 2560 values.
    shape = dict(tensor=4, context=2, dtype="float16", kv="fp8_e4m3")
    without, with_head = layout(model, **shape), layout(model, **shape, mtp="fp8_e4m3")
    assert without.block_bytes == 12 * (32 * 512 + 16 * 256)
    assert with_head.block_bytes == 13 * (32 * 512 + 16 * 256)
    assert with_head.slot_bytes - without.slot_bytes == 12 * 256 + 4 * 2560 * 2
    assert layout(model, **shape, mtp="float16").block_bytes - with_head.block_bytes == 32 * 512
    assert layout(model, **shape, mtp="int8").block_bytes - with_head.block_bytes == 32 * 2 * 4


def test_ranks_that_share_index_keys_hold_part_of_them(model):
    shape = dict(tensor=4, context=2, dtype="float16", kv="fp8_e4m3", mtp="fp8_e4m3")
    for index in (1, 2, 4):
        assert layout(model, **shape, index=index).block_bytes == 13 * (32 * 512 + 16 // index * 256)


def test_a_block_drafter_keeps_its_window_in_every_slot(model):
    shape = dict(tensor=4, context=2, dtype="float16", kv="fp8_e4m3")
    with_window = layout(model, **shape, window=Window(layers=5, reach=2048, rows=8, kv_heads=8, head_dim=128))
    assert with_window.slot_bytes - layout(model, **shape).slot_bytes == 5 * (2047 + 8) * 2 * (2 * 128) * 2
    assert with_window.block_bytes == layout(model, **shape).block_bytes


def test_the_configuration_decides_what_the_pools_hold(model):
    base = ServeConfig(model=ModelSource(dtype="float16"), parallel=ParallelConfig(tensor=4, decode_context=2))
    shape = dict(tensor=4, context=2, dtype="float16")
    assert pool_layout(base, model) == layout(model, **shape, kv="float16")
    asked = replace(base, cache=CacheConfig(kv_format="int8", index_ranks=2), speculate=SpeculateConfig(method="mtp"))
    assert pool_layout(asked, model) == layout(model, **shape, kv="int8", index=2, mtp="int8")
    window = Window(layers=1, reach=64, rows=8, kv_heads=4, head_dim=8)
    assert pool_layout(base, model, window) == layout(model, **shape, kv="float16", window=window)


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
    with pytest.raises(ConfigError, match=r"num_blocks=63 holds 4,032 tokens.*=4,096; use at least 64 blocks or --max-model-len 4032"):
        capacity(config(num_blocks=63), model)


def test_too_few_bytes_name_both_numbers_and_the_way_out(model):
    shape = pool_layout(config(), model)
    need = 64 * shape.block_bytes + 8 * shape.slot_bytes
    with pytest.raises(ConfigError) as caught:
        capacity(config(memory_bytes=need - 1), model)
    assert f"{need - 1:,} bytes for the pools of a rank hold 4,032 tokens beside 8 state slots" in caught.value.message
    assert f"max_model_len=4,096, which needs {need:,} bytes; use --max-model-len 4032 or less, or more bytes" in caught.value.message
    assert capacity(config(memory_bytes=need), model).num_blocks == 64
    assert capacity(config(memory_bytes=need - 1, max_model_len=4032), model).num_blocks == 63
    with pytest.raises(ConfigError, match=r"1,000 bytes .* hold 0 tokens .*; use more bytes$"):
        capacity(config(memory_bytes=1000), model)


def test_a_model_without_attention_has_blocks_of_no_bytes():
    result = capacity(config(memory_bytes=1 << 34), published.read(layer_types=["linear_attention"] * 48))
    assert result.kv_bytes == 0
    assert result.tokens == 8 * 4096


sizes = st.integers(1, 10**7)


budgets = dict(block=sizes, slot=sizes, seqs=st.integers(1, 64), length=st.integers(2, 10**6), memory=st.integers(1, 10**13))


@given(**budgets)
def test_given_bytes_are_respected_and_nearly_used(block, slot, seqs, length, memory):
    try:
        result = divide(_shape(block, slot), max_num_seqs=seqs, max_model_len=length, memory_bytes=memory)
    except ConfigError:
        assert memory < seqs * slot + math.ceil(length / BLOCK) * block
        return
    used = result.kv_bytes + result.state_bytes
    assert used <= memory < used + block + slot
    assert result.num_slots >= seqs
    assert result.tokens >= length
    default = 2 * seqs + 15 * memory // (100 * slot)
    assert result.num_slots <= default
    if result.num_slots < default:
        assert result.num_blocks == math.ceil(length / BLOCK), "slots give way to one longest request, to nothing else"


@given(more=st.integers(1, 10**12), slots=st.sampled_from([0, 100]), **budgets)
def test_more_bytes_never_mean_fewer_tokens_or_slots(block, slot, seqs, length, memory, more, slots):
    def result(memory):
        return divide(_shape(block, slot), max_num_seqs=seqs, max_model_len=length, memory_bytes=memory, num_slots=slots)

    try:
        fewer = result(memory)
    except ConfigError:
        return
    for greater in (memory + 1, memory + slot, memory + block, memory + more):
        assert result(greater).tokens >= fewer.tokens
        assert result(greater).num_slots >= fewer.num_slots


@given(block=sizes, slot=sizes, seqs=st.integers(1, 64), length=st.integers(2, 10**6))
def test_derived_bytes_give_the_same_division(block, slot, seqs, length):
    derived = divide(_shape(block, slot), max_num_seqs=seqs, max_model_len=length)
    assume(derived.kv_bytes + derived.state_bytes)
    assert derived.tokens >= length + (seqs - 1) * min(length, 8192)
    total = -(-(derived.kv_bytes + 2 * seqs * slot) * 100 // 85)
    assert abs(divide(_shape(block, slot), max_num_seqs=seqs, max_model_len=length, memory_bytes=total).num_slots - derived.num_slots) <= 1


def _shape(block, slot):
    return Layout((Plane("k", 1, (block,), 1),), (Plane("gdn", 1, (slot,), 1),))


def test_resolve_takes_the_limit_of_the_checkpoint(model):
    assert ServeConfig().resolve(model).schedule.max_model_len == 262144
    with pytest.raises(ConfigError, match="max_model_len=262145 is more than the checkpoint's 262144"):
        replace(ServeConfig(), schedule=ScheduleConfig(max_model_len=262145)).resolve(model)


def test_index_keys_are_not_cut_finer_than_a_block_has_them():
    coarse = published.read(indexer_compress_ratio=16)
    wanted = replace(ServeConfig(), parallel=ParallelConfig(tensor=8), cache=CacheConfig(index_ranks=8))
    with pytest.raises(ConfigError, match=r"index_ranks=8 must divide .* and the 4 index keys of a block; use a common divisor, such as 4"):
        wanted.resolve(coarse)


def test_yarn_extends_the_limit():
    extended = published.read(rope_parameters=published.TEXT["rope_parameters"] | published.YARN)
    assert ServeConfig().resolve(extended).schedule.max_model_len == 524288
    with pytest.raises(ConfigError, match=r"more than the checkpoint's 524288 positions; use at most 524288 \(--max-model-len\)"):
        replace(ServeConfig(), schedule=ScheduleConfig(max_model_len=524289)).resolve(extended)


@pytest.mark.parametrize(("tensor", "index", "fine"), [(4, 2, True), (4, 4, True), (4, 3, False), (2, 4, False), (1, 2, False)])
def test_index_keys_are_cut_evenly_over_ranks(model, tensor, index, fine):
    wanted = replace(ServeConfig(), parallel=ParallelConfig(tensor=tensor), cache=CacheConfig(index_ranks=index))
    if fine:
        assert wanted.resolve(model).cache.index_ranks == index
    else:
        with pytest.raises(ConfigError, match=rf"index_ranks={index} must divide parallel.tensor={tensor} and the 16 index keys"):
            wanted.resolve(model)


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
