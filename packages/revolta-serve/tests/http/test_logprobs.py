"""Logprobs in answers: beside the text they belong to, in the shape of each route, streamed and not alike."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.types import LOGPROB_FLOOR, GenerateRequest, TokenLogprobs
from support.refusals import CHAT, COMPLETIONS, body
from support.script_engine import ScriptEngine, Server, data_lines, scripted_logprobs
from support.text import byte_tokens, tokenizer

END = tokenizer().added["<|im_end|>"]
THINK = ThinkTokens(tokenizer())
TEXT = "so é🙂!"
PLAIN = [*byte_tokens(TEXT), END]
REASONED = [*byte_tokens("hm🙂"), THINK.close, *byte_tokens(f"\n\n{TEXT} STOP"), END]


def name(token: int) -> str:
    return tokenizer().decode([token])


def raw(token: int) -> list[int]:
    return list(tokenizer().token_bytes(token))


def chat_entry(token: int, count: int) -> dict[str, Any]:
    """What a chat says of a token: the scripted one is the most likely, or unlikelier than all that are told."""
    known = scripted_logprobs(token, count)
    likely = [*known.top] if any(other == token for other, _ in known.top) else [*known.top, (token, known.logprob)]
    top = [{"token": name(other), "logprob": value, "bytes": raw(other)} for other, value in likely] if count else []
    return {"token": name(token), "logprob": known.logprob, "bytes": raw(token), "top_logprobs": top}


@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_a_chat(serve: Callable[..., Server], count: int) -> None:
    choice = serve(ScriptEngine(PLAIN)).chat(logprobs=True, top_logprobs=count).json()["choices"][0]
    assert choice["message"]["content"] == TEXT
    assert choice["logprobs"] == {"content": [chat_entry(token, count) for token in PLAIN[:-1]], "refusal": None}
    for entry in choice["logprobs"]["content"]:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert not count or entry["logprob"] in values
    assert bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]).decode() == TEXT


def test_without_being_asked(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(PLAIN))
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        answer = server.chat(**fields).json()
        assert answer["choices"][0]["logprobs"] is None
        assert "prompt_logprobs" not in answer
        assert '"logprobs":{' not in server.chat(stream=True, **fields).text
    choice = server.complete().json()["choices"][0]
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in choice


def streamed(server: Server, path: str, **fields: Any) -> tuple[dict[int, str], dict[int, Any], list[Any]]:
    """(content, logprobs) of every choice of a stream, and its choices as they came."""
    chunks = [json.loads(line) for line in data_lines(server.post(path, body(path, stream=True, **fields)).text)[:-1]]
    content: dict[int, str] = defaultdict(str)
    logprobs: dict[int, Any] = {}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in choices:
        index = choice["index"]
        content[index] += choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        if choice["logprobs"] is not None:
            seen = logprobs.setdefault(index, {key: value if value is None else [] for key, value in choice["logprobs"].items()})
            for key, value in choice["logprobs"].items():
                if value is not None:
                    seen[key] += value
    return content, logprobs, choices


ASKED: list[dict[str, Any]] = [
    {},
    {"stop": "STOP"},
    {"stop": "🙂"},
    {"max_tokens": 14},
    {"max_tokens": 6},
    {"reasoning_effort": "high"},
    {"reasoning_effort": "high", "stop": "STOP"},
    {"reasoning_effort": "high", "max_tokens": 5},
    {"reasoning_effort": "high", "include_reasoning": False, "n": 2},
]


@pytest.mark.parametrize("group", [1, 2, 3, 50])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_what_the_whole_says(serve: Callable[..., Server], group: int, path: str) -> None:
    server = serve(ScriptEngine(REASONED, group=group))
    for fields in ASKED:
        asked = {"max_tokens": 50, **fields, **({"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2})}
        whole = server.post(path, body(path, **asked)).json()["choices"]
        content, logprobs, choices = streamed(server, path, **asked)
        for choice in whole:
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert content[choice["index"]] == (text or "")
            assert logprobs.get(choice["index"], {"content": [], "refusal": None}) == choice["logprobs"]
        if path == COMPLETIONS:
            continue
        for choice in choices:
            assert (choice["logprobs"] is not None) == bool(choice["delta"].get("content"))
        for choice in whole:
            told = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
            assert told.decode(errors="replace") == (choice["message"]["content"] or ""), "reasoning is not told of"


def text_logprobs(tokens: list[int], count: int, start: int = 0) -> dict[str, Any]:
    """What a completion says of tokens that begin at a character of its text."""
    known = [scripted_logprobs(token, count) for token in tokens]
    offsets = [len(tokenizer().decode(tokens[:number]).rstrip("\ufffd")) + start for number in range(len(tokens))]
    top = []
    for entry in known:
        names: dict[str, float] = {}
        for token, value in [*entry.top, (entry.token, entry.logprob)]:
            names.setdefault(name(token), value)
        top.append(names)
    return {
        "tokens": [name(token) for token in tokens],
        "token_logprobs": [entry.logprob for entry in known],
        "top_logprobs": top,
        "text_offset": offsets,
    }


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_completion(serve: Callable[..., Server], count: int) -> None:
    """Its last token is told of, though its text is not shown: who adds logprobs up needs it."""
    choice = serve(ScriptEngine(PLAIN)).complete(logprobs=count).json()["choices"][0]
    assert choice["text"] == TEXT
    assert choice["logprobs"] == text_logprobs(PLAIN, count)


PROMPT = [THINK.open, *byte_tokens("é?"), *tokenizer().encode("the other")]
"""A special token, and one character in two tokens."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"n": 2, "temperature": 0}, {"stop": "🙂"}])
def test_an_echo(serve: Callable[..., Server], stream: bool, fields: dict[str, Any]) -> None:
    server = serve(ScriptEngine(PLAIN))
    text = tokenizer().decode(PROMPT)
    asked = {"prompt": PROMPT, "echo": True, "logprobs": 3, **fields}
    if stream:
        content, logprobs, choices = streamed(server, COMPLETIONS, **asked)
        assert [len(choice["logprobs"]["tokens"]) > 1 for choice in choices].count(True) >= fields.get("n", 1)
    else:
        answer = server.complete(**asked).json()["choices"]
        content = {choice["index"]: choice["text"] for choice in answer}
        logprobs = {choice["index"]: choice["logprobs"] for choice in answer}
    shown = TEXT.partition("🙂")[0] if "stop" in fields else TEXT
    prompt, generated = text_logprobs(PROMPT, 3), text_logprobs(byte_tokens(shown) if "stop" in fields else PLAIN, 3, len(text))
    prompt["token_logprobs"][0] = prompt["top_logprobs"][0] = None
    assert set(content) == set(range(fields.get("n", 1)))
    for index in content:
        assert content[index] == text + shown
        assert logprobs[index] == {key: prompt[key] + generated[key] for key in prompt}


