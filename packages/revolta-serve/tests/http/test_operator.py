"""The operator's routes over HTTP, with an engine that writes down what it is told: who may call them, and with what."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from revolta_serve.config import options
from revolta_serve.errors import ConflictError, RevoltaError
from revolta_serve.types import CacheReset, PauseMode
from support.script_engine import ScriptEngine, Server, serving
from support.text import byte_tokens, tokenizer

END = tokenizer().added["<|im_end|>"]
ROUTES = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/server_info"),
]


@dataclass
class Ordered(ScriptEngine):
    """Remembers its orders; `in_use` blocks stay in a reset that does not preempt."""

    orders: list[tuple[object, ...]] = field(default_factory=list)
    in_use: int = 0
    fail: RevoltaError | None = None

    async def pause(self, mode: PauseMode, *, clear: bool) -> None:
        self.orders.append((mode, clear))
        if self.fail is not None:
            raise self.fail
        await super().pause(mode, clear=clear)

    async def resume(self) -> None:
        self.orders.append(("resume",))
        await super().resume()

    async def reset_cache(self, *, preempt: bool) -> CacheReset:
        self.orders.append(("reset", preempt))
        return CacheReset(blocks_freed=5, snapshots_freed=2, blocks_in_use=0 if preempt else self.in_use)


def ordered(server: Server) -> Ordered:
    engine = server.engine
    assert isinstance(engine, Ordered)
    return engine


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    return serve(Ordered([*byte_tokens("ok"), END]), operator_routes=True)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(Ordered([END]), operator_routes=True, keys=("sesame", "tulip")) as server:
        yield server


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_the_setting_there_are_no_such_routes(shared: Server, method: str, path: str) -> None:
    response = shared.client.request(method, path)
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_with_keys_they_need_one(guarded: Server, method: str, path: str) -> None:
    before = list(ordered(guarded).orders)
    assert guarded.client.request(method, path).status_code == 401
    assert guarded.client.request(method, path, headers={"x-api-key": "wrong"}).status_code == 401
    assert ordered(guarded).orders == before
    assert guarded.client.request(method, path, headers={"x-api-key": "sesame"}).status_code == 200


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_actions_are_posts_and_looks_are_gets(server: Server, method: str, path: str) -> None:
    response = server.client.request("GET" if method == "POST" else "POST", path)
    assert response.status_code == 405
    assert method in response.headers["allow"]
    assert not ordered(server).orders


@pytest.mark.parametrize(
    ("query", "order"),
    [
        ("", ("abort", True)),
        ("?mode=abort", ("abort", True)),
        ("?mode=wait", ("wait", True)),
        ("?mode=keep", ("keep", False)),
        ("?mode=keep&clear_cache=true", ("keep", True)),
        ("?mode=abort&clear_cache=false", ("abort", False)),
        ("?clear_cache=false&mode=wait", ("wait", False)),
    ],
)
def test_a_pause_has_a_mode_and_clears_unless_it_keeps(
    server: Server, query: str, order: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    response = server.post(f"/pause{query}")
    assert (response.status_code, response.json()) == (200, {"status": "paused"})
    assert ordered(server).orders == [order]
    mode, cleared = order
    assert f"paused, mode {mode}, prefix cache {'cleared' if cleared else 'kept'}" in caplog.messages


@pytest.mark.parametrize(
    ("method", "target", "told"),
    [
        ("POST", "/pause?mode=freeze", 'mode: expected one of abort, wait, keep, got "freeze"'),
        ("POST", "/pause?mode=", 'mode: expected one of abort, wait, keep, got ""'),
        ("POST", "/pause?clear_cache=1", 'clear_cache: expected one of true, false, got "1"'),
        ("POST", "/pause?clear=false", "'clear' is no parameter of /pause; it takes mode, clear_cache"),
        ("POST", "/pause?mode=keep&mode=abort", "mode is given twice"),
        ("POST", "/resume?mode=wait", "'mode' is no parameter of /resume; it takes none"),
        ("POST", "/reset_prefix_cache?reset_running_requests=yes", "reset_running_requests: expected one of true, false"),
        ("POST", "/reset_prefix_cache?reset_external=true", "'reset_external' is no parameter"),
        ("GET", "/is_paused?x=1", "'x' is no parameter"),
        ("GET", "/server_info?config_format=yaml", 'config_format: expected one of text, json, got "yaml"'),
    ],
)
def test_a_mistake_is_a_400_and_nothing_happens(server: Server, method: str, target: str, told: str) -> None:
    response = server.client.request(method, target)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (400, "invalid_request_error", 400)
    assert told in error["message"]
    assert not ordered(server).orders


def test_a_paused_server_is_healthy_and_not_ready(server: Server) -> None:
    assert server.client.get("/is_paused").json() == {"is_paused": False}
    assert server.client.get("/ready").status_code == 200
    server.post("/pause?mode=keep")
    assert server.client.get("/is_paused").json() == {"is_paused": True}
    assert (server.client.get("/health").status_code, server.client.get("/health").content) == (200, b"")
    response = server.client.get("/ready")
    assert response.status_code == 503
    assert response.json() == {"phase": "ready", "reason": "the engine is paused: requests wait for POST /resume"} | {
        "elapsed": response.json()["elapsed"]
    }
    assert server.complete(max_tokens=2).status_code == 200, "the queue takes requests as ever"
    assert server.post("/resume").json() == {"status": "resumed"}
    assert server.client.get("/ready").status_code == 200
    assert ordered(server).orders == [("keep", False), ("resume",)]


@pytest.mark.parametrize(("phase", "reason"), [("starting", "still loading"), ("draining", "shutting down"), ("dead", "has stopped")])
def test_a_server_that_is_not_there_says_why(server: Server, phase: Any, reason: str) -> None:
    server.engine.phase = phase
    for path in ("/health", "/ready"):
        response = server.client.get(path)
        assert (response.status_code, response.json()["phase"]) == (503, phase)
        assert reason in response.json()["reason"]


def test_a_pause_that_somebody_ended_is_a_conflict(server: Server) -> None:
    ordered(server).fail = ConflictError("the pause was ended by a resume before it was reached")
    response = server.post("/pause?mode=wait")
    assert (response.status_code, response.json()["error"]["code"]) == (409, 409)
    assert "ended by a resume" in response.json()["error"]["message"]


def test_a_reset_tells_what_it_freed_and_what_it_could_not(server: Server) -> None:
    counts = {"blocks_freed": 5, "snapshots_freed": 2}
    response = server.post("/reset_prefix_cache")
    assert (response.status_code, response.json()) == (200, {**counts, "blocks_in_use": 0})
    ordered(server).in_use = 7
    response = server.post("/reset_prefix_cache?reset_running_requests=false")
    body = response.json()
    assert "running requests hold 7 blocks" in body.pop("reason")
    assert (response.status_code, body) == (409, {**counts, "blocks_in_use": 7})
    response = server.post("/reset_prefix_cache?reset_running_requests=true")
    assert (response.status_code, response.json()) == (200, {**counts, "blocks_in_use": 0})
    assert ordered(server).orders == [("reset", False), ("reset", False), ("reset", True)]


def test_the_whole_configuration_is_shown_without_its_secrets(guarded: Server) -> None:
    headers = {"x-api-key": "sesame"}
    info = guarded.client.get("/server_info?config_format=json", headers=headers).json()
    assert set(info["config"]) == {entry.path for entry in options()}
    assert info["config"]["api.keys"] == {"value": "2 set", "source": "default"}
    assert info["config"]["model.served_name"]["value"] == ["tiny", "other"]
    assert info["config"]["schedule.max_num_seqs"] == {"value": 8, "source": "default"}
    assert info["phase"] == "ready"
    assert {"revolta-serve", "python"} <= set(info["versions"])
    assert info["engine"]["blocks_total"] == 4
    text = guarded.client.get("/server_info", headers=headers)
    assert text.headers["content-type"].startswith("text/plain")
    lines = text.text.splitlines()
    assert "api.keys = 2 set (default)" in lines
    assert "schedule.max_num_seqs = 8 (default)" in lines
    assert "engine.blocks_total = 4" in lines
    assert "phase = ready" in lines
    assert f"digest = {info['digest']}" in lines
    for secret in ("sesame", "tulip"):
        assert secret not in text.text
        assert secret not in str(info)


def test_steps_reach_the_metrics(server: Server) -> None:
    from revolta_serve.types import StepCost

    assert server.engine.observer is not None
    server.engine.observer(StepCost(decode_rows=2, prefill_rows=0, seconds=0.5, host_seconds=0.25))
    lines = server.client.get("/metrics").text.splitlines()
    assert 'revolta:step_time_ms_sum{kind="decode",model_name="tiny"} 500.0' in lines
    assert 'revolta:host_gap_ms_sum{model_name="tiny"} 250.0' in lines


def test_responses_are_counted_by_route_without_the_probes(server: Server) -> None:
    server.complete()
    server.complete(stream=True)
    server.complete(temperature=-1)
    server.client.get("/is_paused")
    server.client.get("/no/such/route")
    server.client.get("/v1/models/other")
    for _ in range(3):
        server.client.get("/health")
        text = server.client.get("/metrics").text
    counts = {
        (route, status): count
        for line in text.splitlines()
        if line.startswith("revolta:http_requests_total{")
        for route, status, count in [
            (line.split('route="')[1].split('"')[0], line.split('status="')[1].split('"')[0], float(line.split()[-1]))
        ]
    }
    happened = {key: count for key, count in counts.items() if count}
    assert happened == {
        ("/v1/completions", "200"): 2,
        ("/v1/completions", "400"): 1,
        ("/is_paused", "200"): 1,
        ("/v1/models/{id}", "200"): 1,
        ("unknown", "404"): 1,
    }
    assert {route for route, _ in counts} >= {"/pause", "/resume", "/server_info", "/ready"}
    assert 'revolta:http_request_duration_seconds_count{model_name="tiny",route="/v1/completions"} 3.0' in text
