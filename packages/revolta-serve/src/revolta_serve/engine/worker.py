"""A rank behind a channel: the runner's start-up report first, then a result for every plan."""

import gc
from collections.abc import Callable
from typing import Protocol

from revolta_serve.config import ServeConfig
from revolta_serve.engine.channel import Channel, LocalChannel
from revolta_serve.types import StartupReport, StepPlan, StepResult


class Steps(Protocol):
    """What the engine needs of a runner."""

    @property
    def report(self) -> StartupReport:
        """What was loaded and allocated."""

    def step(self, plan: StepPlan) -> StepResult:
        """Execute a plan."""


GC_ALLOCATIONS = 20_000
"""Allocations between two collections of the youngest generation in a rank; Python's own default is 700."""

Load = Callable[[ServeConfig, int], Steps]
"""Loads a rank. Raises RevoltaError for whatever the user can mend."""


def load_runner(config: ServeConfig, rank: int) -> Steps:
    """The real one: imports torch, so not before it is needed."""
    from revolta_serve.runner.progress import LoadProgress
    from revolta_serve.runner.runner import Runner

    if rank:
        runner = Runner.load(config, rank)
    else:
        with LoadProgress() as progress:
            runner = Runner.load(config, rank, progress)
    # What is loaded stays, and a step makes thousands of short-lived arrays: collections that look for cycles among all of it took
    # a tenth of a tiny model's decode step.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS)
    return runner


def local(runner: Steps) -> LocalChannel:
    """Rank 0, in the engine's own process and thread."""
    return LocalChannel(runner.step)


def serve(runner: Steps, channel: Channel) -> None:
    """Another rank, in its own process: execute plans until the process ends. Only rank 0's results are read, so none is sent."""
    channel.send(runner.report)
    while True:
        runner.step(channel.receive(StepPlan))
