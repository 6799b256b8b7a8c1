"""Lost processes and impossible starts: every client is told in seconds, the exit code says it, and nobody is left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from revolta_serve.testing import RunningServer, running_server
from revolta_serve.weights.tiny import make_tiny
from support.wire import Wire, get, metrics, payloads

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"max_tokens": 7000, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    (COMPLETIONS, {"prompt": "b", "stream": True, "n": 2}),
    (COMPLETIONS, {"prompt": "c"}),
    (CHAT, {"messages": [{"role": "user", "content": "d"}], "n": 2}),
    (COMPLETIONS, {"prompt": "queued", "stream": True}),
    (COMPLETIONS, {"prompt": "queued too"}),
]
RUNNING, WAITING = 6, 2
"""Of the eight choices, with max_num_seqs = RUNNING: the last two requests are queued."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory, layers=4)
    return directory


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


def choices(server: RunningServer) -> tuple[float, float]:
    """How many run and wait."""
    now = metrics(server.url)
    return now["num_requests_running"], now["num_requests_waiting"]


@pytest.fixture
def in_flight(tiny: Path) -> Iterator[Callable[..., tuple[RunningServer, list[Wire]]]]:
    """Start a server with every one of REQUESTS in flight: running or queued, streams begun or not."""
    with ExitStack() as stack:

        def start(tensor: int, shutdown_timeout: float = 0.0, **engine: float) -> tuple[RunningServer, list[Wire]]:
            times = {f"engine.{name}": value for name, value in engine.items()} | {"api.shutdown_timeout": shutdown_timeout}
            settings = {"parallel.tensor": tensor, "schedule.max_num_seqs": RUNNING, "engine.heartbeat_interval": 0.1, **times}
            server = stack.enter_context(running_server(tiny, settings))
            assert len(server.ranks) == tensor
            wires: list[Wire] = []
            expected = 0
            for path, fields in REQUESTS:
                # One after the other, so that it is the last ones that must wait.
                wires.append(stack.enter_context(Wire(server.url, path, {**LONG, **fields})))
                expected += fields.get("n", 1)
                wait_for(lambda count=expected: sum(choices(server)) == count)  # type: ignore[misc]
            assert choices(server) == (RUNNING, WAITING)
            for wire in wires[:2]:
                wire.receive_until(b"data: ")
            return server, wires

        yield start


FAULTS = {
    "the engine is killed": (1, 0, signal.SIGKILL, {}, "SIGKILL"),
    "a rank is killed": (2, 1, signal.SIGKILL, {}, "rank 1 ended with signal SIGKILL"),
    "the engine is frozen": (1, 0, signal.SIGSTOP, {"heartbeat_timeout": 1.0}, "no sign of life for 1 s"),
    "a rank is frozen": (2, 1, signal.SIGSTOP, {"step_timeout": 1.0}, "a step has taken more than 1 s"),
}


@pytest.mark.parametrize("fault", [pytest.param(name, marks=pytest.mark.full if "frozen" in name else ()) for name in FAULTS])
def test_a_lost_process_ends_every_request_and_the_server(in_flight: Callable[..., tuple[RunningServer, list[Wire]]], fault: str) -> None:
    tensor, rank, number, times, reason = FAULTS[fault]
    server, wires = in_flight(tensor, **times)
    began = time.monotonic()
    server.send_signal(number, rank)
    for wire, (path, fields) in zip(wires, REQUESTS, strict=True):
        body = wire.finish(5)
        if fields.get("stream"):
            *events, error, done = payloads(body)
            assert done == "[DONE]"
            assert all("error" not in event and event["choices"][0]["finish_reason"] is None for event in events)
        else:
            error = json.loads(body)
        assert wire.status == (200 if fields.get("stream") else 500), (path, fields)
        assert error["error"]["type"] == "server_error"
        assert reason in error["error"]["message"]
    assert time.monotonic() - began < 5
    assert server.wait(5) == 1
    server.wait_until_gone(5)
    assert re.search(rf"^revolta-serve: error: .*{reason}.*; the server ends$", server.log(), re.MULTILINE)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_nothing_outlives_the_api_process(in_flight: Callable[..., tuple[RunningServer, list[Wire]]]) -> None:
    server, wires = in_flight(2)
    server.send_signal(signal.SIGKILL)
    assert server.wait(5) == -signal.SIGKILL
    server.wait_until_gone(5)
    for wire in wires:
        wire.finish(1)


def test_a_stop_ends_what_runs_and_what_waits(in_flight: Callable[..., tuple[RunningServer, list[Wire]]]) -> None:
    server, wires = in_flight(1)
    server.send_signal(signal.SIGTERM)
    for wire, (_, fields) in zip(wires, REQUESTS, strict=True):
        body = wire.finish(5)
        error = payloads(body)[-2] if fields.get("stream") else json.loads(body)
        assert error["error"]["type"] == "service_unavailable"
        assert "shutting down" in error["error"]["message"]
    assert server.wait(5) == 0
    server.wait_until_gone(5)


