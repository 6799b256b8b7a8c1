"""Which tokens an answer's content is made of: logprobs go out with the text of their token, and not at all if that text does not.

A token is shown when at least one character of the content, complete or not, comes from its bytes. One without any (the token that
ends the answer, a special token that is left out, a line break that separates reasoning from content) belongs to the place between
two characters. Both go out in the order in which they were generated, and what a stop string cuts off takes its tokens with it.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from msgspec import Struct

from revolta_serve.text.detokenizer import Detokenizer
from revolta_serve.text.tokenizer import Tokenizer
from revolta_serve.types import TokenLogprobs


class Placed(Struct, frozen=True, array_like=True):
    """The logprobs of one generated token and the place of its text."""

    logprobs: TokenLogprobs
    offset: int
    """Characters of the content before its own."""
    shown: bool
    """Some of the content is its text."""


class Alignment:
    """The generated tokens of one answer whose text has not gone out yet, and the count of what has."""

    def __init__(self) -> None:
        self.made = 0
        """Characters of the content so far."""
        self._out = 0
        self._waiting: deque[Placed] = deque()

    def add(self, placed: Placed) -> None:
        """Note the next token."""
        self._waiting.append(placed)

    def release(self, text: str) -> tuple[Placed, ...]:
        """Content goes out: the tokens that go with it, in order."""
        self._out += len(text)
        released: list[Placed] = []
        while self._waiting and self._waiting[0].offset + self._waiting[0].shown <= self._out:
            released.append(self._waiting.popleft())
        return tuple(released)


def offsets(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[int]:
    """For every token, the characters of the decoded text that come before its own; special tokens are spelled out."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    made = 0
    for token in ids:
        yield made + detokenizer.gap(token)
        made += len(detokenizer.push(token))
