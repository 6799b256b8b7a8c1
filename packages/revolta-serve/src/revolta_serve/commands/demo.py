"""demo: a tiny checkpoint, a real server, one question over HTTP, and the numbers."""

import json
import tempfile
import time
from dataclasses import dataclass, replace

import httpx

from revolta_serve.commands.serve import serve
from revolta_serve.config import ServeConfig
from revolta_serve.errors import EngineError
from revolta_serve.profile import Loaded


@dataclass(slots=True)
class Answer:
    """What came back and when, in seconds since the question."""

    text: str = ""
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    finish: str = ""


def demo(loaded: Loaded, *, question: str, max_tokens: int, stay: bool) -> int:
    """Run the demo; returns the exit code."""
    from revolta_serve.weights.tiny import make_tiny

    with tempfile.TemporaryDirectory(prefix="revolta-demo-") as directory:
        began = time.perf_counter()
        model = make_tiny(directory)
        made = time.perf_counter() - began
        print(f"made a checkpoint with random weights in {made:.1f} s: {model.layers} layers, {model.experts} experts, {directory}")
        config = _config(loaded.config, directory)

        async def guest(url: str, seconds: float) -> None:
            answer = await ask(url, question, max_tokens)
            _report(answer, question, seconds)
            if stay:
                import asyncio

                print(f"\nstill serving {url}, model {config.served_names[0]}; interrupt to end")
                await asyncio.Event().wait()

        return serve(Loaded(config, loaded.sources), guest)


async def ask(url: str, question: str, max_tokens: int) -> Answer:
    """Ask one question as a streaming chat completion. Raises EngineError when the stream reports an error."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "seed": 1,
    }
    answer, began = Answer(), time.perf_counter()
    async with httpx.AsyncClient(timeout=120) as client, client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise EngineError(f"the server answered {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise EngineError(f"the stream reported: {event['error']['message']}")
            now = time.perf_counter() - began
            for choice in event["choices"]:
                delta = choice["delta"]
                text = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
                if text:
                    answer.first = answer.first or now
                    answer.last = now
                answer.text += text
                answer.finish = choice["finish_reason"] or answer.finish
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    return answer


def _config(config: ServeConfig, directory: str) -> ServeConfig:
    return replace(
        config,
        model=replace(config.model, path=directory, served_name=("tiny-flash-next",)),
        api=replace(config.api, port=0, log_level="warning"),
    )


def _report(answer: Answer, question: str, seconds: float) -> None:
    print(f"\nquestion: {question}\nanswer:   {answer.text!r}\n")
    print(f"load {seconds:.1f} s | first token {1000 * answer.first:.0f} ms", end="")
    if answer.tokens > 1 and answer.last > answer.first:
        step = (answer.last - answer.first) / (answer.tokens - 1)
        print(f" | {1 / step:.0f} tokens/s | {1000 * step:.1f} ms/step", end="")
    print(f" | {answer.tokens} tokens, finish {answer.finish}")
    print(
        "Random weights print noise. What this shows: the real architecture, loaded from safetensors, scheduled, sampled and streamed "
        "by the same server that serves the real model."
    )
