"""Pauses, resets, counts and log lines of real processes. Every test sees in the metrics that what it is about has happened."""

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from revolta_serve.testing import RunningServer, running_server
from revolta_serve.weights.tiny import make_tiny
from support.wire import Wire, get, metrics, payloads, post, wait_until_idle

COMPLETIONS = "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = [(17 * n) % 200 + 5 for n in range(200)]
"""Three whole blocks and a part of one."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory, layers=4)
    return directory


@pytest.fixture(scope="module")
def running(tiny: Path) -> Iterator[RunningServer]:
    settings = {
        "api.operator_routes": True, "api.log_stats_interval": 0.1, "schedule.max_num_seqs": 2, "schedule.audit_steps": 5,
        "engine.heartbeat_interval": 0.1,
    }  # fmt: skip
    with running_server(tiny, settings) as server:
        yield server


@pytest.fixture
def server(running: RunningServer) -> Iterator[RunningServer]:
    """Idle, not paused, nothing cached; and so it is left."""
    yield running
    act(running, "/pause?mode=abort")
    act(running, "/resume")
    wait_until_idle(running.url)


def act(server: RunningServer, target: str) -> httpx.Response:
    response = post(server.url, target, b"")
    assert response.status_code == 200, response.text
    return response


def ask(server: RunningServer, tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    """The ids of an answer that is read as a whole."""
    response = post(server.url, COMPLETIONS, {**GREEDY, "prompt": prompt, "max_tokens": tokens})
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def stream(server: RunningServer, tokens: int, prompt: list[int] = PROMPT) -> Wire:
    """An answer under way: a few tokens have come, so some have been fed back."""
    wire = Wire(server.url, COMPLETIONS, {**GREEDY, "prompt": prompt, "max_tokens": tokens, "stream": True})
    while wire.body.count(b"data: ") < 4:
        wire.receive_until(b"data: ")
        wire.receive(0.005)
    return wire


def ids_of(wire: Wire) -> list[int]:
    *events, done = payloads(wire.finish(30))
    assert done == "[DONE]"
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


def grown(server: RunningServer, before: dict[str, float]) -> dict[str, float]:
    """What has been counted since."""
    now = metrics(server.url)
    return {name: now[name] - before.get(name, 0) for name in now}


@pytest.mark.parametrize("clear", ["false", "true"])
def test_a_freeze_holds_everything_and_loses_nothing(server: RunningServer, clear: str) -> None:
    alone = ask(server, 300)
    act(server, "/reset_prefix_cache")
    before = metrics(server.url)
    with stream(server, 300) as wire:
        assert act(server, f"/pause?mode=keep&clear_cache={clear}").json() == {"status": "paused"}
        frozen = metrics(server.url)
        wire.receive(0.3)
        so_far = len(wire.body)
        with Wire(server.url, COMPLETIONS, {**GREEDY, "prompt": PROMPT, "max_tokens": 3}) as queued:
            expected = 1 + (clear == "true")
            wait_for(lambda: metrics(server.url)["num_requests_waiting"] == expected)
            wire.receive(0.3)
            queued.receive(0.1)
            later = metrics(server.url)
            assert later["engine_steps_total"] == frozen["engine_steps_total"]
            assert len(wire.body) == so_far > 0
            assert not queued.body
            assert f'num_requests_waiting_by_reason{{model_name="tiny",reason="paused"}} {expected}.0' in get(server.url, "/metrics").text
            assert (later["engine_paused"], later["num_requests_running"]) == (1, 2 - expected)
            assert (get(server.url, "/ready").status_code, get(server.url, "/health").status_code) == (503, 200)
            assert get(server.url, "/is_paused").json() == {"is_paused": True}
            act(server, "/resume")
            assert get(server.url, "/ready").status_code == 200
            assert ids_of(wire) == alone
            assert json.loads(queued.finish())["choices"][0]["token_ids"] == alone[:3]
    happened = grown(server, before)
    assert happened["num_preemptions_total"] == (clear == "true")
    assert (happened["replayed_tokens_total"] > 0) == (clear == "true")


def test_wait_answers_when_the_running_ones_have_finished(server: RunningServer) -> None:
    answers: list[tuple[float, int]] = []

    def pause() -> None:
        response = post(server.url, "/pause?mode=wait", b"")
        answers.append((metrics(server.url)["num_requests_running"], response.status_code))

    with stream(server, 400) as wire:
        asking = threading.Thread(target=pause)
        asking.start()
        wait_for(lambda: get(server.url, "/is_paused").json()["is_paused"])
        assert not wire.ended
        with Wire(server.url, COMPLETIONS, {**GREEDY, "prompt": PROMPT, "max_tokens": 3}) as queued:
            assert len(ids_of(wire)) == 400
            asking.join(10)
            assert answers == [(0, 200)]
            steps = metrics(server.url)["engine_steps_total"]
            queued.receive(0.3)
            assert not queued.body
            assert (metrics(server.url)["engine_steps_total"], metrics(server.url)["num_requests_waiting"]) == (steps, 1)
            act(server, "/resume")
            assert len(json.loads(queued.finish())["choices"][0]["token_ids"]) == 3


def test_a_resume_before_a_pause_is_reached_is_told_to_whoever_asked_for_it(server: RunningServer) -> None:
    answers: list[httpx.Response] = []
    with stream(server, 400) as wire:
        asking = threading.Thread(target=lambda: answers.append(post(server.url, "/pause?mode=wait", b"")))
        asking.start()
        wait_for(lambda: get(server.url, "/is_paused").json()["is_paused"])
        act(server, "/resume")
        asking.join(10)
        assert not wire.ended
        assert len(ids_of(wire)) == 400
    assert [response.status_code for response in answers] == [409]


def test_abort_ends_streams_with_an_error_and_keeps_who_comes_later(server: RunningServer) -> None:
    before = metrics(server.url)
    with stream(server, 3000) as first, stream(server, 3000) as second:
        act(server, "/pause")
        with Wire(server.url, COMPLETIONS, {**GREEDY, "prompt": PROMPT, "max_tokens": 3}) as queued:
            for wire in (first, second):
                *events, error, done = payloads(wire.finish())
                assert done == "[DONE]"
                assert error["error"]["type"] == "service_unavailable"
                assert "the server was paused" in error["error"]["message"]
                assert all("error" not in event for event in events)
            assert metrics(server.url)["kv_blocks_cached"] == 0, "the cache was cleared"
            wait_for(lambda: metrics(server.url)["num_requests_waiting"] == 1)
            act(server, "/resume")
            assert len(json.loads(queued.finish())["choices"][0]["token_ids"]) == 3
    assert grown(server, before)["generation_tokens_total"] < 1000


def test_a_reset_forgets_what_could_be_reused(server: RunningServer) -> None:
    before = metrics(server.url)
    answer = ask(server, 5)
    assert ask(server, 5) == answer
    assert grown(server, before)["prefix_cache_hits_total"] >= 128
    cached = metrics(server.url)
    assert cached["kv_blocks_cached"] >= 3
    counts = act(server, "/reset_prefix_cache").json()
    assert counts == {
        "blocks_freed": cached["kv_blocks_cached"], "snapshots_freed": cached["state_slots_cached"], "blocks_in_use": 0
    }  # fmt: skip
    empty = metrics(server.url)
    assert (empty["kv_blocks_cached"], empty["state_slots_cached"]) == (0, 0)
    assert ask(server, 5) == answer
    assert metrics(server.url)["prefix_cache_hits_total"] == empty["prefix_cache_hits_total"], "nothing was there to be reused"
    assert 'prefix_cache_misses_total{model_name="tiny",reason="cold"} ' in get(server.url, "/metrics").text


def test_a_reset_says_what_running_requests_hold_and_can_take_it(server: RunningServer) -> None:
    alone = ask(server, 300)
    before = metrics(server.url)
    with stream(server, 300) as wire:
        response = post(server.url, "/reset_prefix_cache", b"")
        assert response.status_code == 409
        body = response.json()
        assert body["blocks_in_use"] >= 3
        assert f"running requests hold {body['blocks_in_use']} blocks" in body["reason"]
        assert act(server, "/reset_prefix_cache?reset_running_requests=true").json()["blocks_in_use"] == 0
        assert not wire.ended
        assert ids_of(wire) == alone
    assert grown(server, before)["num_preemptions_total"] == 1


def test_counts_and_histograms_follow_what_was_served(server: RunningServer) -> None:
    act(server, "/reset_prefix_cache")
    before = metrics(server.url)
    ask(server, 8)
    ask(server, 8)
    text = get(server.url, "/metrics").text
    happened = grown(server, before)
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
                 "request_inference_time_seconds", "request_time_per_output_token_seconds", "request_prefill_kv_computed_tokens",
                 "e2e_request_latency_seconds", "time_to_first_token_seconds", "request_prompt_tokens"):  # fmt: skip
        assert happened[f"{name}_count"] == 2, name
    assert happened["generation_tokens_total"] == 16
    reused = happened["prefix_cache_hits_total"]
    assert reused >= 128
    assert happened["prompt_tokens_total"] + reused == 400
    assert happened["request_prefill_kv_computed_tokens_sum"] == 400 - reused
    assert happened["prefix_cache_queries_total"] == 400
    assert happened["iteration_tokens_total_count"] == happened["engine_steps_total"] >= 16
    assert happened["iteration_tokens_total_sum"] == 400 - reused + 14
    assert happened["host_gap_ms_sum"] == pytest.approx(1000 * happened["engine_host_seconds_total"])
    assert happened["engine_step_seconds_total"] > 0
    families = {family.name: family for family in text_string_to_metric_families(text)}
    memory = {sample.labels["process"]: sample.value for sample in families["revolta:resident_memory_bytes"].samples}
    assert 20e6 < memory["api"] < memory["engine"], "the engine has loaded torch"
    kinds = {sample.labels["kind"]: sample.value for sample in families["revolta:step_time_ms"].samples if sample.name.endswith("_count")}
    assert kinds["prefill"] > 0
    assert kinds["decode"] > 0
    assert sum(kinds.values()) == metrics(server.url)["engine_steps_total"]


def test_a_server_tells_everything_of_itself(server: RunningServer) -> None:
    info = get(server.url, "/server_info?config_format=json").json()
    now = metrics(server.url)
    assert info["config"]["schedule.max_model_len"] == {"value": 8192, "source": "derived"}
    assert info["config"]["schedule.max_num_seqs"]["value"] == 2
    assert (info["capacity"]["num_blocks"], info["capacity"]["num_slots"]) == (now["kv_blocks"], now["state_slots"])
    assert info["capacity"]["kv_bytes"] == info["capacity"]["num_blocks"] * info["capacity"]["block_bytes"] > 0
    assert info["phase"] == "ready"
    assert info["engine"]["steps"] == now["engine_steps_total"] > 0
    assert "torch" in info["versions"]
    labels = re.search(r"^revolta:cache_config_info\{(.*)\} 1.0$", get(server.url, "/metrics").text, re.MULTILINE)
    assert labels is not None
    assert f'num_blocks="{info["capacity"]["num_blocks"]}"' in labels[1]


@pytest.mark.parametrize(
    ("mode", "timeout"),
    [("keep", 1.0), pytest.param("keep", 0.0, marks=pytest.mark.full), pytest.param("wait", 1.0, marks=pytest.mark.full)],
)
def test_a_stop_during_a_pause_does_not_hang(tiny: Path, mode: str, timeout: float) -> None:
    """Frozen ones and those that wait are given up at the deadline, whoever asked for the pause is answered, and the server ends."""
    answers: list[httpx.Response] = []
    with running_server(tiny, {"api.operator_routes": True, "api.shutdown_timeout": timeout, "schedule.max_num_seqs": 1}) as server:
        with stream(server, 7000) as wire, Wire(server.url, COMPLETIONS, {"prompt": "b", "max_tokens": 5}) as queued:
            wait_for(lambda: metrics(server.url)["num_requests_waiting"] == 1)
            asking = threading.Thread(target=lambda: answers.append(post(server.url, f"/pause?mode={mode}", b"")))
            asking.start()
            wait_for(lambda: get(server.url, "/is_paused").json()["is_paused"])
            server.send_signal(signal.SIGTERM)
            *_, error, done = payloads(wire.finish(5))
            assert (error["error"]["type"], done) == ("service_unavailable", "[DONE]")
            assert json.loads(queued.finish(5))["error"]["type"] == "service_unavailable"
            assert queued.status == 503
            asking.join(5)
            assert [response.status_code for response in answers] == [200]
        assert server.wait(5) == 0
        server.wait_until_gone(5)


def test_every_line_of_every_process_is_json_and_none_holds_a_prompt(tiny: Path) -> None:
    settings = {
        "api.log_format": "json", "api.log_level": "debug", "api.log_requests": True, "api.log_stats_interval": 0.2, "parallel.tensor": 2,
    }  # fmt: skip
    with running_server(tiny, settings) as server:
        for _ in range(2):
            post(server.url, COMPLETIONS, {"prompt": "Xylophone " * 40, "max_tokens": 20, "ignore_eos": True, "stop": ["Quetzalcoatl"]})
        with stream(server, 7000):
            pass
        wait_until_idle(server.url)
        # One more line when it falls idle, then none: the interval passes several times.
        wait_for(lambda: '"state": "idle"' in server.log())
        time.sleep(0.7)
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert all({"time", "level", "logger", "process", "message"} <= set(line) for line in lines)
    assert {line["process"] for line in lines} == {"api", "engine[0]", "engine[1]"}
    assert "uvicorn.access" in {line["logger"] for line in lines}
    assert all(word not in server.log() for word in ("Xylophone", "Quetzalcoatl"))
    ended = [line for line in lines if line["logger"] == "revolta_serve.requests"]
    first, second, left = ended
    assert (first["finish"], first["miss"], first["cached_tokens"], first["generated_tokens"]) == ("length", "cold", 0, 20)
    assert second["cached_tokens"] > 0
    assert second["prompt_tokens"] == first["prompt_tokens"] > 80
    assert left["finish"] == "abort"
    assert all(line["queue_seconds"] >= 0 and line["prefill_seconds"] > 0 and line["preemptions"] == 0 for line in ended)
    assert all(line["request"] in line["message"] for line in ended)
    stats = [line for line in lines if line["logger"] == "revolta_serve.api.stats_line"]
    assert "busy" in {line["state"] for line in stats}
    assert [line["state"] for line in stats][-1] == "idle"
    assert not any(one["state"] == two["state"] == "idle" for one, two in pairwise(stats))
    assert sum(line["generated_tokens"] for line in stats) >= 40


def test_by_default_lines_are_text_and_requests_are_not_logged(server: RunningServer) -> None:
    before = len(server.log())
    ask(server, 100)
    wait_for(lambda: "idle: prompt" in server.log()[before:])
    said = server.log()[before:]
    assert re.search(r"^INFO \S+ \S+ api revolta_serve.api.stats_line: busy: prompt [\d.]+ tokens/s computed", said, re.MULTILINE)
    assert "revolta_serve.requests" not in server.log()
