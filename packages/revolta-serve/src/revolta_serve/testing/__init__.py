"""Helpers for tests of the server and of programs that talk to it.

Names are imported when they are used: a server under test must not load torch only because its helper writes checkpoints.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revolta_serve.testing.scripted import scripted_checkpoint
    from revolta_serve.testing.server import RunningServer, running_server

__all__ = ["RunningServer", "running_server", "scripted_checkpoint"]

_HOMES = {"RunningServer": "server", "running_server": "server", "scripted_checkpoint": "scripted"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
