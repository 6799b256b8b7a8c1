"""A real server for tests: its own processes, a free port, always stopped, with faults that happen to the real thing.

There is no form of it inside the calling process. The time to start is the engine's, which loads torch and the model in a process of
its own in any case; and in a process of its own the server has the exit code, the signals and the orphans a test wants to see.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from revolta_serve import profile
from revolta_serve.testing.gate import Gate
from revolta_serve.testing.launch import PROGRAM

STOP_SECONDS = 15.0
POLL_SECONDS = 0.005


@contextlib.contextmanager
def running_server(
    model: str | Path, settings: Mapping[str, Any] | None = None, *, pausable: bool = False, timeout: float = 60.0
) -> Iterator["RunningServer"]:
    """Serve a checkpoint with the real server (api and engine processes) on a free loopback port; yields it once it is ready.

    settings  values of configuration fields by section.key, such as {"schedule.max_num_seqs": 2}, over those of the profile cpu
    pausable  put a gate before every step, for `pause_after` and `fail_step`; costs a microsecond a step
    timeout   seconds until it must be ready

    However the block is left, the server is stopped and none of its processes remains. Raises ConfigError for settings that cannot
    work, RuntimeError with the log if the server ends before it is ready, TimeoutError if it takes too long, RuntimeError if a
    process had to be killed in the end.
    """
    flags = {"model.path": str(model), "api.port": 0, "api.keys": (), **(settings or {})}
    config = msgspec.json.encode(profile.load("cpu", flags).config).decode()
    with tempfile.TemporaryDirectory(prefix="revolta-test-") as folder:
        gate = Gate.create(Path(folder) / "gate") if pausable else None
        gate_path = [str(Path(folder) / "gate")] if pausable else []
        log = Path(folder) / "log"
        with open(log, "ab") as out:
            process = subprocess.Popen([*PROGRAM, "serve", config, *gate_path], stdin=subprocess.PIPE, stdout=out, stderr=out)
        server = RunningServer(process, log, gate)
        try:
            server._wait_until_ready(timeout)
            yield server
        finally:
            server._stop()


class RunningServer:
    """A server that `running_server` started. Process ids are kept from when it was ready; they may since have ended."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, gate: Gate | None) -> None:
        self.url = ""
        """http://127.0.0.1:PORT"""
        self.pid = process.pid
        """Of the api process."""
        self.ranks: tuple[int, ...] = ()
        """Process ids by rank: the engine, which is rank 0, then its further ranks."""
        self._process, self._path, self._gate = process, log, gate
        self._pidfds: dict[int, int] = {}
        self._last_log: str | None = None

    @property
    def engine(self) -> int:
        """Process id of the engine."""
        return self.ranks[0]

    def log(self) -> str:
        """All that its processes have written so far to standard output and standard error."""
        return self._path.read_text(encoding="utf-8", errors="replace") if self._last_log is None else self._last_log

    def wait(self, seconds: float = 10.0) -> int:
        """Wait for the end of the api process and return its exit code. Raises TimeoutError if it goes on."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the server still runs after {seconds:g} s") from None

    def wait_until_gone(self, seconds: float = 5.0) -> None:
        """Wait until no process of the server is left. Raises TimeoutError naming those that are."""
        _until(lambda: not self._alive(), seconds, lambda: f"processes {self._alive()} of the server still run after {seconds:g} s")

    def send_signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to a rank, or to the api process: SIGKILL kills it, SIGSTOP freezes it until SIGCONT."""
        if rank is None:
            self._process.send_signal(number)
        else:
            signal.pidfd_send_signal(self._pidfds[self.ranks[rank]], number)

    def pause_after(self, steps: int) -> None:
        """Let the engine compute `steps` more steps, then hold it before the next one; it answers nobody until it may go on.

        The first step of a request computes its whole prompt, if max_num_batched_tokens allows, and yields the first token; each
        further one yields one token. Call it while the engine is idle or paused; a step under way is not one of `steps`.
        """
        self._gated.allow(steps)

    def wait_until_paused(self, seconds: float = 10.0) -> None:
        """Wait until a step is held: the outputs of all earlier ones are on their way. Raises TimeoutError if none comes."""
        gate = self._gated
        _until(lambda: gate.holds, seconds, lambda: f"no step was held within {seconds:g} s")

    def resume(self) -> None:
        """Let the engine go on."""
        self._gated.open()

    def fail_step(self) -> None:
        """Make the next step fail with an exception: its requests end with an error, and the server goes on."""
        self._gated.fail_next()

    @property
    def steps(self) -> int:
        """Steps computed so far."""
        return self._gated.done

    @property
    def _gated(self) -> Gate:
        if self._gate is None:
            raise RuntimeError("this server has no gate before its steps; start it with running_server(..., pausable=True)")
        return self._gate

    def _wait_until_ready(self, seconds: float) -> None:
        def ready() -> bool:
            code = self._process.poll()
            if code is not None:
                raise RuntimeError(f"the server ended with exit code {code} before it was ready; its log:\n{self.log()}")
            return self._said("ready after ") is not None

        _until(ready, seconds, lambda: f"the server was not ready after {seconds:g} s; its log:\n{self.log()}")
        found = self._said(r"listening on (\S+)")
        assert found is not None, "the address is printed before the engine is ready"
        self.url = found[1]
        (engine,) = _children(self.pid)
        self.ranks = (engine, *_children(engine))
        self._pidfds = {pid: os.pidfd_open(pid) for pid in self.ranks}

    def _said(self, pattern: str) -> re.Match[str] | None:
        """A message that begins so, whatever the form of the lines."""
        return re.search(rf'(?:^|"message": "){pattern}', self.log(), re.MULTILINE)

    def _alive(self) -> list[int]:
        alive = [self.pid] if self._process.poll() is None else []
        return alive + [pid for pid, fd in self._pidfds.items() if not select.select([fd], [], [], 0)[0]]

    def _stop(self) -> None:
        if self._gate is not None:
            self._gate.open()
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        forced = []
        try:
            self._process.wait(STOP_SECONDS)
            self.wait_until_gone()
        except (subprocess.TimeoutExpired, TimeoutError):
            forced = self._alive()
            for fd in self._pidfds.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        self._last_log = self.log()
        assert self._process.stdin is not None
        self._process.stdin.close()
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        if forced:
            raise RuntimeError(f"processes {forced} of the server did not end and were killed; its log:\n{self._last_log}")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def _until(condition: Callable[[], bool], seconds: float, message: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(message())
        time.sleep(POLL_SECONDS)
