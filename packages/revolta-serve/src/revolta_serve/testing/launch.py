"""The processes that testing.server starts: python -m revolta_serve.testing.launch serve CONFIG [GATE] | engine GATE.

`serve` is commands.serve as the command line runs it, but for two things: it ends when the process that started it is gone, whose
end of standard input then closes, and with a gate its engine process is `engine`, which is engine.process behind that gate.
"""

import os
import signal
import sys
import threading

import msgspec

from revolta_serve.config import ServeConfig
from revolta_serve.engine import process, worker
from revolta_serve.engine.client import COMMAND
from revolta_serve.errors import RevoltaError
from revolta_serve.profile import Loaded
from revolta_serve.testing.gate import Gate, GatedSteps

PROGRAM = (sys.executable, "-P", "-m", "revolta_serve.testing.launch")


def serve(config: str, gate: str = "") -> int:
    """Serve a ServeConfig given as JSON; returns the exit code."""
    from revolta_serve.commands.serve import serve as run

    threading.Thread(target=_end_with_starter, name="starter", daemon=True).start()
    loaded = Loaded(msgspec.json.decode(config, type=ServeConfig), {})
    try:
        return run(loaded, engine_command=(*PROGRAM, "engine", gate) if gate else COMMAND)
    except RevoltaError as error:
        print(f"revolta-serve: error: {error.message}", file=sys.stderr)
        return 2


def engine(path: str) -> int:
    """The engine process with rank 0 behind the gate at `path`; further ranks follow its plans and need none."""

    def load(config: ServeConfig, rank: int) -> worker.Steps:
        runner = worker.load_runner(config, rank)
        return GatedSteps(runner, Gate(path)) if rank == 0 else runner

    return process.main(load)


def _end_with_starter() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    sys.exit(engine(*arguments) if role == "engine" else serve(*arguments))
