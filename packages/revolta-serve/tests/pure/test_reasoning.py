"""Where reasoning starts and ends, by token id alone."""

import pytest

from revolta_serve.errors import CheckpointError
from revolta_serve.text.reasoning import ReasoningSplitter, ThinkTokens
from support.text import tokenizer

THINK = ThinkTokens(tokenizer())
OPEN, CLOSE, X = THINK.open, THINK.close, tokenizer().encode("x")[0]


@pytest.mark.parametrize(
    ("prompt", "generated", "parts"),
    [
        ([OPEN, X], [X, CLOSE, X], ["reasoning", "boundary", "content"]),
        ([OPEN, X], [X, X], ["reasoning", "reasoning"]),
        ([OPEN, X], [CLOSE, X], ["boundary", "content"]),
        ([OPEN, X], [OPEN, X, CLOSE], ["boundary", "reasoning", "boundary"]),
        ([OPEN, X], [X, CLOSE, OPEN, X, CLOSE], ["reasoning", "boundary", "content", "content", "content"]),
        ([OPEN, CLOSE, X], [X, OPEN, CLOSE], ["content", "content", "content"]),
        ([OPEN, CLOSE, X], [OPEN, X], ["content", "content"]),
        ([X], [X, OPEN, X], ["content", "content", "content"]),
        ([X], [OPEN, X, CLOSE, X], ["boundary", "reasoning", "boundary", "content"]),
        ([OPEN, CLOSE, OPEN], [X], ["reasoning"]),
    ],
)
def test_parts(prompt: list[int], generated: list[int], parts: list[str]) -> None:
    splitter = ReasoningSplitter(THINK, prompt)
    assert [splitter.push(token) for token in generated] == parts


def test_spelling_is_not_a_tag() -> None:
    spelled = tokenizer().encode_plain("</think>")
    splitter = ReasoningSplitter(THINK, [OPEN])
    assert {splitter.push(token) for token in spelled} == {"reasoning"}


def test_a_vocabulary_without_the_tags_is_refused() -> None:
    class Bare:
        added = {"<think>": 1}

    with pytest.raises(CheckpointError, match="</think>"):
        ThinkTokens(Bare())  # type: ignore[arg-type]
