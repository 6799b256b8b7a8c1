"""The OpenAI client against real servers: sync and async, chat and completions, streaming and not say one thing, byte for byte."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from revolta_serve.testing import RunningServer, running_server, scripted_checkpoint
from revolta_serve.weights.tiny import make_tiny
from support.wire import metrics, wait_until_idle

FAMILY = "👨\u200d👩\u200d👧"
REASONING = f"Hmm, {FAMILY} or \u00e9?\n"
"""é is two bytes here and e with an accent of two bytes below; the family is five characters of 18 bytes."""
CONTENT = f"So: 🙂 cafe\u0301{FAMILY}! HALTED by HALF a word."
SCRIPT = f"{REASONING}</think>\n\n{CONTENT}"
PROMPT = "Say it:"
MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass
class Choice:
    """One choice, however it came."""

    content: str = ""
    reasoning: str = ""
    finish: str = ""
    stop: str | int | None = None
    tokens: list[int] = field(default_factory=list)

    def add(self, part: Any) -> None:
        """A choice of a whole answer or of a chunk, of chat or completions."""
        message = getattr(part, "message", None) or getattr(part, "delta", None)
        self.content += (part.text if message is None else message.content) or ""
        self.reasoning += getattr(message, "reasoning", None) or ""
        self.tokens += getattr(part, "token_ids", None) or []
        self.finish = part.finish_reason or self.finish
        self.stop = getattr(part, "stop_reason", None) or self.stop


@dataclass
class Said:
    """Every choice by its index, and the counts."""

    choices: dict[int, Choice]
    usage: Any
    chunks: int


def fold(pieces: list[Any]) -> Said:
    """A whole answer (one piece) or the chunks of a stream."""
    choices: dict[int, Choice] = {}
    for piece in pieces:
        for part in piece.choices:
            choices.setdefault(part.index, Choice()).add(part)
    return Said(choices, pieces[-1].usage, len(pieces))


async def ask(server: RunningServer, *, stream: bool, **fields: Any) -> Said:
    """By the asynchronous client: chat if there are messages, else a completion."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        create: Any = client.chat.completions.create if "messages" in fields else client.completions.create
        answer = await create(**common(stream), **fields)
        return fold([piece async for piece in answer] if stream else [answer])


def ask_sync(server: RunningServer, *, stream: bool, **fields: Any) -> Said:
    """By the synchronous client."""
    http = openai.DefaultHttpxClient(verify=False)  # reading certificates takes longer than most requests here
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        create: Any = client.chat.completions.create if "messages" in fields else client.completions.create
        answer = create(**common(stream), **fields)
        return fold(list(answer) if stream else [answer])


def ask_async(server: RunningServer, *, stream: bool, **fields: Any) -> Said:
    """By the asynchronous client, in a loop of its own."""
    return asyncio.run(ask(server, stream=stream, **fields))


