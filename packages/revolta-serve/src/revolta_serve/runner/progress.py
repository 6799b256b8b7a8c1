"""Loading, made visible: a bar on a terminal, a line now and then in a log."""

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

log = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""


class LoadProgress:
    """Shows bytes read, rate and remaining time while it is entered; call it as the loader's progress callback.

    A load that ends within LINE_SECONDS leaves no line in a log.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> "LoadProgress":
        if sys.stderr.isatty():
            columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("load", total=None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, name: str) -> None:
        """Take note of `done` of `total` bytes; `name` is the parameter just filled."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if now - self._said >= LINE_SECONDS:
            self._said = now
            left = (now - self._began) * (total - done) / max(1, done)
            log.info("loading weights: %.1f of %.1f GiB, about %.0f s left, at %s", done / 2**30, total / 2**30, left, name)
