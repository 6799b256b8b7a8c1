"""Memory that nobody wrote is NaN in the tests of this package."""

from collections.abc import Iterator

import pytest

from sm70kernels.testing import poisoned_memory


@pytest.fixture(autouse=True, scope="module")
def _unwritten_memory_is_nan() -> Iterator[None]:
    with poisoned_memory():
        yield
