"""Configuration: every rule, where values come from, and the list of flags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json

from revolta_serve import profile
from revolta_serve.config import GRID, ServeConfig, get, options, with_value
from revolta_serve.errors import ConfigError

FLAGS = [
    "--api-key",
    "--decode-context-parallel-size",
    "--dtype",
    "--enable-log-requests",
    "--gpu-memory-utilization",
    "--host",
    "--kv-cache-dtype",
    "--kv-cache-memory-bytes",
    "--kv-cache-metrics",
    "--log-format",
    "--log-level",
    "--log-stats-interval",
    "--logprobs-mode",
    "--long-prefill-token-threshold",
    "--max-logprobs",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--max-queue",
    "--max-request-bytes",
    "--operator-routes",
    "--port",
    "--prefill-while-decoding",
    "--prefix-caching",
    "--reuse-generated",
    "--scheduling-policy",
    "--served-model-name",
    "--shutdown-timeout",
    "--speculation",
    "--sse-keep-alive-interval",
    "--tensor-parallel-size",
    "--threads",
]


def test_the_list_of_flags_is_frozen():
    # A new choice is a field, reached by --set; it becomes a flag only when this list says so.
    assert sorted(entry.flag for entry in options() if entry.flag) == FLAGS
    assert len(FLAGS) <= 40


def test_every_field_has_help_and_an_exact_type():
    for entry in options():
        assert entry.help
        assert profile.coerce(entry, entry.default, "default") == entry.default
    assert not [entry.path for entry in options() if entry.default is None]


def test_defaults_are_valid_and_bind_to_loopback():
    ServeConfig().validate()
    assert ServeConfig().api.host == "127.0.0.1"


@pytest.mark.parametrize("name", profile.names())
def test_shipped_profiles_are_valid(name):
    assert profile.load(name).config != ServeConfig()


def test_precedence_is_default_profile_flags(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[schedule]\nmax_num_seqs = 3\nmax_queue = 5\n\n[api]\nport = 9000\n")
    loaded = profile.load(str(path), {"schedule.max_num_seqs": 4}, ["api.port=9001"])
    assert (loaded.config.schedule.max_num_seqs, loaded.config.schedule.max_queue, loaded.config.api.port) == (4, 5, 9001)
    assert loaded.sources["schedule.max_num_seqs"] == "--max-num-seqs"
    assert loaded.sources["schedule.max_queue"] == "mine.toml:3"
    assert loaded.sources["api.port"] == "--set"
    assert ("parallel.tensor", "1", "default") in loaded.table()


@pytest.mark.parametrize(
    ("flags", "sets", "message"),
    [
        ({"schedule.max_num_seqs": 4}, ["schedule.max_num_seqs=5"], "twice, by --max-num-seqs and by --set, 4 and 5; give it once"),
        ({}, ["api.port=1", "api.port=1"], "api.port is given twice, by --set and by --set, 1 and 1"),
    ],
)
def test_a_command_line_gives_a_field_once(flags, sets, message):
    with pytest.raises(ConfigError, match=message):
        profile.load("cpu", flags, sets)


def test_a_key_that_is_given_twice_does_not_show():
    with pytest.raises(ConfigError, match="twice, by --api-key and by --set; give it once"):
        profile.load(flags={"api.keys": ("sesame",)}, sets=["api.keys=sesame"])


def test_a_broken_rule_says_where_the_values_are_from(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[cache]\nmemory_bytes = 1\nnum_blocks = 1\n")
    said = r"exclude each other; set one \(cache\.memory_bytes is from mine\.toml:2, cache\.num_blocks is from mine\.toml:3\)"
    with pytest.raises(ConfigError, match=said):
        profile.load(str(path))


def test_a_profile_may_use_any_toml_spelling(tmp_path):
    path = tmp_path / "odd.toml"
    path.write_text('schedule.max_queue = 5\n"api" = { port = 1 }\n')
    assert profile.load(str(path)).config.schedule.max_queue == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cache]\n\nnum_blokcs = 3\n", r"p\.toml:3: cache\.num_blokcs is not a field of \[cache\]; did you mean num_blocks\?"),
        ("[cahce]\nnum_blocks = 3\n", r"p\.toml:2: there is no section \[cahce\]; did you mean cache\?"),
        ("[schedule]\nmax_num_seqs = '3'\n", r"p\.toml:2: schedule\.max_num_seqs='3' is not an int"),
        ("[schedule]\nmax_num_seqs = true\n", r"p\.toml:2: schedule\.max_num_seqs=True is not an int"),
        ("[model]\ndtype = 'flaot32'\n", r"p\.toml:2: model\.dtype='flaot32' is none of float32, float16; did you mean float32\?"),
        ("[engine]\nstep_timeout = nan\n", r"p\.toml:2: engine\.step_timeout=nan is not a float"),
        ("port = 3\n", r"p\.toml:1: port stands outside a section"),
        ("[api\n", r"p\.toml: is not TOML"),
    ],
)
def test_profile_errors_name_the_place(tmp_path, text, message):
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        profile.load(str(path))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["api.prot=1"], "--set: api.prot is not a field of .api.; did you mean port"),
        (["api.port"], "write section.key=value"),
        (["api.port=eighty"], "api.port='eighty' is not an int"),
        (["api.port=70000"], "api.port=70000 is too large; use at most 65535"),
        (["schedule.max_num_seqs=0"], "schedule.max_num_seqs=0 is too small; use at least 1"),
        (["parallel.tensor=4", "parallel.decode_context=3"], "decode_context=3 does not divide parallel.tensor=4"),
        (["schedule.max_num_batched_tokens=71"], "max_num_batched_tokens=71 leaves no prompt chunk.*use at least 72"),
        (
            ["speculate.method=mtp", "schedule.max_num_batched_tokens=103"],
            "beside schedule.max_num_seqs=8 decoding requests of 5 rows; use at least 104",
        ),
        (["speculate.method=mtp", "schedule.max_num_seqs=13"], "13 requests of 5 rows are 65 rows.*use --max-num-seqs 12 or fewer drafts"),
        (["speculate.drafts=8"], "speculate.drafts=8 is too large; use at most 7"),
        (["speculate.drafter=x"], "speculate.drafter='x' would not be used with speculate.method=none"),
        (["speculate.method=dflash"], "speculate.method=dflash needs the directory of the drafter"),
        (["cache.utilization=1.01"], "cache.utilization=1.01 is too large"),
        (["cache.memory_bytes=1", "cache.num_blocks=1"], "exclude each other"),
        (["cache.num_slots=7"], "cache.num_slots=7 cannot hold .*max_num_seqs=8"),
        (["schedule.max_model_len=1"], "at least 2"),
        (["engine.heartbeat_timeout=0.6"], "less than two times engine.heartbeat_interval=0.5"),
        (["model.served_name=a,a"], "names a model twice"),
        (['api.keys=[" "]'], "api.keys contains an empty string"),
    ],
)
def test_rules(sets, message):
    with pytest.raises(ConfigError, match=message):
        profile.load(sets=sets)


def test_unknown_profile_lists_known_ones():
    with pytest.raises(ConfigError, match="profile 'cpuu' does not exist; did you mean cpu"):
        profile.load("cpuu")
    with pytest.raises(ConfigError, match="cannot be read"):
        profile.load("missing.toml")


def test_set_understands_lists_and_plain_text():
    config = profile.load(sets=["model.served_name=a,b", "model.path=/data/a=b", 'api.keys=["x,y"]', "engine.step_timeout=3"]).config
    assert config.model.served_name == ("a", "b")
    assert config.model.path == "/data/a=b"
    assert config.api.keys == ("x,y",)
    assert config.engine.step_timeout == 3.0


def test_keys_never_show():
    loaded = profile.load(flags={"api.keys": ("sesame",)})
    assert "sesame" not in repr(loaded.config)
    assert all("sesame" not in cell for row in loaded.table() for cell in row)
    assert loaded.config.digest() == ServeConfig().digest()


def test_the_digest_sees_every_other_field():
    for entry in options():
        if entry.secret:
            continue
        value = {int: 3, float: 3.5, str: "x"}.get(entry.kind) or (("x",) if isinstance(entry.default, tuple) else "other")
        assert with_value(ServeConfig(), entry.path, value).digest() != ServeConfig().digest(), entry.path


def test_a_config_survives_the_way_to_the_engine():
    config = profile.load("cpu", {"model.served_name": ("a", "b"), "model.path": "/models/x"}).config
    assert json.decode(json.encode(config), type=ServeConfig) == config


def test_the_name_defaults_to_the_directory():
    assert profile.load(flags={"model.path": "models/tiny/"}).config.served_names == ("tiny",)


@given(seqs=st.integers(1, 256), tokens=st.integers(1, 4096), cap=st.integers(1, 4096))
def test_a_valid_schedule_always_has_room_for_one_chunk(seqs, tokens, cap):
    sets = [f"schedule.max_num_seqs={seqs}", f"schedule.max_num_batched_tokens={tokens}", f"schedule.prefill_while_decoding={cap}"]
    try:
        schedule = profile.load(sets=sets).config.schedule
    except ConfigError:
        assert tokens < GRID + seqs
        return
    assert min(schedule.prefill_cap, tokens - seqs) >= GRID
    assert schedule.prefill_cap % GRID == 0
    assert get(ServeConfig(schedule=schedule), "schedule.max_num_seqs") == seqs
