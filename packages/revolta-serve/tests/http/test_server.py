"""Keys, routes, bodies, health, models, metrics."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.routing import Route

from revolta_serve.api import models, ops
from revolta_serve.api import tokenizer as tokenizer_route
from revolta_serve.api.app import ROUTES as ROUTES_OF_THE_APP
from revolta_serve.api.context import Api
from revolta_serve.errors import EngineUnavailableError
from support.script_engine import ScriptEngine, Server, data_lines, serving, wait_for
from support.text import byte_tokens, tokenizer

END = tokenizer().added["<|im_end|>"]
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/no/such/route"),
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(ScriptEngine([*byte_tokens("ok"), END]), keys=("first", "zweiter-schlüssel")) as server:
        yield server


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PUT", "PATCH", "DELETE", "TRACE"])
def test_no_method_needs_no_key(guarded: Server, method: str) -> None:
    for _, path in ROUTES:
        response = guarded.client.request(method, path)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "firs"}, {"authorization": "Basic first"}, {"authorization": "Bearer"}],
)
def test_without_a_key(guarded: Server, method: str, path: str, headers: dict[str, str]) -> None:
    response = guarded.client.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first"},
        {"authorization": "bearer  first"},
        {"x-api-key": "first"},
        {"x-api-key": "zweiter-schlüssel".encode().decode("latin-1")},
    ],
)
def test_with_a_key(guarded: Server, headers: dict[str, str]) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    assert guarded.client.get("/v1/models", headers=raw).status_code == 200  # type: ignore[arg-type]
    assert guarded.client.get("/no/such/route", headers=raw).status_code == 404  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
def test_open_routes(guarded: Server, path: str) -> None:
    assert guarded.client.get(path).status_code == 200
    assert guarded.client.head(path).status_code == 200


def test_unknown_routes_and_methods(shared: Server) -> None:
    missing = shared.client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["type"], missing.json()["error"]["code"]) == (404, "not_found_error", 404)
    assert shared.client.get("/v1/models/").status_code == 404
    wrong = shared.client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"], wrong.json()["error"]["code"]) == (405, "POST", 405)
    assert set(wrong.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application/jsonp"])
def test_wrong_media_types(shared: Server, path: str, media: str) -> None:
    response = shared.client.post(path, content=b"{}", headers={"content-type": media})
    assert (response.status_code, response.json()["error"]["code"]) == (415, 415)


def test_right_media_types(shared: Server) -> None:
    for media in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert shared.client.post("/tokenize", content=b'{"prompt": "x"}', headers={"content-type": media}).status_code == 200
    packed = shared.client.post("/tokenize", content=b"x", headers={"content-type": "application/json", "content-encoding": "gzip"})
    assert packed.status_code == 415


def test_large_bodies(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([END]), max_request_bytes=2048)
    body = b'{"prompt": "' + b"x" * 4000 + b'"}'
    headers = {"content-type": "application/json"}
    stated = server.client.post("/tokenize", content=body, headers=headers)
    assert (stated.status_code, stated.json()["error"]["code"]) == (413, 413)
    chunked = server.client.post("/tokenize", content=iter([body[:1000], body[1000:]]), headers=headers)
    assert chunked.status_code == 413
    assert "2048" in chunked.json()["error"]["message"]
    assert server.client.post("/tokenize", content=body[:2000] + b'"}', headers=headers).status_code == 200


def test_unknown_models(shared: Server) -> None:
    for response in (shared.chat(model="absent"), shared.complete(model="absent", stream=True), shared.client.get("/v1/models/absent")):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_models(shared: Server) -> None:
    answer = shared.client.get("/v1/models").json()
    assert answer["object"] == "list"
    card = answer["data"][1]
    assert card == {
        "id": "other",
        "object": "model",
        "created": card["created"],
        "owned_by": "revolta",
        "root": "tiny",
        "parent": None,
        "max_model_len": 512,
        "thinking_default": False,
        "permission": [],
    }
    assert shared.client.get("/v1/models/other").json() == card


@pytest.mark.parametrize("phase", ["starting", "draining", "dead"])
def test_health_follows_the_engine(serve: Callable[..., Server], phase: Any) -> None:
    server = serve(ScriptEngine([END]))
    assert server.client.get("/health").content == b""
    server.engine.phase = phase
    for path in ("/health", "/ready"):
        response = server.client.get(path)
        assert response.status_code == 503
        assert response.json()["phase"] == phase
        assert response.json()["elapsed"] >= 0
        assert server.client.head(path).status_code == 503
    for stream in (False, True):
        refused = server.chat(stream=stream)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "service_unavailable")
        assert refused.headers["retry-after"] == "1"
    assert server.client.get("/v1/models").status_code == 200


def test_version(shared: Server) -> None:
    from importlib.metadata import version

    assert shared.client.get("/version").json() == {"version": version("revolta-serve")}
    assert shared.chat().json()["system_fingerprint"].startswith(f"revolta-{version('revolta-serve')}-tp1-")


def test_metrics(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([*byte_tokens("ab"), END], cached=1))
    server.complete(n=2)
    server.chat(temperature=-1)
    server.client.get("/v1/nothing")
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    label = 'model_name="tiny"'
    for sample in (
        f"revolta:num_requests_running{{{label}}} 0.0",
        f"revolta:kv_cache_usage_perc{{{label}}} 0.75",
        f"revolta:generation_tokens_total{{{label}}} 6.0",
        f'revolta:request_success_total{{finished_reason="stop",{label}}} 2.0',
        f"revolta:prompt_tokens_cached_total{{{label}}} 2.0",
        f"revolta:request_params_n_sum{{{label}}} 2.0",
        f"revolta:request_generation_tokens_sum{{{label}}} 6.0",
        f"revolta:request_max_num_generation_tokens_sum{{{label}}} 3.0",
        f"revolta:request_max_num_generation_tokens_count{{{label}}} 1.0",
        f"revolta:time_to_first_token_seconds_count{{{label}}} 2.0",
        f'revolta:http_errors_total{{{label},route="/v1/chat/completions",status="400"}} 1.0',
        f'revolta:http_errors_total{{{label},route="unknown",status="404"}} 1.0',
    ):
        assert sample in lines
    assert all(line.startswith(("revolta:", "# ")) for line in lines)


def test_an_unexpected_error_tells_nothing_of_the_inside(serve: Callable[..., Server]) -> None:
    def broken(request: object) -> list[int]:
        raise LookupError("secret detail")

    server = serve(ScriptEngine(broken))
    response = server.complete()
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in response.text
    assert "secret" not in server.complete(stream=True).text


@pytest.mark.parametrize("said", ["the engine failed in a step: ValueError: secret detail", "the engine is dead: Again: secret\ndetail"])
def test_an_exception_inside_the_engine_is_told_to_the_log_only(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture, said: str
) -> None:
    server = serve(ScriptEngine(byte_tokens("abc"), break_after=1, break_reason=said, refuse={3: EngineUnavailableError(said)}))
    expected = f"{said.partition(':')[0]}; the server's log has the reason"
    assert server.complete().json()["error"]["message"] == expected
    assert caplog.text.count("secret") == 1
    assert json.loads(data_lines(server.chat(stream=True).text)[-2])["error"]["message"] == expected
    assert server.chat().json()["error"]["message"] == expected


@pytest.mark.parametrize(
    "said", ["the engine failed in a step: step 3 has not been answered", "the engine is dead: rank 1 ended with signal SIGKILL", "no step"]
)
def test_words_of_our_own_reach_the_client(serve: Callable[..., Server], said: str) -> None:
    assert serve(ScriptEngine([5], break_after=0, break_reason=said)).complete().json()["error"]["message"] == said


BREAKS: dict[str, tuple[Any, str, Any]] = {
    "/v1/chat/completions": (Api, "check_model", {"messages": [{"role": "user", "content": "x"}]}),
    "/v1/completions": (Api, "check_sequences", {"prompt": "x"}),
    "/tokenize": (tokenizer_route, "Tokens", {"prompt": "x"}),
    "/detokenize": (tokenizer_route, "check_token_ids", {"tokens": [1]}),
    "/v1/models": (models, "Response", None),
    "/v1/models/{id}": (models, "Response", None),
    "/health": (ops, "Response", None),
    "/version": (ops, "Response", None),
    "/metrics": (ops, "Response", None),
}
"""For every route something it needs, and a body."""


@pytest.mark.parametrize("route", BREAKS)
def test_errors_that_nobody_expects_are_counted(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, route: str
) -> None:
    server = serve(ScriptEngine([END]))
    place, name, body = BREAKS[route]
    with monkeypatch.context() as patch:
        patch.setattr(place, name, _broken)
        response = server.client.request("POST" if body else "GET", route.replace("{id}", "tiny"), json=body)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in response.text
    wait_for(lambda: "secret detail" in caplog.text)
    sample = f'revolta:http_errors_total{{model_name="tiny",route="{route}",status="500"}} 1.0'
    assert sample in server.client.get("/metrics").text.splitlines()


def test_every_route_is_among_them() -> None:
    paths = {route.path.replace("{id:path}", "{id}") for route in ROUTES_OF_THE_APP if isinstance(route, Route)}
    assert paths - set(BREAKS) == {"/ready"}, "which is /health"


def _broken(*_: object, **__: object) -> Any:
    raise LookupError("secret detail")
