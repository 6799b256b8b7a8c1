"""The one event stream of an answer: every dialect, streaming or not, is rendered from it.

`AnswerStream` turns the engine's Output messages of one choice into `Delta` and `Finish` events: reasoning is told from content,
bytes become text, stop strings are found. A streaming answer writes events as they come; a whole answer is `collect(events)`.
Both therefore hold the same text, tokens and counts, byte for byte.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from revolta_serve.text.detokenizer import Detokenizer
from revolta_serve.text.reasoning import ReasoningSplitter, ThinkTokens
from revolta_serve.text.stops import StopMatcher
from revolta_serve.text.tokenizer import Tokenizer
from revolta_serve.types import Output

Kind = Literal["content", "reasoning"]


class Delta(Struct, frozen=True, kw_only=True):
    """New text. `tokens` are the ids generated since the previous event, whether or not their text is complete."""

    kind: Kind
    text: str
    tokens: tuple[int, ...]
    generated: int
    """Tokens of this choice so far."""


class AnswerUsage(Struct, frozen=True, kw_only=True):
    """Token counts of one choice. `generated` ends with the token that completed a stop string, even if more were computed."""

    prompt: int
    cached: int
    generated: int
    reasoning: int


class Finish(Struct, frozen=True, kw_only=True):
    """The last event of a choice. `stop` is the matched stop string or the caller's stop token id, None for the model's own end."""

    reason: Literal["stop", "length"]
    stop: str | int | None
    tokens: tuple[int, ...]
    usage: AnswerUsage


Event = Delta | Finish


@dataclass(frozen=True)
class TextOptions:
    """How the tokens of a request become text."""

    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Those the caller asked for, to be named in `Finish.stop`."""
    include_stop: bool = False
    skip_special_tokens: bool = True


class AnswerStream:
    """Events of one choice. `finished` turns true with the Finish event; later outputs are ignored."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], options: TextOptions, think: ThinkTokens | None) -> None:
        """`think` is None where reasoning is not told apart (raw completions)."""
        self._options = options
        self._prompt = len(prompt)
        self._splitter = ReasoningSplitter(think, prompt) if think else None
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopMatcher(options.stops, include_stop=options.include_stop)
        self._newlines = 0
        """Newlines still dropped: the two that separate a closed reasoning part from the content."""
        self._events: list[Event] = []
        self._text: list[str] = []
        self._kind: Kind = "reasoning" if self._splitter and self._splitter.opened else "content"
        self._tokens: list[int] = []
        self._generated = 0
        self._reasoning = 0
        self._cached = 0
        self.finished = False

    def push(self, output: Output) -> list[Event]:
        """Events of one engine message, whose `finish` is None, "stop" or "length": other endings are errors, not answers.

        A stop token is the last of the tokens of the message that names it.
        """
        self._cached = max(self._cached, output.cached_tokens)
        matched = None
        for number, token in enumerate(output.tokens, start=1):
            ends = output.stop_token is not None and number == len(output.tokens)
            if ends and not self._options.include_stop:
                self._count(token)
                break
            matched = self._token(token)
            if matched is not None:
                break
        if matched is None and output.finish is not None:
            matched = self._flush()
        if matched is not None:
            self._finish("stop", matched)
        elif output.finish is not None:
            self._finish("length" if output.finish == "length" else "stop", self._stop_token(output.stop_token))
        else:
            self._emit()
        events, self._events = self._events, []
        return events

    def _token(self, token: int) -> str | None:
        part = self._splitter.push(token) if self._splitter else "content"
        if part == "boundary":
            self._count(token)
            self._put(self._detokenizer.flush())
            self._emit()
            if self._splitter and self._splitter.closed:
                self._newlines = 2
            return None
        if part != self._kind:
            self._emit()
            self._kind = part
        if part == "reasoning":
            self._reasoning += 1
        self._count(token)
        return self._put(self._detokenizer.push(token))

    def _count(self, token: int) -> None:
        self._generated += 1
        self._tokens.append(token)

    def _put(self, text: str) -> str | None:
        """Queue text of the current kind; content goes through the stop matcher. Returns the stop string it completed."""
        if self._kind == "reasoning":
            self._text.append(text)
            return None
        while self._newlines and text:
            if text[0] != "\n":
                self._newlines = 0
                break
            text = text[1:]
            self._newlines -= 1
        free, matched = self._stops.push(text)
        self._text.append(free)
        return matched

    def _flush(self) -> str | None:
        """The engine ended the answer: release what was held back."""
        matched = self._put(self._detokenizer.flush())
        if matched is None:
            self._text.append(self._stops.flush())
        return matched

    def _emit(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        if text:
            self._events.append(Delta(kind=self._kind, text=text, tokens=self._take_tokens(), generated=self._generated))

    def _finish(self, reason: Literal["stop", "length"], stop: str | int | None) -> None:
        self._emit()
        usage = AnswerUsage(prompt=self._prompt, cached=self._cached, generated=self._generated, reasoning=self._reasoning)
        self._events.append(Finish(reason=reason, stop=stop, tokens=self._take_tokens(), usage=usage))
        self.finished = True

    def _take_tokens(self) -> tuple[int, ...]:
        tokens = tuple(self._tokens)
        self._tokens.clear()
        return tokens

    def _stop_token(self, token: int | None) -> int | None:
        return token if token in self._options.stop_token_ids else None


@dataclass(frozen=True)
class Answer:
    """One whole choice. A part the model never started is None."""

    content: str | None
    reasoning: str | None
    tokens: tuple[int, ...]
    reason: Literal["stop", "length"]
    stop: str | int | None
    usage: AnswerUsage


def collect(events: Iterable[Event]) -> Answer:
    """Fold all events of one choice. `content` is None only when nothing but reasoning came."""
    parts: dict[Kind, list[str]] = {"content": [], "reasoning": []}
    tokens: list[int] = []
    finish: Finish | None = None
    for event in events:
        tokens.extend(event.tokens)
        if isinstance(event, Finish):
            finish = event
        else:
            parts[event.kind].append(event.text)
    if finish is None:
        raise ValueError("the events of an answer end with Finish")
    reasoning = "".join(parts["reasoning"]) if parts["reasoning"] else None
    content = "".join(parts["content"]) if parts["content"] or reasoning is None else None
    return Answer(content, reasoning, tuple(tokens), finish.reason, finish.stop, finish.usage)
