"""One stream of events per answer: equal for every way the engine may cut its tokens into messages."""

import random

import pytest

from revolta_serve.text.events import Answer, AnswerStream, Delta, Event, Finish, TextOptions, collect
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.types import Output
from support.text import byte_tokens, tokenizer

THINK = ThinkTokens(tokenizer())
END = tokenizer().added["<|im_end|>"]
FAMILY = "👨‍👩‍👧"


def outputs(tokens: list[int], cuts: list[int], finish: str = "stop", stop_token: int | None = END) -> list[Output]:
    """The engine's messages for a cut of the answer; with a stop token, it is the last token."""
    bounds = list(zip([0, *cuts], [*cuts, len(tokens)], strict=True))
    return [
        Output(
            id="r",
            tokens=tuple(tokens[a:b]),
            finish=finish if n == len(bounds) - 1 else None,  # type: ignore[arg-type]
            stop_token=stop_token if n == len(bounds) - 1 else None,
            cached_tokens=64 if n == 0 else 0,
        )
        for n, (a, b) in enumerate(bounds)
    ]


def run(messages: list[Output], prompt: list[int] | None = None, think: bool = True, **options) -> list[Event]:  # type: ignore[no-untyped-def]
    stream = AnswerStream(tokenizer(), prompt or [1, 2, 3], TextOptions(**options), THINK if think else None)
    events: list[Event] = []
    for message in messages:
        events += stream.push(message)
        if stream.finished:
            break
    assert isinstance(events[-1], Finish)
    assert not any(isinstance(event, Finish) for event in events[:-1])
    assert all(event.text for event in events if isinstance(event, Delta))
    return events


def whole(tokens: list[int], **options) -> Answer:  # type: ignore[no-untyped-def]
    return collect(run(outputs(tokens, []), **options))


SCRIPTS = {
    "reasoning": [*byte_tokens(f"I think {FAMILY}\n"), THINK.close, *byte_tokens(f"\n\nSo: é{FAMILY} STOP now"), END],
    "content": [*byte_tokens(f"plain {FAMILY} text"), THINK.close, END],
    "invalid": [*byte_tokens(b"a\xff\xf0\x9fb"), THINK.close, *byte_tokens(b"\n\n\nx\xe2\x80"), END],
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("stops", [(), ("STOP",), ("é", f"{FAMILY} S"), ("x", "t")])
@pytest.mark.parametrize("opened", [True, False])
def test_two_hundred_cuts_give_one_answer(name: str, stops: tuple[str, ...], opened: bool) -> None:
    tokens = SCRIPTS[name]
    prompt = [5, THINK.open] if opened else [THINK.open, THINK.close, 5]
    expected = whole(tokens, prompt=prompt, stops=stops)
    rng = random.Random(f"{name}{stops}{opened}")
    cuts = [list(range(1, len(tokens)))] + [sorted(rng.sample(range(1, len(tokens)), rng.randrange(len(tokens)))) for _ in range(200)]
    for cut in cuts:
        events = run(outputs(tokens, cut), prompt=prompt, stops=stops)
        assert collect(events) == expected
    assert expected.tokens == tuple(tokens[: expected.usage.generated])


def test_reasoning_content_and_counts() -> None:
    answer = whole(SCRIPTS["reasoning"], prompt=[THINK.open])
    assert answer.reasoning == f"I think {FAMILY}\n"
    assert answer.content == f"So: é{FAMILY} STOP now"
    usage = answer.usage
    assert (usage.prompt, usage.cached) == (1, 64)
    assert usage.generated == len(SCRIPTS["reasoning"])
    assert usage.reasoning == len(f"I think {FAMILY}\n".encode())
    assert (answer.reason, answer.stop) == ("stop", None)


def test_unclosed_reasoning_has_no_content() -> None:
    answer = collect(run(outputs(byte_tokens("hm"), [1], "length", None), prompt=[THINK.open]))
    assert (answer.content, answer.reasoning, answer.reason) == (None, "hm", "length")


def test_stop_strings_do_not_fire_in_reasoning() -> None:
    tokens = [*byte_tokens("a STOP b"), THINK.close, *byte_tokens("c STOP d"), END]
    answer = whole(tokens, prompt=[THINK.open], stops=("STOP",))
    assert (answer.reasoning, answer.content, answer.stop) == ("a STOP b", "c ", "STOP")
    assert answer.usage.generated == len(b"a STOP b") + 1 + len(b"c STOP")


def test_a_match_on_the_last_allowed_token_is_a_stop() -> None:
    answer = collect(run(outputs(byte_tokens("xAB"), [2], "length", None), stops=("AB",)))
    assert (answer.content, answer.reason, answer.stop) == ("x", "stop", "AB")


def test_a_refuted_partial_match_is_released_at_the_end() -> None:
    answer = collect(run(outputs(byte_tokens("xA"), [1], "length", None), stops=("AB",)))
    assert (answer.content, answer.reason) == ("xA", "length")


def test_stop_tokens_are_counted_but_not_shown() -> None:
    tokens = byte_tokens("hi")
    mine = tokens[-1]
    answer = collect(run(outputs(tokens, [], "stop", mine), stop_token_ids=(mine,)))
    assert (answer.content, answer.stop, answer.usage.generated) == ("h", mine, 2)
    shown = collect(run(outputs(tokens, [], "stop", mine), stop_token_ids=(mine,), include_stop=True))
    assert shown.content == "hi"


def test_without_think_tokens_everything_is_content() -> None:
    tokens = [*byte_tokens("a"), THINK.close, *byte_tokens("b"), END]
    answer = whole(tokens, prompt=[THINK.open], think=False, skip_special_tokens=False)
    assert (answer.content, answer.reasoning) == ("a</think>b", None)


def test_tokens_travel_with_the_text_they_made() -> None:
    tokens = [*byte_tokens("a🙂"), THINK.close, *byte_tokens("b"), END]
    events = run(outputs(tokens, list(range(1, len(tokens)))), prompt=[THINK.open])
    assert [(event.kind, event.text, len(event.tokens)) for event in events if isinstance(event, Delta)] == [
        ("reasoning", "a", 1),
        ("reasoning", "🙂", 4),
        ("content", "b", 2),
    ]
    assert events[-1].tokens == (END,)
