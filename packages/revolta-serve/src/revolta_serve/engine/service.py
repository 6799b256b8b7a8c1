"""The engine's loop: commands in, steps, events out, until it is told to drain."""

import time
from dataclasses import dataclass, field

from revolta_serve.engine.channel import Channel
from revolta_serve.engine.core import EngineCore
from revolta_serve.engine.messages import (
    Abort,
    Admitted,
    Command,
    Done,
    Drain,
    Failed,
    Outputs,
    Pause,
    Refused,
    ResetCache,
    Resume,
    Submit,
)
from revolta_serve.errors import ConflictError, RevoltaError
from revolta_serve.types import Output, PauseMode, StepCost

IDLE_SECONDS = 0.1
"""How long an engine that has nothing to compute waits for a command before it looks whether a signal asked it to drain."""

LOST_RANK_SECONDS = 0.5
"""How long a failed step of several ranks waits, before it is reported, for a better reason than its own."""

SHUT_DOWN = "the server is shutting down; the answer was given up"
PAUSED = "the server was paused; the answer was given up"

SEVERITY: dict[PauseMode, int] = {"keep": 0, "wait": 1, "abort": 2}


@dataclass(slots=True)
class _Pause:
    """A pause that is in force, and who has not been told yet that it is reached."""

    mode: PauseMode
    clear: bool = False
    tickets: list[int] = field(default_factory=list)


class Service:
    """Runs a core for one api process."""

    def __init__(self, core: EngineCore, api: Channel, *, admission_window: float = 0.0) -> None:
        """admission_window: seconds that an idle engine waits, after a request came, for others that come with it."""
        self.core, self.api, self.admission_window = core, api, admission_window
        self._deadline: float | None = None
        self._pause: _Pause | None = None
        self._starved = False
        """There is work, and nothing of it could be planned: only a command can change that."""

    def drain(self, seconds: float) -> None:
        """Accept nothing more and abort what still runs after `seconds`; a second call may only shorten that. Signal-safe."""
        self.core.accepting = False
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def run(self) -> int:
        """Serve until drained (returns 0) or until the core is broken (returns 1)."""
        while True:
            quiet = self._take_commands() or self._deadline is not None
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._send(self.core.abort_all(SHUT_DOWN))
            if self.core.has_work and not self._frozen:
                self._step()
            self._settle()
            self._send(self.core.audit(idle=quiet and not self.core.has_work))
            if self.core.broken:
                self.api.send(Failed(self.core.broken))
                return 1
            if self._deadline is not None and not self.core.has_work:
                return 0

    @property
    def _frozen(self) -> bool:
        return self._pause is not None and self._pause.mode == "keep"

    @property
    def _drained(self) -> bool:
        """Nothing runs, and nothing could be planned though a step was tried: those that wait wait for the end of a pause."""
        return not self.core.has_work or (self._starved and not self.core.status.running)

    def _step(self) -> None:
        outputs = self.core.step()
        self._starved = self.core.cost is None and not outputs
        if self.core.broken:
            # A rank that is gone breaks the collectives of the others, often before it is missed. Given a moment, the thread
            # that watches the ranks says which one and how it ended, and ends this process.
            time.sleep(LOST_RANK_SECONDS)
        self._send(outputs, self.core.cost)

    def _take_commands(self) -> bool:
        """Handle every command that has arrived; wait for one only when there is nothing else to do. Returns whether that was in vain.

        When the first request comes to an idle engine, those that come in the same moment are taken along into its first step.
        """
        idle = not self.core.has_work
        wait = IDLE_SECONDS if idle or self._frozen or self._starved else 0.0
        if self._deadline is not None:
            wait = max(0.0, min(wait, self._deadline - time.monotonic()))
        closes, handled = 0.0, False
        while (command := self.api.receive(Command, wait)) is not None:
            handled, self._starved = True, False
            self._handle(command)
            if idle and not closes and self.core.has_work:
                closes = time.monotonic() + self.admission_window
            wait = max(0.0, closes - time.monotonic()) if closes and self.core.has_work else 0.0
        if handled:
            self.api.send(Outputs((), self.core.status))
        if self._frozen:
            self.core.rest()
        return idle and not handled

    def _handle(self, command: Command) -> None:
        if isinstance(command, Submit):
            try:
                self.core.submit(*command.requests)
            except RevoltaError as error:
                self.api.send(Refused.of(command.ticket, error))
            else:
                self.api.send(Admitted(command.ticket))
        elif isinstance(command, Abort):
            output = self.core.abort(command.id)
            self._send([output] if output is not None else [])
        elif isinstance(command, Drain):
            self.drain(command.seconds)
        elif isinstance(command, Pause):
            self._hold(command)
        elif isinstance(command, Resume):
            self._resume(command)
        else:
            self._reset(command)

    def _hold(self, command: Pause) -> None:
        if self._pause is None:
            self._pause = _Pause(command.mode)
        elif SEVERITY[command.mode] > SEVERITY[self._pause.mode]:
            self._pause.mode = command.mode
        self._pause.clear |= command.clear
        self._pause.tickets.append(command.ticket)
        self.core.hold(True)
        if command.mode == "abort":
            self._send(self.core.abort_all(PAUSED))
        self._settle()  # at once: what comes behind this command waits in the queue

    def _resume(self, command: Resume) -> None:
        if self._pause is not None:
            for ticket in self._pause.tickets:
                self.api.send(Refused.of(ticket, ConflictError("the pause was ended by a resume before it was reached")))
        self._pause = None
        self.core.hold(False)
        self._done(command.ticket)

    def _reset(self, command: ResetCache) -> None:
        reset = self.core.reset_cache(preempt=command.preempt)
        self.api.send(Done(command.ticket, self.core.status, reset))

    def _settle(self) -> None:
        """Tell those who asked for a pause that it is reached, once it is."""
        pause = self._pause
        if pause is None or not pause.tickets or (pause.mode == "wait" and not self._drained):
            return
        if pause.clear:
            self.core.reset_cache(preempt=True)
        for ticket in pause.tickets:
            self._done(ticket)
        pause.tickets, pause.clear = [], False

    def _done(self, ticket: int) -> None:
        self.api.send(Done(ticket, self.core.status))

    def _send(self, outputs: list[Output], cost: StepCost | None = None) -> None:
        if outputs or cost is not None:
            self.api.send(Outputs(tuple(outputs), self.core.status, cost))
