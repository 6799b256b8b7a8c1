"""Servers for the http tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from support.script_engine import ScriptEngine, Server, serving
from support.text import byte_tokens, tokenizer

END = tokenizer().added["<|im_end|>"]


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """serve(engine, **api settings): a server of the test's own."""
    with ExitStack() as stack:

        def start(engine: ScriptEngine, **api: Any) -> Server:
            return stack.enter_context(serving(engine, **api))

        yield start


@pytest.fixture(scope="session")
def shared() -> Iterator[Server]:
    """One server for tests that only read: it answers everything with `ok`."""
    with serving(ScriptEngine([*byte_tokens("ok"), END])) as server:
        yield server
