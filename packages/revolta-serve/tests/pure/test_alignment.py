"""Logprobs beside the text of their tokens: the same tokens, in order, however the engine cuts its messages."""

import random
from typing import Any

import pytest

from revolta_serve.text.alignment import Placed, offsets
from revolta_serve.text.events import AnswerStream, Delta, Event, Finish, TextOptions, collect
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.types import Output, TokenLogprobs
from support.script_engine import scripted_logprobs
from support.text import byte_tokens, tokenizer

THINK = ThinkTokens(tokenizer())
END = tokenizer().added["<|im_end|>"]


def messages(tokens: list[int], cuts: list[int], finish: Any, stop: int | None, prompt: list[TokenLogprobs]) -> list[Output]:
    """The engine's messages for a cut of an answer; some that bring logprobs of the prompt alone come before it."""
    outputs = [Output(id="r", prompt_logprobs=tuple(prompt[start : start + 2])) for start in range(0, len(prompt), 2)]
    bounds = list(zip([0, *cuts], [*cuts, len(tokens)], strict=True))
    for number, (start, end) in enumerate(bounds):
        last = number == len(bounds) - 1
        part = tuple(tokens[start:end])
        logprobs = tuple(scripted_logprobs(token, 2) for token in part)
        outputs.append(Output(id="r", tokens=part, finish=finish if last else None, stop_token=stop if last else None, logprobs=logprobs))
    return outputs


def run(
    tokens: list[int],
    cuts: list[int] | None = None,
    *,
    finish: str = "stop",
    stop: int | None = END,
    think: bool = False,
    prompt: list[TokenLogprobs] | None = None,
    **options: Any,
) -> list[Event]:
    opened = [*[0] * len(prompt or ()), THINK.open]
    told = bool(prompt)
    stream = AnswerStream(tokenizer(), opened, TextOptions(logprobs=True, **options), THINK if think else None, prompt_logprobs=told)
    events: list[Event] = []
    for message in messages(tokens, cuts or [], finish, stop, prompt or []):
        events += stream.push(message)
        if stream.finished:
            break
    return events


def told(events: list[Event], *, hidden: bool = False) -> list[int]:
    """Ids with logprobs; `hidden` includes those without text."""
    return [placed.logprobs.token for event in events for placed in event.logprobs if placed.shown or hidden]


SCRIPTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "plain": ([*byte_tokens("plain é🙂!"), END], {}),
    "a stop string": ([*byte_tokens("abSTOPcd"), END], {"stops": ("STOP",)}),
    "a stop string that is kept": ([*byte_tokens("abSTOPcd"), END], {"stops": ("STOP",), "include_stop": True}),
    "a stop string inside a character": ([*byte_tokens("a🙂bé"), END], {"stops": ("🙂b",)}),
    "nearly a stop string": ([*byte_tokens("abSTOcd"), END], {"stops": ("STOP",)}),
    "whole words": ([*tokenizer().encode("the other day with them"), END], {"stops": ("er d",)}),
    "invalid": ([*byte_tokens(b"a\xff\xf0\x9fb\xe2\x80"), END], {}),
    "special tokens in between": ([*byte_tokens("a"), THINK.open, END, *byte_tokens("b"), END], {"stops": ("bc",)}),
    "a special token inside a character": ([*byte_tokens("a🙂")[:3], END, *byte_tokens("🙂")[2:], *byte_tokens("b"), END], {}),
    "special tokens are text": ([*byte_tokens("a"), END, *byte_tokens("b"), END], {"skip_special_tokens": False}),
    "reasoning": ([*byte_tokens("hm🙂"), THINK.close, *byte_tokens("\n\nso é STOP"), END], {"think": True, "stops": ("STOP",)}),
    "reasoning alone": ([*byte_tokens("hm")], {"think": True, "finish": "length", "stop": None}),
    "least tokens": ([*byte_tokens("STOPSTOP"), END], {"stops": ("STOP",), "min_tokens": 5}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_hundred_cuts_tell_the_same(name: str) -> None:
    tokens, options = SCRIPTS[name]
    prompt = [scripted_logprobs(token, 3) for token in range(5)]
    expected = collect(run(tokens, prompt=prompt, **options))
    assert expected.prompt_logprobs == tuple(prompt)
    rng = random.Random(name)
    for attempt in range(200):
        cuts = list(range(1, len(tokens))) if not attempt else sorted(rng.sample(range(1, len(tokens)), rng.randrange(len(tokens))))
        events = run(tokens, cuts, prompt=prompt, **options)
        assert collect(events) == expected
        assert events[0].prompt_logprobs == tuple(prompt)
        content = ""
        for event in events:
            if isinstance(event, Delta) and event.kind == "content":
                content += event.text
            assert all(placed.offset < len(content) for placed in event.logprobs if placed.shown), "never before its text"
    assert [placed.logprobs for placed in expected.logprobs] == [
        scripted_logprobs(placed.logprobs.token, 2) for placed in expected.logprobs
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_bytes_told_of_begin_with_the_content(name: str) -> None:
    tokens, options = SCRIPTS[name]
    answer = collect(run(tokens, **options))
    spelled = b"".join(tokenizer().token_bytes(placed.logprobs.token) for placed in answer.logprobs if placed.shown)
    assert spelled.decode(errors="replace").startswith(answer.content or "")
    longest = max(len(tokenizer().token_bytes(token)) for token in tokens)
    assert len(spelled.decode(errors="replace")) < len(answer.content or "") + longest


@pytest.mark.parametrize("name", SCRIPTS)
def test_offsets_are_where_the_text_is(name: str) -> None:
    tokens, options = SCRIPTS[name]
    answer = collect(run(tokens, **options))
    content = answer.content or ""
    places = [placed.offset for placed in answer.logprobs]
    assert places == sorted(places)
    for placed in answer.logprobs:
        text = tokenizer().decode([placed.logprobs.token])
        if placed.shown and "\ufffd" not in text:
            assert content[placed.offset :].startswith(text[: len(content) - placed.offset])


def test_reasoning_and_the_tokens_around_it_are_not_told() -> None:
    tokens, options = SCRIPTS["reasoning"]
    events = run(tokens, **options)
    assert told(events, hidden=True) == [*byte_tokens("\n\n"), *byte_tokens("so é ")]
    assert told(events) == byte_tokens("so é ")
    assert told(run(*SCRIPTS["reasoning alone"][:1], **SCRIPTS["reasoning alone"][1]), hidden=True) == []


def test_a_stop_string_takes_its_tokens_with_it() -> None:
    tokens, options = SCRIPTS["a stop string"]
    assert told(run(tokens, **options), hidden=True) == tokens[:2]
    assert told(run(tokens, **options, include_stop=True), hidden=True) == tokens[:6]
    words = tokenizer().encode("the other")
    cut = run([*words, END], stops=("her",))
    assert collect(cut).content == "the ot"
    assert told(cut) == words[: len(told(cut))]
    assert tokenizer().decode(told(cut)).startswith("the ot"), "a token of which a part is shown is told"


def test_the_last_token_is_told_without_text() -> None:
    tokens = [*byte_tokens("ab"), END]
    events = run(tokens)
    assert told(events) == tokens[:2]
    assert collect(events).logprobs[-1] == Placed(scripted_logprobs(END, 2), 2, False)
    one_by_one = run(tokens, [1, 2])
    assert isinstance(one_by_one[-1], Finish)
    assert one_by_one[-1].logprobs == collect(events).logprobs[-1:]
    cut = run([*byte_tokens(b"a\xf0\x9f"), END])
    assert [(placed.offset, placed.shown) for event in cut for placed in event.logprobs] == [(0, True), (1, True), (1, True), (2, False)]


def test_a_repetition_ends_an_answer() -> None:
    answer = collect(run(byte_tokens("abab"), finish="repetition", stop=None))
    assert (answer.content, answer.reason, answer.stop) == ("abab", "repetition", None)


def test_stop_strings_are_looked_for_in_what_comes_after_min_tokens() -> None:
    tokens = [*byte_tokens("STOPaSTOPb"), END]
    for least, content in ((0, ""), (1, ""), (2, "STOPa"), (5, "STOPa"), (6, "STOPa"), (7, "STOPaSTOPb")):
        answer = collect(run(tokens, stops=("STOP",), min_tokens=least))
        assert (answer.content, answer.stop) == (content, None if least == 7 else "STOP"), least
        assert answer.usage.generated >= least


def test_an_engine_that_forgets_logprobs_is_an_error() -> None:
    stream = AnswerStream(tokenizer(), [1], TextOptions(logprobs=True), None)
    with pytest.raises(ValueError, match="1 logprobs for 2 tokens"):
        stream.push(Output(id="r", tokens=(1, 2), logprobs=(scripted_logprobs(1, 0),)))


@pytest.mark.parametrize(("prompt", "told"), [([1, 2, 3], 1), ([1, 2, 3], 3), ([1], 1), ([1, 2], 0)])
def test_an_engine_that_tells_too_much_or_little_of_the_prompt(prompt: list[int], told: int) -> None:
    stream = AnswerStream(tokenizer(), prompt, TextOptions(), None, prompt_logprobs=True)
    assert stream.push(Output(id="r", prompt_logprobs=(scripted_logprobs(1, 0),) * told)) == []
    with pytest.raises(ValueError, match=f"{told} tokens of a prompt before its answer; {len(prompt) - 1} are due"):
        stream.push(Output(id="r", tokens=tuple(byte_tokens("a"))))


def test_offsets_of_any_ids() -> None:
    """Against decoding every beginning: a token's text starts where that of the ones before it ends, if that end is final."""
    rng = random.Random(3)
    pool = [*byte_tokens("aé🙂"), *byte_tokens(b"\xff\xf0\x9f\xc3"), END, THINK.open, *tokenizer().encode("the other")]
    for _ in range(300):
        ids = [rng.choice(pool) for _ in range(rng.randrange(1, 12))]
        text = tokenizer().decode(ids)
        found = list(offsets(tokenizer(), ids))
        assert found == sorted(found)
        assert found[0] == 0
        for number, place in enumerate(found):
            own = tokenizer().decode(ids[number : number + 1])
            if "\ufffd" not in own:
                assert text[place:].startswith(own)
                assert place == len(tokenizer().decode(ids[:number]))
