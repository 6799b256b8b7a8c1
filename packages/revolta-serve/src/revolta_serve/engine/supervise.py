"""Processes that live and die together: children end with their parent, a parent notices the end of a child at once.

A child asks the kernel to be killed with its parent (PR_SET_PDEATHSIG) and, for kernels and namespaces where that is not enough,
watches its standard input, whose other end only the parent holds. A parent watches the pidfd of each child.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from revolta_serve.engine.messages import LaunchSpec

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
TERM_SECONDS = 5.0
"""How long a child may take to end before it is killed."""


def die_with_parent(parent: int) -> None:
    """Ask to be killed when the thread that started this process ends; exit if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def spawn(spec: LaunchSpec) -> "subprocess.Popen[bytes]":
    """Start a child for a spec. The caller's thread must outlive the child, which the kernel kills with it."""
    child = subprocess.Popen(spec.command, stdin=subprocess.PIPE)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # a child that is already dead is noticed by its pidfd
        child.stdin.write(msgspec.json.encode(spec) + b"\n")
        child.stdin.flush()
    return child


def read_spec() -> LaunchSpec:
    """The spec that the parent wrote to standard input; nothing beyond its line is read."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit("revolta-serve: this module is started by the server, with its configuration on standard input")
        line += byte
    return msgspec.json.decode(bytes(line), type=LaunchSpec)


def describe_exit(code: int) -> str:
    """An exit status in words: `exit code 3`, `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def end(children: Sequence["subprocess.Popen[bytes]"], seconds: float = TERM_SECONDS) -> None:
    """Ask children to end by closing their standard input, kill by process id what is left after `seconds`, and reap all."""
    for child in children:
        if child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("process %d did not end within %.0f s and is killed", child.pid, seconds)
            child.kill()
            child.wait()


class Watch(threading.Thread):
    """A thread that beats, and ends the process at once when its parent, a child or a step is lost.

    beat: called every `interval` seconds. step_age: seconds the step under way has taken. last_words: told the reason before exit.
    """

    def __init__(
        self,
        *,
        interval: float,
        children: Mapping[int, "subprocess.Popen[bytes]"] | None = None,
        beat: Callable[[], None] = lambda: None,
        step_age: Callable[[], float] = lambda: 0.0,
        step_timeout: float = float("inf"),
        last_words: Callable[[str], None] = lambda reason: None,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._interval, self._children = interval, dict(children or {})
        self._beat, self._step_age, self._step_timeout, self._last_words = beat, step_age, step_timeout, last_words
        self._wake_out, self._wake_in = os.pipe()

    def stop(self) -> None:
        """End the thread: from now on the end of a child is expected."""
        os.write(self._wake_in, b"x")
        self.join()

    def run(self) -> None:
        """Beat and watch until `stop`."""
        poll = select.poll()
        poll.register(self._wake_out, select.POLLIN)
        poll.register(0, select.POLLIN | select.POLLHUP)
        pidfds = {os.pidfd_open(child.pid): rank for rank, child in self._children.items()}
        for pidfd in pidfds:
            poll.register(pidfd, select.POLLIN)
        while True:
            self._beat()
            for fd, _ in poll.poll(round(self._interval * 1000)):
                if fd == self._wake_out:
                    for each in (self._wake_out, self._wake_in, *pidfds):
                        os.close(each)
                    return
                if fd == 0:
                    self._exit("the process that started this one is gone", quiet=True)
                rank = pidfds[fd]
                code = self._children[rank].wait()
                self._exit(f"rank {rank} ended with {describe_exit(code)}")
            if self._step_age() > self._step_timeout:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                self._exit(f"a step has taken more than {self._step_timeout:g} s")

    def _exit(self, reason: str, *, quiet: bool = False) -> None:
        if not quiet:
            log.error("%s; the engine ends", reason)
            self._last_words(reason)
        # The main thread may be deep in a collective that will never return, so nothing is unwound. Children die by their signal.
        os._exit(1)
