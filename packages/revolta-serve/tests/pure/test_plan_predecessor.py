"""The predecessor's published figures come out of its rules; none of them is written down in the source."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import revolta_serve
from revolta_serve import profile
from revolta_serve.cache.capacity import divide
from revolta_serve.cache.layout import Window, layout
from revolta_serve.cache.predecessor import Setup, predecessor
from revolta_serve.commands import plan_predecessor
from revolta_serve.commands.plan_account import account
from revolta_serve.commands.plan_predecessor import DRAFTER, PUBLISHED, compare
from revolta_serve.commands.plan_text import comparison_lines
from revolta_serve.model.model_config import ModelConfig
from support import published

LENGTH = 524_288

TABLE = {
    # name: blocks of a request = attention + recurrent + ring + n-gram (+ drafter), blocks, tokens, concurrency
    "AWQ, E4M3, MTP4, 0.1.0": (365, (322, 6 * 6, 1, 6, 0), 794, 1_140_505, 2.18),
    "AWQ, E4M3, MTP4": (361, (322, 36, 1, 2, 0), 794, 1_153_143, 2.20),
    "AWQ, FP16, MTP4": (670, (631, 36, 1, 2, 0), 861, 673_749, 1.29),
    "AWQ, INT8, MTP4": (361, (322, 36, 1, 2, 0), 785, 1_140_072, 2.17),
    "NVFP4, E4M3, MTP4": (361, (322, 36, 1, 2, 0), 861, 1_250_448, 2.39),
    "FP4-Local, E4M3, MTP4, FP16 draft": (361, (322, 36, 1, 2, 0), 910, 1_321_612, 2.52),
    "FP4-Local, E4M3, MTP4": (361, (322, 36, 1, 2, 0), 1015, 1_474_106, 2.81),
    "AWQ, E4M3, DFlash2, 0.1.2": (388, (316, 54, 1, 2, 15), 939, 1_268_831, 2.42),
    "AWQ, FP16, DFlash2": (703, (631, 54, 1, 2, 15), 1048, 781_584, 1.49),
    "AWQ, E4M3, DFlash2, 0.1.3": (388, (316, 54, 1, 2, 15), 1021, 1_379_634, 2.63),
    "AWQ, E4M3, DFlash2, replay": (346, (316, 12, 1, 2, 15), 1018, 1_542_558, 2.94),
    "AWQ, E4M3, MTP4, n-gram tables on disk": (361, (322, 36, 1, 2, 0), 739, 1_073_265, 2.05),
}
"""Every published configuration with its breakdown."""

OTHERS = {
    "AWQ, E4M3, MTP4, 0.1.0, NVLink": 1_100_286,
    "AWQ, E4M3, DFlash2, 0.1.2, small graph reserve": 1_445_845,
    "NVFP4, E4M3, DFlash2": 1_337_745,
    "FP4-Local, E4M3, DFlash2": 1_335_042,
    "AWQ, E4M3, DFlash2, 0.1.2 and replay": 1_418_305,
}
"""Figures published without a breakdown."""


@pytest.fixture(scope="module")
def model():
    return published.read()


def planned(path, *sets):
    config = profile.load("v100x4", {"model.path": str(path)}, sets).config
    return account(config, ModelConfig.load(path), stated="awq-g32")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = published.write(tmp_path_factory.mktemp("published"))
    return {row.name: row for row in compare(planned(path), ModelConfig.load(path))}


def test_every_published_row_is_compared(rows):
    assert {row.name for row in PUBLISHED} == TABLE.keys() | OTHERS.keys()
    assert list(rows) == ["this plan", *(row.name for row in PUBLISHED)]


@pytest.mark.parametrize("name", TABLE)
def test_a_published_row_is_reproduced(rows, name):
    total, groups, blocks, tokens, concurrency = TABLE[name]
    row = rows[name]
    assert tuple(row.theirs.groups.values()) == groups
    assert row.theirs.blocks_per_request == total == sum(groups)
    assert row.theirs.num_blocks == blocks
    assert row.theirs.tokens == tokens
    assert round(row.theirs.concurrency, 2) == concurrency
    assert row.source == "fitted"
    found = row.as_json()["predecessor"]
    assert (found["blocks_per_request"], found["num_blocks"], found["tokens"]) == (total, blocks, tokens)


@pytest.mark.parametrize("name", OTHERS)
def test_other_published_figures_are_reproduced(rows, name):
    assert rows[name].theirs.tokens == OTHERS[name]


def test_spans_come_from_the_sizes_of_states_and_tokens(model):
    # A state: 12 heads of 128 x 128 float32 and 2560 channels of 3 columns and one for each draft. Pages hold 32 tokens at a time.
    for kv, token, drafts, span in (
        ("fp8_e4m3", 512, 4, 1632),
        ("float16", 1024, 4, 832),
        ("int8", 512, 4, 1632),
        ("fp8_e4m3", 512, 7, 1664),
    ):
        state = 12 * 128 * 128 * 4 + 2560 * (3 + drafts) * 2
        assert span % 32 == 0
        assert (span - 32) * token < state <= span * token
        found = predecessor(model, Setup(tensor=4, context=2, kv=kv, drafts=drafts), max_model_len=LENGTH, memory_bytes=10**9)
        assert found.span == span


def test_a_block_holds_six_pages_the_index_keys_and_the_whole_draft_head(model):
    def block(kv, head):
        setup = Setup(tensor=4, context=2, kv=kv, drafts=4, head=head)
        return predecessor(model, setup, max_model_len=LENGTH, memory_bytes=10**9).block_bytes

    assert block("fp8_e4m3", "fp8_e4m3") == 6 * 1632 * 512 + 1632 * 512 + 13 * 1632 // 4 * 256
    assert block("fp8_e4m3", "float16") == 6 * 1632 * 512 + 1632 * 1024 + 13 * 1632 // 4 * 256
    assert block("int8", "int8") == 7 * 1632 * (512 + 8) + 13 * 1632 // 4 * 256
    assert block("float16", None) == 6 * 832 * 1024 + 12 * 832 // 4 * 256


def test_budgets_agree_with_what_is_known_of_the_differences(rows):
    # The same server with a graph reserve of 700 instead of 1500 MiB, and with 61 instead of 242 MiB of codebooks and 1200 MiB.
    reserve = rows["AWQ, E4M3, DFlash2, 0.1.2, small graph reserve"]
    old, new = rows["AWQ, E4M3, DFlash2, 0.1.2"], rows["AWQ, E4M3, DFlash2, 0.1.3"]
    block = old.theirs.block_bytes
    assert abs(reserve.theirs.num_blocks - old.theirs.num_blocks - 800 * 2**20 / block) < 1
    assert 0 <= (new.theirs.num_blocks - old.theirs.num_blocks) * block - (300 + 182) * 2**20 < 4 * block
    # One checkpoint and drafter, one budget, whatever the format of its cache.
    for one, other in (("AWQ, E4M3, MTP4, 0.1.0", "AWQ, E4M3, MTP4"), ("AWQ, E4M3, MTP4", "AWQ, INT8, MTP4"),
                       ("FP4-Local, E4M3, MTP4, FP16 draft", "FP4-Local, E4M3, MTP4")):  # fmt: skip
        assert rows[one].memory_bytes == rows[other].memory_bytes


def test_our_side_is_the_same_bytes_divided_our_way(rows):
    for published_row in PUBLISHED:
        row = rows[published_row.name]
        token = {"float16": 1024, "fp8_e4m3": 512, "int8": 520}
        block = 12 * (32 * token[published_row.kv] + 8 * 256)
        slot = 36 * (12 * 128 * 128 * 4 + 3 * 2560 * 2) + 9 * 10240 * 2 + 12 * 12 * 256
        if published_row.head:
            block += 32 * token[published_row.head] + 8 * 256
            slot += 12 * 256 + 4 * 2560 * 2
        else:
            slot += 5 * (2047 + 8) * 2 * 256 * 2
        budget = row.memory_bytes
        assert (row.ours.block_bytes, row.ours.slot_bytes) == (block, slot)
        assert row.ours.num_slots == 16 + budget * 15 // 100 // slot
        assert row.ours.num_blocks == (budget - 16 * slot - budget * 15 // 100) // block
        assert row.ours.tokens == 64 * row.ours.num_blocks


def test_ours_holds_more_tokens_beside_running_requests(rows):
    for row in rows.values():
        states = row.theirs.blocks_per_request - row.theirs.groups["attention"]
        theirs = (row.theirs.num_blocks - 8 * states) * row.theirs.span
        assert row.as_json()["predecessor"]["tokens_beside_running_requests"] == theirs
        assert row.ours.tokens > theirs, row.name


def test_lines_name_source_figures_and_slots(rows):
    text = "\n".join(comparison_lines(list(rows.values())))
    row = rows["AWQ, E4M3, DFlash2, 0.1.3"]
    assert "AWQ, E4M3, DFlash2, 0.1.3: 6,527,000,000 bytes a rank (fitted), 524,288 tokens a request" in text
    assert (
        "1,379,634 tokens, 2.63 requests; 1,021 blocks of 1,664 tokens, 388 a request = 316 attention + 54 recurrent + 1 index ring" in text
    )
    assert f"ours: {row.ours.tokens:,} tokens beside {row.ours.num_slots} slots" in text
    assert "this plan: " in text
    assert "bytes a rank (planned)" in text


def test_this_plan_is_compared_at_its_own_bytes(rows, tmp_path):
    row = rows["this plan"]
    assert row.source == "planned"
    path = published.write(tmp_path)
    plan = planned(path)
    assert (row.memory_bytes, row.ours) == (plan.config.cache.memory_bytes, plan.capacity)
    assert row.theirs.num_blocks == plan.config.cache.memory_bytes // (7 * 1632 * 512 + 13 * 408 * 256)
    half = planned(path, "schedule.max_model_len=262144", "speculate.method=none", "cache.kv_format=float16")
    other = compare(half, ModelConfig.load(path))[0]
    assert other.theirs.groups == {
        "attention": math.ceil(262_144 / other.theirs.span),
        "recurrent": 12,
        "index ring": 1,
        "n-gram": 2,
        "drafter": 0,
    }
    assert other.theirs.span == 800  # 32 · ceil((786,432 + 15,360) / 1024 / 32)


def test_another_model_is_compared_with_its_plan_alone(tmp_path):
    path = published.write(tmp_path, num_experts=256)
    assert [row.name for row in compare(planned(path), ModelConfig.load(path))] == ["this plan"]


@given(low=st.integers(513, 1024))
def test_the_drafters_heads_do_not_matter_within_the_stated_range(low):
    """Any bytes of a token from 513 to 1024 give the same blocks: 4 · low / 4 ranks, one head of low / 4 values."""
    window = Window(layers=5, reach=2048, rows=8, kv_heads=4, head_dim=low // 4)
    if not 512 < 4 * window.head_dim <= 1024:
        return
    for kv in ("fp8_e4m3", "float16"):
        setups = [Setup(tensor=4, context=2, kv=kv, drafts=7, window=used) for used in (window, DRAFTER)]
        found, usual = (predecessor(published.read(), setup, max_model_len=LENGTH, memory_bytes=10**10) for setup in setups)
        assert found == usual


@given(memory=st.integers(10**7, 10**11), more=st.integers(0, 10**10), length=st.integers(64, 10**6))
def test_more_bytes_are_more_blocks_and_longer_requests_take_more(memory, more, length):
    setup = Setup(tensor=4, context=2, kv="fp8_e4m3", drafts=4, head="fp8_e4m3")
    model = published.read()
    less = predecessor(model, setup, max_model_len=length, memory_bytes=memory)
    greater = predecessor(model, setup, max_model_len=length, memory_bytes=memory + more)
    assert greater.num_blocks >= less.num_blocks
    assert less.num_blocks * less.block_bytes <= memory < (less.num_blocks + 1) * less.block_bytes
    assert predecessor(model, setup, max_model_len=length + 5000, memory_bytes=memory).blocks_per_request > less.blocks_per_request


def test_no_figure_of_the_table_is_in_the_source():
    source = Path(revolta_serve.__file__).parent
    figures = {figure for total, _, blocks, tokens, _ in TABLE.values() for figure in (total, blocks, tokens)} | set(OTHERS.values())
    for path in source.rglob("*.py"):
        numbers = {int(text.replace("_", "").replace(",", "")) for text in re.findall(r"(?<![\w.])\d[\d_,]*(?![\w.])", path.read_text())}
        large = {figure for figure in figures if figure > 10_000}
        assert not numbers & large, path
        if path.name in ("predecessor.py", "plan_predecessor.py"):
            assert not numbers & (figures | {1632, 1664, 832, 816}), path
    assert Path(plan_predecessor.__file__).name == "plan_predecessor.py"


DECISION = Path(__file__).parents[4] / "docs/decisions/0008-index-keys-on-two-ranks.md"


def test_the_figures_of_the_decision_are_computed(rows, model):
    names = {
        "AWQ E4M3 MTP4": "AWQ, E4M3, MTP4", "AWQ FP16 MTP4": "AWQ, FP16, MTP4", "AWQ INT8 MTP4": "AWQ, INT8, MTP4",
        "NVFP4 E4M3 MTP4": "NVFP4, E4M3, MTP4", "FP4-Local E4M3 MTP4": "FP4-Local, E4M3, MTP4",
        "AWQ E4M3 DFlash2": "AWQ, E4M3, DFlash2, 0.1.3",
        "the same with replay": "AWQ, E4M3, DFlash2, replay",
    }  # fmt: skip
    lines = [line for line in DECISION.read_text().splitlines() if " GB | " in line]
    assert len(lines) == len(names)
    for line in lines:
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name, budget = label.rsplit(", ", 1)
        row = rows[names[name]]
        setup = next(published_row.setup() for published_row in PUBLISHED if published_row.name == row.name)

        def tokens(index, slots, setup=setup, row=row):
            shape = layout(model, tensor=4, context=2, dtype="float16", kv=setup.kv, index=index, mtp=setup.head, window=setup.window)
            return divide(shape, max_num_seqs=8, max_model_len=LENGTH, memory_bytes=row.memory_bytes, num_slots=slots).tokens

        ours = f"{tokens(1, 0):,} / **{tokens(2, 0):,}** / {tokens(4, 0):,}"
        assert budget == f"{row.memory_bytes / 10**9:.3f} GB"
        assert cells == [f"{row.theirs.tokens:,}", f"{row.theirs.beside(8):,}", ours, str(row.ours.num_slots), f"{tokens(2, 16):,}"]
