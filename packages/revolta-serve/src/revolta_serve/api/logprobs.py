"""Logprobs: how many a request may ask for, and how they are written in the dialects.

The text of a token is what its bytes spell, with U+FFFD where they are no whole character, or token_id:N where the request wants that;
`bytes` are always those of the token. Numbers are finite: LOGPROB_FLOOR stands for what JSON cannot express.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

from revolta_serve.api.context import Api
from revolta_serve.api.fields import Fields
from revolta_serve.api.shapes import ChatLogprob, ChatLogprobs, PromptLogprob, TextLogprobs, TopLogprob
from revolta_serve.errors import RequestError
from revolta_serve.text.alignment import Placed, offsets
from revolta_serve.text.tokenizer import Tokenizer
from revolta_serve.types import LOGPROB_FLOOR, TokenLogprobs

ALL = -1
NONE = -1
"""As in SamplingParams."""


def read_chat_logprobs(api: Api, fields: Fields) -> int:
    """logprobs: true or false, and top_logprobs. Returns SamplingParams.logprobs."""
    wanted = fields.boolean("logprobs", False)
    count = _count(api, fields, "top_logprobs")
    if count > 0 and not wanted:
        raise RequestError("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
    return max(0, count) if wanted else NONE


def read_text_logprobs(api: Api, fields: Fields) -> int:
    """logprobs: a number, as /v1/completions has it. Returns SamplingParams.logprobs."""
    if fields.raw.get("logprobs") == ALL:
        raise fields.fail("logprobs", f"an integer between 0 and {_most(api)} (api.max_logprobs)")
    return _count(api, fields, "logprobs")


def read_prompt_logprobs(api: Api, fields: Fields, *, stream: bool) -> int:
    """prompt_logprobs, which a stream has no place for. Returns SamplingParams.prompt_logprobs."""
    count = _count(api, fields, "prompt_logprobs")
    if count != NONE and stream:
        raise RequestError("prompt_logprobs: not allowed with stream: true; send stream: false", param="prompt_logprobs")
    return count


def _most(api: Api) -> int:
    size, most = api.tokenizer.size, api.config.api.max_logprobs
    return size if most == ALL else min(size, most)


def _count(api: Api, fields: Fields, name: str) -> int:
    """How many most likely ids a field asks for; ALL means all of the vocabulary."""
    value = fields.integer(name, None, ALL)
    if value is None:
        return NONE
    count = api.tokenizer.size if value == ALL else value
    if count > _most(api):
        raise fields.fail(name, f"an integer between 0 and {_most(api)} (api.max_logprobs)")
    return count


class LogprobWriter:
    """Writes the logprobs of one request.

    What there is of a token becomes JSON at once: other threads get their turn between two tokens, and text takes less room than
    objects.
    """

    def __init__(self, tokenizer: Tokenizer, *, ids_as_text: bool) -> None:
        self._tokenizer = tokenizer
        self._ids_as_text = ids_as_text

    def chat(self, tokens: Iterable[Placed]) -> ChatLogprobs:
        """Of the tokens whose text is in the content."""
        return ChatLogprobs(content=[_json(self._chat(placed.logprobs)) for placed in tokens if placed.shown])

    def text(self, written: TextLogprobs, tokens: Iterable[Placed], start: int) -> None:
        """Append generated tokens, those without text included. start: characters of the text before the generated ones."""
        for placed in tokens:
            self._append(written, placed.logprobs, placed.offset + start)

    def echo(self, written: TextLogprobs, prompt: Sequence[int], known: Sequence[TokenLogprobs], count: int) -> None:
        """Append a prompt: nothing is known of its first token. count: most likely tokens to tell of."""
        places = offsets(self._tokenizer, prompt)
        written.tokens.append(self._name(prompt[0]))
        written.token_logprobs.append(None)
        written.top_logprobs.append(None)
        written.text_offset.append(next(places))
        for entry, place in zip(known, places, strict=True):
            self._append(written, _cut(entry, count), place)

    def prompt(self, known: Sequence[TokenLogprobs], count: int) -> list[msgspec.Raw | None]:
        """{id: {logprob, rank, decoded_token}} for every token of a prompt, null for the first."""
        return [None, *(_json(self._prompt(_cut(entry, count))) for entry in known)]

    def _append(self, written: TextLogprobs, entry: TokenLogprobs, offset: int) -> None:
        """Where several tokens have the same text, the most likely of them has the place under that text."""
        top: dict[str, float] = {}
        for token, value in _likely(entry):
            top.setdefault(self._name(token), finite(value))
        written.tokens.append(self._name(entry.token))
        written.token_logprobs.append(finite(entry.logprob))
        written.top_logprobs.append(_json(top))
        written.text_offset.append(offset)

    def _chat(self, entry: TokenLogprobs) -> ChatLogprob:
        top = [
            TopLogprob(token=self._name(token), logprob=finite(value), bytes=self._bytes(token))
            for token, value in (_likely(entry) if entry.top else ())
        ]
        return ChatLogprob(token=self._name(entry.token), logprob=finite(entry.logprob), bytes=self._bytes(entry.token), top_logprobs=top)

    def _prompt(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranks: dict[float, int] = {}
        for place, (_, value) in enumerate(entry.top, start=1):
            ranks.setdefault(value, place)
        table = {
            str(token): PromptLogprob(logprob=finite(value), rank=ranks[value], decoded_token=self._tokenizer.decode([token]))
            for token, value in entry.top
        }
        table[str(entry.token)] = PromptLogprob(
            logprob=finite(entry.logprob), rank=entry.rank, decoded_token=self._tokenizer.decode([entry.token])
        )
        return table

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._ids_as_text else self._tokenizer.decode([token])

    def _bytes(self, token: int) -> tuple[int, ...]:
        return tuple(self._tokenizer.token_bytes(token))


def finite(value: float) -> float:
    """A logprob that JSON can express: at least LOGPROB_FLOOR, which also stands for one that is no number."""
    return value if LOGPROB_FLOOR < value < math.inf else LOGPROB_FLOOR


def _json(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _likely(entry: TokenLogprobs) -> Sequence[tuple[int, float]]:
    """The most likely tokens, and behind them the one that was drawn if it is none of them."""
    if any(token == entry.token for token, _ in entry.top):
        return entry.top
    return (*entry.top, (entry.token, entry.logprob))


def _cut(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    """With `count` most likely tokens at most: the engine may have been asked for more by another field."""
    return entry if len(entry.top) <= count else msgspec.structs.replace(entry, top=entry.top[:count])
