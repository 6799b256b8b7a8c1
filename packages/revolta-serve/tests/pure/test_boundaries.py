"""Where prompts are likely to part: positions in the ids of the template's own rendering."""

import random
from itertools import pairwise
from typing import Any

import pytest

from revolta_serve.text.boundaries import STRETCH, Marks, chat_marks, spread
from support.text import template, tokenizer

START = tokenizer().added["<|im_start|>"]
SYSTEM = {"role": "system", "content": "Be brief. <|im_start|>user"}
TOOL = {"type": "function", "function": {"name": "f", "description": "<|im_start|>", "parameters": {"type": "object"}}}


def turns(count: int) -> list[dict[str, str]]:
    """Alternating turns of which each spells the mark of a message start."""
    return [{"role": "assistant" if n % 2 else "user", "content": f"turn {n} <|im_start|>"} for n in range(count)]


def ids(messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return tokenizer().encode_pieces(template().render(messages, **options))


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("count", [1, 3, 5, 7, 9])
def test_a_conversation(count: int, tools: Any) -> None:
    prompt = ids([SYSTEM, *turns(count)], tools=tools)
    marks = chat_marks(prompt, START, system=True, generation=True)
    last = range(max(0, count - 4), count)
    wanted = [f"{'assistant' if n % 2 else 'user'}\nturn {n} " for n in sorted({0, *last})] + ["assistant\n<think>\n"]
    assert len(marks.places) == len(wanted)
    assert marks.opening == marks.places[0], "where the first message begins the system text ends"
    for mark, begin in zip(marks.places, wanted, strict=True):
        assert tokenizer().decode(prompt[mark:]).startswith(f"<|im_start|>{begin}")
    assert spread(marks.places, len(prompt)) == (*marks.places, len(prompt))


def test_without_system_text_or_opening() -> None:
    messages = turns(3)
    prompt = ids(messages)
    starts = [place for place, token in enumerate(prompt) if token == START]
    assert starts[0] == 0
    assert spread(chat_marks(prompt, START, system=False, generation=True).places, len(prompt)) == (*starts[1:], len(prompt))
    whole = ids(messages, add_generation_prompt=False)
    assert starts[-1] == len(whole), "where the opening begins the history ends"
    assert spread(chat_marks(whole, START, system=False, generation=False).places, len(whole)) == tuple(starts[1:])


def test_tools_alone_are_a_system_block() -> None:
    prompt = ids(turns(1), tools=[TOOL])
    second = prompt.index(START, 1)
    marks = chat_marks(prompt, START, system=True, generation=True)
    assert (marks.places[:2], marks.opening) == ((second, prompt.index(START, second + 1)), second)


def test_a_continued_message_is_a_message() -> None:
    prompt = ids(turns(2), continue_final_message=True)
    marks = chat_marks(prompt, START, system=False, generation=False)
    assert spread(marks.places, len(prompt)) == (prompt.index(START, 1), len(prompt))
    assert marks.opening == 0


def test_a_vocabulary_without_messages_has_only_stretches() -> None:
    assert chat_marks([5] * 10, None, system=True, generation=True) == Marks()
    assert chat_marks([5] * 10, START, system=True, generation=True) == Marks()


@pytest.mark.parametrize(
    ("marks", "size", "expected"),
    [
        ([], 1, (1,)),
        ([], STRETCH, (STRETCH,)),
        ([], STRETCH + 1, (STRETCH, STRETCH + 1)),
        ([], 3 * STRETCH, (STRETCH, 2 * STRETCH, 3 * STRETCH)),
        ([100], STRETCH + 100, (100, STRETCH + 100)),
        ([100], STRETCH + 101, (100, STRETCH + 100, STRETCH + 101)),
        ([0, 7, 7, 50, 90], 50, (7, 50)),
        ([STRETCH + 5, 5], 2 * STRETCH, (5, STRETCH + 5, 2 * STRETCH)),
    ],
)
def test_stretches(marks: list[int], size: int, expected: tuple[int, ...]) -> None:
    assert spread(marks, size) == expected


def test_any_marks() -> None:
    rng = random.Random(5)
    for _ in range(200):
        size = rng.randrange(1, 20_000)
        marks = [rng.randrange(25_000) for _ in range(rng.randrange(8))]
        found = spread(marks, size)
        assert found[-1] == size
        assert all(0 < b - a <= STRETCH for a, b in pairwise((0, *found)))
        assert {mark for mark in marks if 0 < mark < size} <= set(found)
        extra = set(found) - set(marks) - {size}
        assert all(place - STRETCH in {0, *found} for place in extra), "a stretch is measured from the mark before it"


def test_a_prompt_that_lost_its_beginning() -> None:
    assert Marks((10, 20, 30), 20).shifted(20) == Marks((10,), 0)
    assert Marks((10, 20), 20).shifted(0) == Marks((10, 20), 20)
    assert Marks((10, 20), 20).shifted(5) == Marks((5, 15), 15)