@pytest.mark.parametrize(("first", "second"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
def test_a_second_signal_stops_at_once_and_says_so(
    in_flight: Callable[..., tuple[RunningServer, list[Wire]]], first: int, second: int
) -> None:
    server, wires = in_flight(1, shutdown_timeout=60.0)
    server.send_signal(first)
    wait_for(lambda: get(server.url, "/health").status_code == 503)
    wires[0].receive_until(b"data: ")
    assert not any(wire.ended for wire in wires), "running requests have a minute"
    server.send_signal(second)
    server.send_signal(second)
    for wire, (_, fields) in zip(wires, REQUESTS, strict=True):
        body = wire.finish(5)
        error = payloads(body)[-2] if fields.get("stream") else json.loads(body)
        assert error["error"]["type"] == "service_unavailable"
        assert "the server was told to stop at once; the answer was given up" in error["error"]["message"]
        assert "SIGKILL" not in error["error"]["message"]
    assert server.wait(5) == 0, "it was asked to stop, and did"
    server.wait_until_gone(5)
    assert "stopping at once, as a second signal asks" in server.log()
    assert "error:" not in server.log()
    assert "Traceback" not in server.log()


def test_a_server_that_cannot_start_is_reported_with_its_log(tiny: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"exit code 2 before it was ready.*\n.*cannot listen on 127.0.0.1 port {port}"):
            running_server(tiny, {"api.port": port}).__enter__()


def damage(file: Path, how: str) -> None:
    """Make a weight file unreadable."""
    content = file.read_bytes()
    if how == "truncated":
        file.write_bytes(content[:-1000])
    elif how == "garbage":
        file.write_bytes(b"\xff" * 8 + content[8:])
    else:
        file.unlink()
        file.mkdir()


IMPOSSIBLE: dict[str, tuple[list[str], str]] = {
    "missing model": (["{folder}/nowhere"], "nowhere' does not exist; give the directory that holds config.json"),
    "no checkpoint": (["{folder}"], "config.json"),
    "truncated": (["{truncated}"], "model.safetensors"),
    "garbage": (["{garbage}"], "model.safetensors"),
    "a directory": (["{directory}"], "model.safetensors"),
    "port in use": (["{tiny}", "--port", "{port}"], "cannot listen on 127.0.0.1 port {port}"),
    "a long host": (["{tiny}", "--host", "a" * 70], f"api.host='{'a' * 70}' is no address of this machine"),
    "an empty label": (["{tiny}", "--host", "a..b"], "api.host='a..b' is no address of this machine"),
    "no bytes of a name": (["{tiny}", "--host", "\udcff"], "api.host='\\udcff' is no address of this machine"),
    "bad defaults": (["{defaults}"], "generation_config.json: top_p is 7; a number above 0 and at most 1 is expected"),
    "too many ranks": (["{tiny}", "--tensor-parallel-size", "3"], "tensor parallel size is 3"),
    "too long": (["{tiny}", "--max-model-len", "999999"], "max_model_len=999999 is more than the checkpoint's 8192"),
    "too small": (["{tiny}", "--kv-cache-memory-bytes", "5000"], "use at least"),
    "no room for a prompt": (["{tiny}", "--max-num-batched-tokens", "64"], "leaves no prompt chunk of 64"),
    "unknown key": (["{tiny}", "--set", "cache.num_blokcs=3"], "did you mean num_blocks?"),
}


def test_an_impossible_start_is_one_line_and_exit_2_before_any_engine(tiny: Path, tmp_path: Path) -> None:
    """Every case at once: each in a session of its own, in which nobody may be left."""
    values: dict[str, Any] = {"tiny": tiny, "folder": tmp_path}
    for how in ("truncated", "garbage", "directory"):
        values[how] = tmp_path / how
        make_tiny(values[how], layers=4)
        damage(values[how] / "model.safetensors", how)
    values["defaults"] = tmp_path / "defaults"
    make_tiny(values["defaults"], layers=4)
    (values["defaults"] / "generation_config.json").write_text('{"eos_token_id": 1, "top_p": 7}')
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        values["port"] = other.getsockname()[1]
        program = [sys.executable, "-P", "-m", "revolta_serve.cli", "serve"]
        started = {
            name: subprocess.Popen(
                [*program, *(argument.format(**values) for argument in arguments), *([] if "--port" in arguments else ["--port", "0"])],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
            for name, (arguments, _) in IMPOSSIBLE.items()
        }  # fmt: skip
        ended = {name: (*process.communicate(timeout=60), process) for name, process in started.items()}
    for name, (out, err, process) in ended.items():
        assert process.returncode == 2, (name, out, err)
        assert err.startswith("revolta-serve: error: "), (name, err)
        assert err.count("\n") == 1, (name, err)
        assert IMPOSSIBLE[name][1].format(**values) in err, (name, err)
        assert "listening" not in out, (name, out)
        assert not session(process.pid), (name, "left processes behind")


def session(leader: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, *fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if int(fields[2]) == leader and state not in "ZX":
                found.append(int(folder.name))
    return found


def test_an_engine_is_found_by_its_session() -> None:
    """The search above would find somebody."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert session(process.pid) == [process.pid]
        assert os.getsid(process.pid) == process.pid
    finally:
        process.communicate(b"\n")
    assert not session(process.pid)
