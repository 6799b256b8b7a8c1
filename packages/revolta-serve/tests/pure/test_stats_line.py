"""The line about a busy engine: when it is said, and that its rates are those of the interval."""

import pytest

from revolta_serve.api.stats_line import StatsLine
from revolta_serve.types import EngineStatus

QUIET = EngineStatus(blocks_total=100, slots_total=8)


def test_nothing_is_said_until_something_happens():
    stats = StatsLine(QUIET, 0.0)
    assert stats.line(QUIET, 10.0) is None
    assert stats.line(QUIET, 20.0) is None


def test_rates_are_those_of_the_interval():
    before = EngineStatus(prompt_tokens=1000, prefix_hits=64, prefix_queries=100, generated_tokens=500, preemptions=3, blocks_total=100)
    after = EngineStatus(
        prompt_tokens=3000, prefix_hits=464, prefix_queries=1100, generated_tokens=600, preemptions=5, running=2, waiting=1,
        blocks_used=25, blocks_cached=10, blocks_total=100, slots_used=3, slots_cached=1, slots_total=8,
    )  # fmt: skip
    text, values = StatsLine(before, 100.0).line(after, 104.0)
    for part in (
        "busy: prompt 500.0 tokens/s computed, 100.0 cached", "generation 25.0 tokens/s", "running 2, waiting 1",
        "blocks 25 + 10 cached of 100 (25%)", "slots 3 + 1 cached of 8 (38%)", "prefix hits 40.0%", "preemptions 2",
    ):  # fmt: skip
        assert part in text
    assert (values["state"], values["seconds"], values["prompt_tokens"], values["cached_tokens"]) == ("busy", 4.0, 2000, 400)


@pytest.mark.parametrize("sign", ["running", "waiting", "prompt_tokens", "prefix_hits", "generated_tokens"])
def test_any_sign_of_traffic_is_one_line_then_one_idle_line_then_silence(sign):
    stats = StatsLine(QUIET, 0.0)
    after = EngineStatus(blocks_total=100, slots_total=8, **{sign: 1})
    assert stats.line(after, 10.0)[0].startswith("busy: ")
    gone = EngineStatus(**{name: getattr(after, name) for name in after.__struct_fields__} | {"running": 0, "waiting": 0})
    assert stats.line(gone, 20.0)[0].startswith("idle: ")
    assert stats.line(gone, 30.0) is None
    again = EngineStatus(**{name: getattr(gone, name) for name in gone.__struct_fields__} | {"generated_tokens": 50})
    assert stats.line(again, 40.0)[0].startswith("busy: ")


def test_a_pause_shows():
    text, values = StatsLine(QUIET, 0.0).line(EngineStatus(waiting=2, paused=True), 1.0)
    assert text.startswith("paused: ")
    assert "prefix hits none asked" in text
    assert values["waiting"] == 2
