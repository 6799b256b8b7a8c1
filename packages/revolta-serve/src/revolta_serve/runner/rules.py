"""What a request's parameters make of its next token, beyond what the model says: biases, bans, masks, penalties, forced tokens.

They depend on the ids before it. What is needed of those is kept and moved on token by token: counts, the last few ids, the length of
the answer, the place in a reasoning part. After a preemption the same is built again from the whole history.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from revolta_serve.errors import EngineError
from revolta_serve.runner.occurrences import Occurrences
from revolta_serve.types import History, SamplingParams, Slice, Thinking

Words = NDArray[np.int32]
Bias = tuple[NDArray[np.int32], NDArray[np.float32]]

WORD = 32
"""Ids in one word of a mask."""


def mask_of(ids: Iterable[int], vocabulary: int) -> Words:
    """i32[ceil(V / 32)] with the bits of these ids set: bit v % 32 of word v // 32."""
    bits = np.zeros(-(-vocabulary // WORD) * WORD, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


class BadWords:
    """Which ids would complete a forbidden sequence. Looks at the last ids only, as many as the longest sequence has before its last."""

    def __init__(self, words: Sequence[Sequence[int]], history: Iterable[int]) -> None:
        self.always = frozenset(word[0] for word in words if len(word) == 1)
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """Sequences by the id before their last: (all ids but the last, the last)."""
        for *before, last in (word for word in words if len(word) > 1):
            self._after.setdefault(before[-1], []).append((tuple(before), last))
        self._latest = deque(history, maxlen=max((len(word) - 1 for word in words), default=0))

    def append(self, token: int) -> None:
        """Take note of the next id."""
        self._latest.append(token)

    @property
    def banned(self) -> frozenset[int]:
        """Ids that may not come next."""
        found = self._after.get(self._latest[-1]) if self._latest else None
        if found is None:
            return self.always
        latest = tuple(self._latest)
        return self.always.union(last for before, last in found if latest[-len(before) :] == before)


class Reasoning:
    """How much of its limit the reasoning part of an answer has used. Parts that open later draw on the same limit."""

    def __init__(self, thinking: Thinking, answer: Iterable[int]) -> None:
        self._thinking = thinking
        self._inside = thinking.begun
        self._left = thinking.budget
        for token in answer:
            self.append(token)

    def append(self, token: int) -> None:
        """Take note of the next id of the answer."""
        if not self._inside:
            self._inside = token == self._thinking.open
        elif token == self._thinking.close:
            self._inside = False
        else:
            self._left -= 1

    @property
    def forced(self) -> int | None:
        """The id that must come next, if any."""
        return self._thinking.close if self._inside and self._left <= 0 else None


class Rules:
    """The rules of one request at its current token. Ask for them before a token is drawn, then `append` it.

    Order of precedence: a forced token, then allowed_tokens and bad_words, then min_tokens, which yields where nothing else is left.
    """

    def __init__(self, params: SamplingParams, history: History, vocabulary: int) -> None:
        self.params = params
        self._vocabulary = vocabulary
        self._allowed = frozenset(params.allowed_tokens)
        self._mask = mask_of(params.allowed_tokens, vocabulary) if params.allowed_tokens else None
        self._bias = dict(params.logit_bias)
        self._ending = frozenset(params.ending_tokens)
        self._length = len(history.answer)
        self._words = BadWords(params.bad_words, chain(history.prompt, history.answer)) if params.bad_words else None
        self._reasoning = Reasoning(params.thinking, history.answer) if params.thinking is not None else None
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        # Only repetition looks at the prompt.
        known = history.prompt if params.repetition_penalty != 1.0 else ()
        self.seen = Occurrences(known, history.answer) if penalties != (1.0, 0.0, 0.0) else None
        """The ids that penalties apply to; None without penalties."""
        self._banned: frozenset[int] = frozenset()
        self._merged = self._merge(self._banned)

    @classmethod
    def of(cls, piece: Slice, vocabulary: int) -> "Rules | None":
        """The rules of a request on first sight; None if it has none and its logits are drawn from as they are.

        Raises EngineError for parameters that depend on a history that does not come with them, or name ids the model does not have.
        """
        params = piece.sampling
        if params is None or not (params.needs_history or params.logit_bias or params.allowed_tokens):
            return None
        if params.needs_history and piece.history is None:
            raise EngineError(
                f"request number {piece.request}: its parameters depend on earlier ids, but its first slice brings no history"
            )
        named = chain(params.allowed_tokens, params.ending_tokens, *params.bad_words, (token for token, _ in params.logit_bias))
        for token in named:
            if not 0 <= token < vocabulary:
                raise EngineError(f"request number {piece.request}: its parameters name id {token}; the model has 0 .. {vocabulary - 1}")
        return cls(params, piece.history or History(prompt=(), answer=()), vocabulary)

    @property
    def forced(self) -> int | None:
        """The id that must come next, whatever the other rules say."""
        return None if self._reasoning is None else self._reasoning.forced

    @property
    def mask(self) -> Words | None:
        """Bits of the ids that may be drawn; None for all."""
        return self._mask

    @property
    def bias(self) -> Bias:
        """(ids i32[B] ascending, values f32[B]) to add to the logits: -inf for an id that may not be drawn."""
        banned = frozenset() if self._words is None else self._words.banned
        if self._length < self.params.min_tokens and not self._exhausted(banned | self._ending):
            banned |= self._ending
        if banned != self._banned:
            self._banned, self._merged = banned, self._merge(banned)
        return self._merged

    def append(self, token: int) -> None:
        """Move on by one drawn token."""
        self._length += 1
        if self.seen is not None:
            self.seen.add(token)
        if self._words is not None:
            self._words.append(token)
        if self._reasoning is not None:
            self._reasoning.append(token)

    def _exhausted(self, banned: frozenset[int]) -> bool:
        """Whether these bans leave no id to draw."""
        return self._allowed <= banned if self._allowed else len(banned) >= self._vocabulary

    def _merge(self, banned: frozenset[int]) -> Bias:
        values = sorted({**self._bias, **dict.fromkeys(banned, -np.inf)}.items())
        return np.array([token for token, _ in values], np.int32), np.array([value for _, value in values], np.float32)
