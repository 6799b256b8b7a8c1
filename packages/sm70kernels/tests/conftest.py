"""Memory that nobody wrote is NaN in the tests of this package; what the emulator ran is told at the end."""

from collections.abc import Iterator

import pytest

from sm70kernels.backends import budget
from sm70kernels.testing import poisoned_memory


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory_is_nan() -> Iterator[None]:
    with poisoned_memory():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if budget.launches:
        terminalreporter.write_line(str(budget))
