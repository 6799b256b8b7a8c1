"""What passes between the api process and the engine. Workers exchange only StartupReport, StepPlan and StepResult with the engine."""

from msgspec import Struct

from revolta_serve import errors
from revolta_serve.config import ServeConfig
from revolta_serve.errors import EngineError, RevoltaError
from revolta_serve.types import CacheReset, EngineStatus, GenerateRequest, Output, PauseMode, StartupReport, StepCost


class Submit(Struct, frozen=True, tag=True):
    """api: queue these requests, all or none. Answered by Admitted or Refused with the same ticket, then by Outputs."""

    ticket: int
    """A number the client gives to this message."""
    requests: tuple[GenerateRequest, ...]


class Abort(Struct, frozen=True, tag=True):
    """api: end this request; its last output says abort. Ignored for a request that has already ended."""

    id: str


class Drain(Struct, frozen=True, tag=True):
    """api: refuse new requests, abort the running ones after this many seconds, then exit."""

    seconds: float


class Pause(Struct, frozen=True, tag=True):
    """api: start no more requests. abort: end those that run or wait; wait: let the running ones finish; keep: freeze them. Answered
    by Done once that is reached, by Refused if the pause ends before. A later pause may go on from keep to wait and from wait to
    abort; one that goes back leaves the mode as it is."""

    ticket: int
    mode: PauseMode
    clear: bool
    """Then empty the prefix cache too; with keep, frozen requests give up what they hold and recompute it."""


class Resume(Struct, frozen=True, tag=True):
    """api: end a pause. Answered by Done."""

    ticket: int


class ResetCache(Struct, frozen=True, tag=True):
    """api: forget what can be reused. Answered by Done with the counts of a CacheReset."""

    ticket: int
    preempt: bool
    """Preempt the running requests first, so that nothing is in use."""


class Ready(Struct, frozen=True, tag=True):
    """engine: every rank has loaded; requests may come."""

    reports: tuple[StartupReport, ...]
    status: EngineStatus


class Admitted(Struct, frozen=True, tag=True):
    """engine: the requests of this ticket are in the queue."""

    ticket: int


class Done(Struct, frozen=True, tag=True):
    """engine: what the ticket asked for has happened."""

    ticket: int
    status: EngineStatus
    reset: CacheReset | None = None


class Refused(Struct, frozen=True, tag=True):
    """engine: what this ticket asked for will not happen; `error` is the name of a class in errors.py."""

    ticket: int
    error: str
    message: str

    @classmethod
    def of(cls, ticket: int, error: RevoltaError) -> "Refused":
        """The message that carries an error to the api process."""
        return cls(ticket, type(error).__name__, error.message)

    def exception(self) -> RevoltaError:
        """The error again; an EngineError if the class is not known."""
        kind = getattr(errors, self.error, EngineError)
        return kind(self.message) if isinstance(kind, type) and issubclass(kind, RevoltaError) else EngineError(self.message)


class Outputs(Struct, frozen=True, tag=True):
    """engine: what a step or an abort produced, and the counts after it; without outputs, the news are in the counts or the cost."""

    outputs: tuple[Output, ...]
    status: EngineStatus
    cost: StepCost | None = None
    """Of the step."""


class Heartbeat(Struct, frozen=True, tag=True):
    """engine, from a thread of its own, which must not look at counts that change: alive, and this large."""

    rss_bytes: int
    """Resident memory of its process."""


class Failed(Struct, frozen=True, tag=True):
    """engine: its last words."""

    message: str


Command = Submit | Abort | Drain | Pause | Resume | ResetCache
Event = Ready | Admitted | Done | Refused | Outputs | Heartbeat | Failed


class LaunchSpec(Struct, frozen=True, kw_only=True):
    """What a child process needs to start, one line of JSON on its standard input, which then stays open as a sign of life."""

    config: ServeConfig
    """Resolved, without API keys."""
    rank: int
    """0 is the engine, which starts the others."""
    parent: int
    """Process id of the process that started this one."""
    folder: str
    """Directory of the sockets."""
    command: tuple[str, ...]
    """How this process was started, to start others like it."""
