"""A gate before every step of an engine, worked from another process.

Four counters in a file that both sides map: an engine that waits here stands between two steps as it would inside a long one, its
heartbeat going on, so whatever a test sees then is what a client of a slow model sees.
"""

import mmap
import time
from pathlib import Path

from revolta_serve.engine.worker import Steps
from revolta_serve.types import StartupReport, StepPlan, StepResult

CELLS = 4
ALLOWED, DONE, WAITING, FAILURES = range(CELLS)
OPEN = 1 << 62
"""A number of steps that is never reached."""

POLL_SECONDS = 0.0005


class InjectedError(RuntimeError):
    """What a step fails with when a test asked for it."""


class Gate:
    """Both sides of the gate; each cell is an aligned 64-bit integer, written by one side only (FAILURES: set here, cleared there)."""

    def __init__(self, path: str | Path) -> None:
        """Map the file of an existing gate."""
        with open(path, "r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), 8 * CELLS)).cast("q")

    @classmethod
    def create(cls, path: str | Path) -> "Gate":
        """A new gate that is open."""
        Path(path).write_bytes(bytes(8 * CELLS))
        gate = cls(path)
        gate.open()
        return gate

    @property
    def done(self) -> int:
        """Steps that have been computed."""
        return self._cells[DONE]

    @property
    def holds(self) -> bool:
        """Whether a step stands before the closed gate; every earlier one has been answered."""
        # In this order: a step that was just let through clears WAITING before the gate closes behind it.
        return self._cells[DONE] >= self._cells[ALLOWED] and bool(self._cells[WAITING])

    def allow(self, steps: int) -> None:
        """Let `steps` more steps pass, then close."""
        self._cells[ALLOWED] = self.done + steps

    def open(self) -> None:
        """Let every step pass."""
        self._cells[ALLOWED] = OPEN

    def fail_next(self) -> None:
        """Make the next step that passes raise InjectedError."""
        self._cells[FAILURES] = 1

    def enter(self) -> None:
        """Engine: wait until the gate is open. Raises InjectedError when this step shall fail."""
        while self._cells[DONE] >= self._cells[ALLOWED]:
            self._cells[WAITING] = 1
            time.sleep(POLL_SECONDS)
        self._cells[WAITING] = 0
        if self._cells[FAILURES]:
            self._cells[FAILURES] = 0
            raise InjectedError("injected fault")

    def leave(self) -> None:
        """Engine: a step has been computed."""
        self._cells[DONE] += 1


class GatedSteps:
    """A runner whose steps pass a gate."""

    def __init__(self, runner: Steps, gate: Gate) -> None:
        self._runner, self._gate = runner, gate

    @property
    def report(self) -> StartupReport:
        """The runner's."""
        return self._runner.report

    def step(self, plan: StepPlan) -> StepResult:
        """The runner's step, once the gate lets it pass."""
        self._gate.enter()
        result = self._runner.step(plan)
        self._gate.leave()
        return result