def common(stream: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {"model": "said", "extra_body": {"return_token_ids": True}, **options}


@dataclass
class Scripted:
    """A server whose answer is SCRIPT, in the tokens `emitted`."""

    server: RunningServer
    emitted: list[int]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    directory = tmp_path_factory.mktemp("scripted")
    emitted = scripted_checkpoint(directory, SCRIPT, prompts=[PROMPT], bytewise=True)
    with running_server(directory, {"model.served_name": ("said",)}) as server:
        yield Scripted(server, list(emitted))


ROUTES: dict[str, tuple[dict[str, Any], str, str]] = {
    "thinking": ({"messages": MESSAGES, "reasoning_effort": "high"}, REASONING, CONTENT),
    "not thinking": ({"messages": MESSAGES, "reasoning_effort": "none"}, "", SCRIPT),
    "completions": ({"prompt": PROMPT, "max_tokens": 500}, "", SCRIPT),
}


@pytest.mark.parametrize("asker", [ask_sync, ask_async])
@pytest.mark.parametrize("route", ROUTES)
def test_every_way_of_asking_gets_the_script(scripted: Scripted, asker: Callable[..., Said], route: str) -> None:
    fields, reasoning, content = ROUTES[route]
    n = 1 if route == "thinking" else 2
    whole = asker(scripted.server, stream=False, n=n, **fields)
    streamed = asker(scripted.server, stream=True, n=n, **fields)
    assert whole.choices == {index: Choice(content, reasoning, "stop", None, scripted.emitted) for index in range(n)}
    assert (streamed.choices, streamed.usage) == (whole.choices, whole.usage)
    assert whole.usage.completion_tokens == n * len(scripted.emitted)
    assert streamed.chunks > n * len(SCRIPT) // 2, "it really came in pieces"


STOPS: dict[str, tuple[list[str], str, str | None]] = {
    "at once": (["HALT"], CONTENT.partition("HALT")[0], "HALT"),
    "a prefix first": (["HALF a"], CONTENT.partition("HALF a")[0], "HALF a"),
    "the earliest end": (["LTED b", "ED", "HALTED"], CONTENT.partition("HALTED")[0], "HALTED"),
    "inside the family": (["\u200d👩"], CONTENT.partition("\u200d👩")[0], "\u200d👩"),
    "never": (["HALT!", "HALF A"], CONTENT, None),
    "only in the reasoning": (["Hmm"], CONTENT, None),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_strings(scripted: Scripted, name: str) -> None:
    stops, content, matched = STOPS[name]

    async def both() -> list[Said]:
        fields = {"messages": MESSAGES, "reasoning_effort": "high", "stop": stops}
        return await asyncio.gather(*(ask(scripted.server, stream=stream, **fields) for stream in (False, True)))

    whole, streamed = asyncio.run(both())
    said = whole.choices[0]
    assert (said.content, said.reasoning, said.finish, said.stop) == (content, REASONING, "stop", matched)
    assert said.tokens == scripted.emitted[: len(said.tokens)]
    assert (len(said.tokens) < len(scripted.emitted)) == (matched is not None)
    assert (streamed.choices, streamed.usage) == (whole.choices, whole.usage)
    wait_until_idle(scripted.server.url)


@pytest.mark.parametrize("length", [1, 7, 8, 40])
def test_cut_by_max_tokens(scripted: Scripted, length: int) -> None:
    """Wherever it cuts, inside a character too: complete characters, then at most one replacement character."""
    whole = ask_sync(scripted.server, stream=False, prompt=PROMPT, max_tokens=length).choices[0]
    assert (whole.finish, whole.tokens) == ("length", scripted.emitted[:length])
    assert SCRIPT.startswith(whole.content.removesuffix("\ufffd"))
    assert ask_sync(scripted.server, stream=True, prompt=PROMPT, max_tokens=length).choices[0] == whole


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("tiny")
    make_tiny(directory, layers=4, seed=3)
    settings = {"model.served_name": ("said",), "schedule.max_num_seqs": 4, "schedule.max_num_batched_tokens": 192}
    with running_server(directory, settings) as server:
        yield server


def random(**fields: Any) -> dict[str, Any]:
    """A sampled completion of 12 tokens."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 12}
    return {"prompt": "Once", **sampling, **fields}


def texts(server: RunningServer, **fields: Any) -> list[list[int]]:
    said = ask_sync(server, stream=False, **random(**fields))
    return [said.choices[index].tokens for index in sorted(said.choices)]


def test_seeds(tiny: RunningServer) -> None:
    alone = texts(tiny, seed=7)
    assert texts(tiny, seed=7) == alone
    assert texts(tiny, seed=8) != alone
    three = texts(tiny, seed=7, n=3)
    assert three[0] == alone[0], "a choice does not depend on how many there are"
    assert len(set(map(tuple, three))) == 3
    assert texts(tiny, seed=7, n=3) == three
    assert texts(tiny) != texts(tiny), "without a seed"
    assert texts(tiny, temperature=0) == texts(tiny, temperature=0, seed=9)


def test_concurrent_requests_equal_the_same_requests_alone(tiny: RunningServer) -> None:
    """More than fit at once, prompts longer than a step takes, both forms and both routes mixed."""
    requests: list[dict[str, Any]] = [random(prompt=[5 + n] * (1 + 61 * n), seed=n, stream=n % 2 == 0) for n in range(5)]
    plain = {name: value for name, value in random().items() if name != "prompt"}
    requests += [{**plain, "messages": [{"role": "user", "content": f"{n}"}], "seed": n, "stream": n % 2 == 0, "n": 2} for n in range(3)]

    async def together() -> list[Said]:
        return await asyncio.gather(*(ask(tiny, **request) for request in requests))

    counts = [metrics(tiny.url)]
    alone = [ask_async(tiny, **request) for request in requests]
    counts.append(metrics(tiny.url))
    crowd = asyncio.run(together())
    counts.append(metrics(tiny.url))
    assert [(said.choices, said.usage.total_tokens) for said in crowd] == [(said.choices, said.usage.total_tokens) for said in alone]
    steps, tokens = (
        [later[name] - sooner[name] for sooner, later in pairwise(counts)] for name in ("engine_steps_total", "generation_tokens_total")
    )
    assert steps[1] < 0.6 * steps[0], f"steps alone and together: {steps}; requests did share them"
    assert tokens[0] == tokens[1] == sum(len(choice.tokens) for said in alone for choice in said.choices.values())