def test_an_echo_without_logprobs(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(PLAIN))
    for prompt, texts in (("hi <|im_end|>\n", ["hi <|im_end|>\n"]), (["a", "b"], ["a", "b"]), (PROMPT, [tokenizer().decode(PROMPT)])):
        answer = server.complete(prompt=prompt, echo=True, n=2).json()["choices"]
        assert [choice["text"] for choice in answer] == [text + TEXT for text in texts for _ in range(2)]
        assert {choice["logprobs"] for choice in answer} == {None}
        assert streamed(server, COMPLETIONS, prompt=prompt, echo=True, n=2)[0] == dict(enumerate(choice["text"] for choice in answer))
    cut = server.complete(prompt=PROMPT, echo=True, truncate_prompt_tokens=2).json()["choices"][0]["text"]
    assert cut == tokenizer().decode(PROMPT[-2:]) + TEXT
    empty = serve(ScriptEngine([END]))
    assert streamed(empty, COMPLETIONS, prompt="hi", echo=True)[0] == {0: "hi"}


def test_one_token_of_prompt_and_one_of_answer(serve: Callable[..., Server]) -> None:
    """How likelihoods of given texts are read: everything but the last entry belongs to the text."""
    server = serve(ScriptEngine([END]))
    logprobs = server.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=1).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][1:-1] == [scripted_logprobs(token, 1).logprob for token in PROMPT[1:]]
    alone = server.complete(prompt=[7], echo=True, logprobs=1, max_tokens=1).json()["choices"][0]["logprobs"]
    assert (alone["token_logprobs"][0], len(alone["tokens"])) == (None, 2)


def prompt_entries(ids: Any, count: int) -> list[Any]:
    entries: list[Any] = [None]
    for token in ids[1:]:
        known = scripted_logprobs(token, count)
        entry = {
            str(other): {"logprob": value, "rank": rank, "decoded_token": name(other)} for rank, (other, value) in enumerate(known.top, 1)
        }
        entry[str(token)] = {"logprob": known.logprob, "rank": known.rank, "decoded_token": name(token)}
        entries.append(entry)
    return entries


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("n", [1, 2])
def test_prompts(serve: Callable[..., Server], count: int, n: int) -> None:
    server = serve(ScriptEngine(PLAIN))
    answer = server.chat(prompt_logprobs=count, n=n).json()
    assert answer["prompt_logprobs"] == prompt_entries(server.engine.requests[0].prompt, count)
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [9], [10, 11]]
    choices = server.complete(prompt=prompts, prompt_logprobs=count, n=n).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [prompt_entries(ids, count) for ids in prompts for _ in range(n)]
    asked = [request.sampling.prompt_logprobs for request in server.engine.requests]
    assert asked == ([count] + [-1] * (n - 1)) * 4, "once for each prompt"


