"""The public test server keeps its promises: ready when yielded, and gone afterwards, whatever state it was left in."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from revolta_serve.errors import ConfigError
from revolta_serve.testing import RunningServer, running_server
from revolta_serve.weights.tiny import make_tiny
from support.wire import Wire, get

LONG = {"prompt": [5, 6, 7], "max_tokens": 7000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory, layers=4)
    return directory


class Interruption(Exception):
    """What happens inside the block."""


def test_a_held_server_is_stopped_whatever_happens_in_the_block(tiny: Path) -> None:
    seen: list[RunningServer] = []

    def use() -> None:
        with running_server(tiny, {"model.served_name": ("a", "b")}, pausable=True) as server:
            seen.append(server)
            assert [model["id"] for model in get(server.url, "/v1/models").json()["data"]] == ["a", "b"]
            server.pause_after(3)
            with Wire(server.url, "/v1/completions", LONG):
                server.wait_until_paused()
                assert server.steps == 3
                raise Interruption

    with pytest.raises(Interruption):
        use()
    [server] = seen
    assert server.wait(0) == 0, "it was asked to stop, and did"
    assert not any(running(pid) for pid in server.ranks)
    assert "ready after" in server.log(), "the log outlives the server"


def test_a_frozen_server_without_a_gate(tiny: Path) -> None:
    with running_server(tiny, {"parallel.tensor": 2}) as server:
        with pytest.raises(RuntimeError, match="pausable=True"):
            server.pause_after(1)
        with pytest.raises(TimeoutError, match="still runs after"):
            server.wait(0.01)
        with pytest.raises(TimeoutError, match=rf"\[{server.pid}, {server.ranks[0]}, {server.ranks[1]}\]"):
            server.wait_until_gone(0.01)
        for rank in (0, 1, None):
            server.send_signal(signal.SIGSTOP, rank)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert server.wait(0) == 0
    assert not any(running(pid) for pid in server.ranks)


def test_settings_that_cannot_work_are_errors(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"), running_server(tiny, {"schedule.max_num_seq": 2}):
        pass
    with pytest.raises(ConfigError, match=r"schedule.max_num_seqs='2' is not an int"), running_server(tiny, {"schedule.max_num_seqs": "2"}):
        pass
    with pytest.raises(RuntimeError, match=r"exit code 2(.|\n)*does not exist"), running_server(tiny / "nowhere"):
        pass


STARTER = """
import os, sys
from revolta_serve.testing import running_server
with running_server(sys.argv[1]) as server:
    print(server.pid, server.engine, flush=True)
    os._exit(0)
"""


def test_it_ends_with_the_process_that_started_it(tiny: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STARTER, str(tiny)], capture_output=True, text=True, check=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} outlive their starter"
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_helpers_load_torch_only_to_write_checkpoints() -> None:
    code = "import sys; import revolta_serve.testing as t; t.running_server; assert 'torch' not in sys.modules; t.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "AttributeError: module 'revolta_serve.testing' has no attribute 'nothing'" in done.stderr
