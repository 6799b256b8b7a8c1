"""What a request leaves behind is freed with its answer: nothing of it waits, prompt and all, for a collection of cycles."""

import gc
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from support.script_engine import ScriptEngine, Server, wait_for
from support.text import byte_tokens
from support.wire import Wire

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi " * 20}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES}),
    "chat with thinking": (CHAT, {"messages": MESSAGES, "reasoning_effort": "high", "logprobs": True}),
    "completion": (COMPLETIONS, {"prompt": "x"}),
    "choices": (COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "temperature": 1, "logprobs": 2}),
    "stop string": (COMPLETIONS, {"prompt": "x", "stop": "ba", "max_tokens": 100}),
}


def finish(server: Server, path: str, fields: dict[str, Any]) -> int:
    with Wire(server.url, path, fields) as wire:
        wire.finish()
        return wire.status


def leave(server: Server, path: str, fields: dict[str, Any]) -> None:
    engine = server.engine
    count = len(engine.requests)
    with Wire(server.url, path, {**fields, "max_tokens": 400, "stop": None}) as wire:
        wait_for(lambda: len(engine.requests) > count and bool(engine.running))
        if fields["stream"]:
            wire.receive_until(b"data: ")
    wait_for(lambda: not engine.running)


def garbage(act: Callable[[], object]) -> Counter[str]:
    """Objects of the server, and frames, that only a collection frees after `act`, by type."""
    act()  # what is made once and kept
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(3):
            act()
        gc.collect()
        kept = [type(item) for item in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()
    return Counter(kind.__name__ for kind in kept if kind.__module__.startswith(("revolta_serve", "jinja2")) or kind is types.FrameType)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("ending", [finish, leave])
def test_nothing_waits_for_a_collection(serve: Callable[..., Server], name: str, stream: bool, ending: Callable[..., object]) -> None:
    path, fields = REQUESTS[name]
    server = serve(ScriptEngine(byte_tokens("ab"), endless=True, delay=0.001))
    assert not garbage(lambda: ending(server, path, {"max_tokens": 8, **fields, "stream": stream}))


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"max_tokens": 9999}, {"temperature": "hot"}])
def test_nor_after_a_refusal(shared: Server, fields: dict[str, Any]) -> None:
    def refused() -> None:
        assert finish(shared, COMPLETIONS, {"prompt": "x", **fields}) == 400

    assert not garbage(refused)


def test_a_cycle_is_found() -> None:
    class Kept:
        """Keeps itself."""

        __module__ = "revolta_serve.made.up"

        def __init__(self) -> None:
            self.itself = self

    assert garbage(Kept) == {"Kept": 3}
