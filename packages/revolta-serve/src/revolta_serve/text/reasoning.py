"""Which tokens of an answer are reasoning and which are content.

Decided by token id, never by spelling: the start state comes from the prompt that was really sent, and the first `</think>` id
ends it. Text that merely spells a tag is text.
"""

from collections.abc import Sequence
from typing import Literal

from revolta_serve.errors import CheckpointError
from revolta_serve.text.tokenizer import Tokenizer

Part = Literal["reasoning", "content", "boundary"]


class ThinkTokens:
    """The ids of `<think>` and `</think>` in one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        missing = [spelling for spelling in ("<think>", "</think>") if spelling not in tokenizer.added]
        if missing:
            raise CheckpointError(f"tokenizer.json: no added token {' and '.join(missing)}; reasoning could not be told from content")
        self.open = tokenizer.added["<think>"]
        self.close = tokenizer.added["</think>"]

    def last(self, prompt: Sequence[int]) -> int | None:
        """The last `<think>` or `</think>` of a prompt."""
        return next((token for token in reversed(prompt) if token in (self.open, self.close)), None)


class ReasoningSplitter:
    """Sorts the generated tokens of one answer.

    An open `<think>` in the prompt starts in reasoning; a closed one makes everything content; with neither, a `<think>` that the
    model generates first opens reasoning. The opening and the first closing token are boundaries: part of neither text.
    """

    def __init__(self, tokens: ThinkTokens, prompt: Sequence[int]) -> None:
        last = tokens.last(prompt)
        self._tokens = tokens
        self._first = True
        self._may_open = last != tokens.close
        self.opened = last == tokens.open
        """Whether the answer has, or had, a reasoning part."""
        self.closed = False
        """Whether that part has ended."""

    def push(self, token: int) -> Part:
        """The part this token belongs to."""
        first, self._first = self._first, False
        if first and self._may_open and token == self._tokens.open:
            self.opened = True
            return "boundary"
        if not self.opened or self.closed:
            return "content"
        if token == self._tokens.close:
            self.closed = True
            return "boundary"
        return "reasoning"
