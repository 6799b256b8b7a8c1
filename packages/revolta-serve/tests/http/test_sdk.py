"""The OpenAI client, sync and async, streaming and not: one answer, byte for byte."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import openai
import pytest

from revolta_serve.text.reasoning import ThinkTokens
from support.script_engine import ScriptEngine, Server, wait_for
from support.text import byte_tokens, tokenizer

END = tokenizer().added["<|im_end|>"]
THINK = ThinkTokens(tokenizer())
FAMILY = "👨‍👩‍👧"
SCRIPTS = {
    "content": [*byte_tokens(f"plain {FAMILY} é"), END],
    "reasoning": [*byte_tokens(f"hm {FAMILY}\n"), THINK.close, *byte_tokens(f"\n\nSo: 🙂{FAMILY}. STOP it"), END],
    "invalid": [*byte_tokens(b"a\xff\xf0\x9fb"), END],
}
Folded = dict[int, tuple[str, str, Any, Any]]


def folded(chunks: list[Any], chat: bool) -> Folded:
    """(content, reasoning, finish_reason, stop_reason) of every choice of a stream."""
    content: dict[int, str] = defaultdict(str)
    reasoning: dict[int, str] = defaultdict(str)
    ends: dict[int, tuple[Any, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            if chat:
                content[choice.index] += choice.delta.content or ""
                reasoning[choice.index] += getattr(choice.delta, "reasoning", None) or ""
            else:
                content[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = (choice.finish_reason, choice.stop_reason)
    return {index: (content[index], reasoning[index], *ends[index]) for index in ends}


def whole(answer: Any, chat: bool) -> Folded:
    if not chat:
        return {c.index: (c.text, "", c.finish_reason, c.stop_reason) for c in answer.choices}
    return {c.index: (c.message.content or "", c.message.reasoning or "", c.finish_reason, c.stop_reason) for c in answer.choices}


def ask(url: str, chat: bool, **fields: Any) -> tuple[Any, list[Any]]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        create: Any = client.chat.completions.create if chat else client.completions.create
        return create(**fields), list(create(stream=True, stream_options={"include_usage": True}, **fields))


def ask_async(url: str, chat: bool, **fields: Any) -> tuple[Any, list[Any]]:
    async def run() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            create: Any = client.chat.completions.create if chat else client.completions.create
            answer = await create(**fields)
            stream = await create(stream=True, stream_options={"include_usage": True}, **fields)
            return answer, [chunk async for chunk in stream]

    return asyncio.run(run())


@pytest.mark.parametrize("asker", [ask, ask_async])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("group", [1, 4])
def test_streaming_equals_not_streaming(serve: Callable[..., Server], asker: Callable[..., Any], chat: bool, name: str, group: int) -> None:
    server = serve(ScriptEngine(SCRIPTS[name], group=group))
    fields: dict[str, Any] = {"model": "tiny", "n": 2, "stop": ["STOP"], "max_tokens": 100}
    if chat:
        fields |= {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "high" if name == "reasoning" else "none"}
    else:
        fields |= {"prompt": "hi"}
    answer, chunks = asker(server.url, chat, **fields)
    expected = whole(answer, chat)
    assert folded(chunks, chat) == expected
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    content, reasoning, finish, stop = expected[0]
    assert expected[1] == expected[0]
    if name == "reasoning":
        assert (finish, stop) == ("stop", "STOP")
        assert content.endswith(f"So: 🙂{FAMILY}. ")
        assert reasoning == (f"hm {FAMILY}\n" if chat else "")
        assert answer.usage.completion_tokens == 2 * (SCRIPTS[name].index(byte_tokens("P")[0]) + 1)
    else:
        assert (finish, stop, reasoning) == ("stop", None, "")
        assert content == (f"plain {FAMILY} é" if name == "content" else "a\ufffd\ufffdb")
    wait_for(lambda: not server.engine.running)


@pytest.mark.parametrize("asker", [ask, ask_async])
def test_logprobs_of_a_chat(serve: Callable[..., Server], asker: Callable[..., Any]) -> None:
    server = serve(ScriptEngine(SCRIPTS["reasoning"]))
    messages = [{"role": "user", "content": "hi"}]
    fields: dict[str, Any] = {"model": "tiny", "messages": messages, "reasoning_effort": "high", "stop": ["STOP"], "max_tokens": 100}
    answer, chunks = asker(server.url, True, logprobs=True, top_logprobs=2, n=2, **fields)
    for choice in answer.choices:
        content = choice.logprobs.content
        assert choice.logprobs.refusal is None
        assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
        streamed = [
            entry
            for chunk in chunks
            for part in chunk.choices
            if part.index == choice.index and part.logprobs is not None
            for entry in part.logprobs.content
        ]
        assert streamed == content
        for entry in content:
            assert entry.token == bytes(entry.bytes).decode(errors="replace")
            assert len(entry.top_logprobs) in (2, 3)
            assert [other.logprob for other in entry.top_logprobs] == sorted((other.logprob for other in entry.top_logprobs), reverse=True)
            assert (entry.token, entry.logprob) in [(other.token, other.logprob) for other in entry.top_logprobs]


@pytest.mark.parametrize("asker", [ask, ask_async])
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_of_a_completion(serve: Callable[..., Server], asker: Callable[..., Any], echo: bool) -> None:
    server = serve(ScriptEngine(SCRIPTS["content"]))
    answer, chunks = asker(server.url, False, model="tiny", prompt="the hi", logprobs=2, echo=echo, n=2, max_tokens=100)
    for choice in answer.choices:
        told = choice.logprobs
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
        for token, offset in zip(told.tokens[:-1], told.text_offset, strict=False):
            assert "\ufffd" in token or choice.text[offset:].startswith(token)
        assert told.tokens[-1] == "<|im_end|>"
        assert (told.token_logprobs[0] is None) == echo
        parts = [part.logprobs for chunk in chunks for part in chunk.choices if part.index == choice.index]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for part in parts for item in getattr(part, name)] == getattr(told, name)


def test_the_same_bytes_for_every_grouping(serve: Callable[..., Server]) -> None:
    bodies = set()
    for group in (1, 2, 3, 50):
        server = serve(ScriptEngine(SCRIPTS["reasoning"], group=group))
        answer = server.chat(max_tokens=100, reasoning_effort="high", return_token_ids=True).json()
        bodies.add(str([answer["choices"], answer["usage"], answer["prompt_token_ids"]]))
    assert len(bodies) == 1


def test_the_client_raises_its_own_errors(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([END]), keys=("right",))
    wrong_key = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with wrong_key as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "other"]
        assert client.models.retrieve("other").id == "other"
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="absent", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="tiny", prompt=[1] * 512)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(model="tiny", prompt="x", temperature=-1)
        assert wrong.value.param == "temperature"