def test_each_field_gets_what_it_asks_for(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(PLAIN))
    for echoed, told in ((1, 4), (4, 1)):
        choice = server.complete(prompt=PROMPT, echo=True, logprobs=echoed, prompt_logprobs=told).json()["choices"][0]
        assert choice["prompt_logprobs"] == prompt_entries(PROMPT, told)
        assert choice["logprobs"]["top_logprobs"][1:] == text_logprobs([*PROMPT, *PLAIN], echoed)["top_logprobs"][1:]


def test_ids_for_texts(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(PLAIN))
    for path, asked in ((CHAT, {"logprobs": True, "top_logprobs": 2}), (COMPLETIONS, {"logprobs": 2, "echo": True, "prompt": [5, 6]})):
        fields = body(path, return_tokens_as_token_ids=True, **asked)
        told = server.post(path, fields).json()["choices"][0]["logprobs"]
        if path == CHAT:
            assert [entry["token"] for entry in told["content"]] == [f"token_id:{token}" for token in PLAIN[:-1]]
            assert [entry["bytes"] for entry in told["content"]] == [raw(token) for token in PLAIN[:-1]]
            assert told["content"][0]["top_logprobs"][0]["token"] == f"token_id:{scripted_logprobs(PLAIN[0], 1).top[0][0]}"
        else:
            assert told["tokens"] == [f"token_id:{token}" for token in (5, 6, *PLAIN)]
            assert all(len(top) == len({*top}) >= 2 for top in told["top_logprobs"][1:])
        assert streamed(server, path, return_tokens_as_token_ids=True, **asked)[1][0] == told


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30, math.inf])
def test_what_json_cannot_express(serve: Callable[..., Server], value: float) -> None:
    def broken(token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(token, value, 600, ((token + 1, -0.5), (token + 2, value))[:count])

    server = serve(ScriptEngine(byte_tokens("ab"), logprobs=broken))
    bodies = [server.chat(logprobs=True, top_logprobs=2, prompt_logprobs=2), server.chat(logprobs=True, top_logprobs=2, stream=True)]
    bodies += [server.complete(prompt=[1, 2], logprobs=2, echo=True, stream=stream) for stream in (False, True)]
    for response in bodies:
        assert response.status_code == 200
        assert f'"logprob":{LOGPROB_FLOOR}' in response.text or f"[null,{LOGPROB_FLOOR}" in response.text
        assert "null" in response.text
        for line in data_lines(response.text)[:-1] if response.headers["content-type"].startswith("text/event") else [response.text]:
            floats: list[float] = []
            json.loads(line, parse_constant=pytest.fail, parse_float=lambda literal, kept=floats: kept.append(float(literal)))
            assert all(LOGPROB_FLOOR <= number <= 0 for number in floats)
    content = bodies[0].json()["choices"][0]["logprobs"]["content"][0]
    assert (content["logprob"], content["top_logprobs"][1]["logprob"]) == (LOGPROB_FLOOR, LOGPROB_FLOOR)


def test_equal_ranks_of_equally_likely_tokens(serve: Callable[..., Server]) -> None:
    def even(token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(token, -1.0, 1, ((token, -1.0), (token + 1, -1.0), (token + 2, -2.0)))

    entry = serve(ScriptEngine([END], logprobs=even)).complete(prompt=[5, 7], prompt_logprobs=3).json()["choices"][0]["prompt_logprobs"][1]
    assert {token: place["rank"] for token, place in entry.items()} == {"7": 1, "8": 1, "9": 3}


def test_an_engine_that_forgets_them_is_told(serve: Callable[..., Server]) -> None:
    class Forgetful(ScriptEngine):
        async def _run(self, request: GenerateRequest) -> Any:
            async for output in super()._run(request):
                yield type(output)(id=output.id, tokens=output.tokens, finish=output.finish, stop_token=output.stop_token)

    server = serve(Forgetful(PLAIN))
    assert server.chat(logprobs=True).status_code == 500
    assert server.complete(prompt=[1, 2, 3], prompt_logprobs=0).status_code == 500
    assert server.chat().status_code == 200


def test_prompt_text_and_ids(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine(PLAIN))
    chat = server.chat(return_prompt_text=True, return_token_ids=True).json()
    assert chat["prompt_text"].startswith("<|im_start|>user\nhi<|im_end|>\n")
    assert chat["prompt_text"] == tokenizer().decode(chat["prompt_token_ids"])
    choices = server.complete(prompt=["a", "b"], return_prompt_text=True).json()["choices"]
    assert [choice["prompt_text"] for choice in choices] == ["a", "b"]
    for path in (CHAT, COMPLETIONS):
        text = server.post(path, body(path, stream=True, return_prompt_text=True, n=2)).text
        assert text.count('"prompt_text"') == 2
        assert '"prompt_text"' not in server.post(path, body(path)).text
