"""The engine process and the processes of further ranks: python -m revolta_serve.engine.process, started by engine.client."""

import logging
import os
import signal
import sys
import time
from typing import Any

import msgspec
import zmq

from revolta_serve.cache.capacity import capacity
from revolta_serve.engine import worker
from revolta_serve.engine.channel import Channel, ProcessChannel, Sender
from revolta_serve.engine.core import EngineCore, limits
from revolta_serve.engine.messages import Event, Failed, Heartbeat, LaunchSpec, Ready
from revolta_serve.engine.service import Service
from revolta_serve.engine.supervise import Watch, die_with_parent, end, read_spec, spawn
from revolta_serve.errors import EngineError, RevoltaError
from revolta_serve.logs import configure
from revolta_serve.memory import resident_bytes
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.types import StartupReport

log = logging.getLogger(__name__)


def main(load: worker.Load = worker.load_runner) -> int:
    """Run the role that standard input asks for; returns the exit code."""
    spec = read_spec()
    die_with_parent(spec.parent)
    # A terminal sends its interrupt to every process of the group; only the api process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure(spec.config.api, f"engine[{spec.rank}]")
    return _Engine(spec).run(load) if spec.rank == 0 else _further_rank(spec, load)


def sockets(folder: str, rank: int = 0) -> tuple[str, str]:
    """Paths of the sockets of a child: where it receives, where its parent receives from it."""
    return os.path.join(folder, f"down{rank}"), os.path.join(folder, f"up{rank}")


def _further_rank(spec: LaunchSpec, load: worker.Load) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Watch(interval=60).start()
    down, up = sockets(spec.folder, spec.rank)
    channel = ProcessChannel(zmq.Context(), out=up, into=down)
    try:
        worker.serve(load(spec.config, spec.rank), channel)
    except Exception:
        log.exception("rank %d ends", spec.rank)
    # The groups of other ranks may be waiting for this one: end without asking them.
    os._exit(1)


class _Words:
    """What the watching thread says to the api process: signs of life, and the last words, which are flushed before the end."""

    def __init__(self, path: str) -> None:
        # A context of its own: ending it waits for this socket's messages only.
        self._context: zmq.Context[Any] = zmq.Context()
        self._out = Sender(self._context, path)
        self._out.wait()

    def send(self, message: Event) -> None:
        self._out.send(message)

    def last(self, reason: str) -> None:
        self.send(Failed(reason))
        self.close()

    def close(self) -> None:
        self._out.close(0.5)
        self._context.term()


class _Engine:
    """The engine process: its ranks, its core, and the thread that watches over them."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec, self.config = spec, spec.config
        self.context: zmq.Context[Any] = zmq.Context()
        down, up = sockets(spec.folder)
        self.api = ProcessChannel(self.context, out=up, into=down)
        self.words = _Words(up)
        self.core: EngineCore | None = None
        ranks = range(1, self.config.parallel.tensor)
        self.children = {rank: spawn(msgspec.structs.replace(spec, rank=rank, parent=os.getpid())) for rank in ranks}
        self.channels: list[Channel] = []
        self.watch = Watch(
            interval=self.config.engine.heartbeat_interval,
            children=self.children,
            beat=self._beat,
            step_age=self._step_age,
            step_timeout=self.config.engine.step_timeout,
            last_words=self.words.last,
        )

    def run(self, load: worker.Load) -> int:
        self.watch.start()
        code = 1
        try:
            reports = self._start(load)
            assert self.core is not None
            service = Service(self.core, self.api, admission_window=self.config.schedule.admission_window_ms / 1000)
            signal.signal(signal.SIGTERM, lambda *_: service.drain(self.config.api.shutdown_timeout))
            self.api.send(Ready(reports, self.core.status))
            code = service.run()
        except RevoltaError as error:
            log.error("%s", error.message)
            self.api.send(Failed(error.message))
        except Exception as error:
            log.exception("the engine ends")
            self.api.send(Failed(f"{type(error).__name__}: {error}"))
        finally:
            self.watch.stop()
            end(list(self.children.values()))
            for channel in (*self.channels, self.api):
                channel.close()
            self.words.close()
            self.context.term()
        return code

    def _start(self, load: worker.Load) -> tuple[StartupReport, ...]:
        """Load rank 0 here, wait for the other ranks' reports, and make the core."""
        model = ModelConfig.load(self.config.model.path)
        planned = capacity(self.config, model)
        remote = []
        for rank in self.children:
            down, up = sockets(self.spec.folder, rank)
            remote.append(ProcessChannel(self.context, out=down, into=up))
        self.channels += remote
        runner = load(self.config, 0)
        reports = [runner.report, *(channel.receive(StartupReport) for channel in remote)]
        for report in reports:
            made, wanted = (report.num_blocks, report.num_slots), (planned.num_blocks, planned.num_slots)
            if made != wanted:
                raise EngineError(f"rank {report.rank} has (blocks, slots) {made}, the plan says {wanted}")
            if report.fingerprint != reports[0].fingerprint:
                raise EngineError(
                    f"rank {report.rank} has loaded a checkpoint with fingerprint {report.fingerprint}, rank 0 one with "
                    f"{reports[0].fingerprint}: the files in {self.config.model.path} were replaced while they were loaded; start again"
                )
        for channel in remote:
            channel.wait()  # from here on the files of the sockets are not needed
        scheduler = Scheduler(limits(self.config, model, planned, domain=reports[0].fingerprint))
        self.core = EngineCore(scheduler, [worker.local(runner), *remote], audit_steps=self.config.schedule.audit_steps)
        return tuple(reports)

    def _beat(self) -> None:
        if self.core is not None:
            self.core.rss_bytes = resident_bytes()
            self.words.send(Heartbeat(self.core.rss_bytes))

    def _step_age(self) -> float:
        began = self.core.step_began if self.core is not None else 0.0
        return time.monotonic() - began if began else 0.0


if __name__ == "__main__":
    sys.exit(main())
