"""The engine's loop: commands in, steps, events out, until it is told to drain."""

import time

from revolta_serve.engine.channel import Channel
from revolta_serve.engine.core import EngineCore
from revolta_serve.engine.messages import Abort, Admitted, Command, Drain, Failed, Outputs, Refused, Submit
from revolta_serve.errors import RevoltaError
from revolta_serve.types import Output

IDLE_SECONDS = 0.1
"""How long an idle engine waits for a command before it looks whether a signal asked it to drain."""

LOST_RANK_SECONDS = 0.5
"""How long a failed step of several ranks waits, before it is reported, for a better reason than its own."""


class Service:
    """Runs a core for one api process."""

    def __init__(self, core: EngineCore, api: Channel) -> None:
        self.core, self.api = core, api
        self._deadline: float | None = None

    def drain(self, seconds: float) -> None:
        """Accept nothing more and abort what still runs after `seconds`; a second call may only shorten that. Signal-safe."""
        self.core.accepting = False
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def run(self) -> int:
        """Serve until drained (returns 0) or until the core is broken (returns 1)."""
        while True:
            self._take_commands()
            if self._deadline is not None:
                if time.monotonic() >= self._deadline:
                    self._send(self.core.abort_all())
                if not self.core.has_work:
                    return 0
            if self.core.has_work:
                outputs = self.core.step()
                if self.core.broken:
                    # A rank that is gone breaks the collectives of the others, often before it is missed. Given a moment, the thread
                    # that watches the ranks says which one and how it ended, and ends this process.
                    time.sleep(LOST_RANK_SECONDS)
                self._send(outputs)
                if self.core.broken:
                    self.api.send(Failed(f"{self.core.failures} steps failed in a row"))
                    return 1

    def _take_commands(self) -> None:
        """Handle every command that has arrived; wait for one only when there is nothing else to do."""
        wait = 0.0 if self.core.has_work else IDLE_SECONDS
        while (command := self.api.receive(Command, wait)) is not None:
            wait = 0.0
            self._handle(command)

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

    def _send(self, outputs: list[Output]) -> None:
        if outputs:
            self.api.send(Outputs(tuple(outputs), self.core.status))
