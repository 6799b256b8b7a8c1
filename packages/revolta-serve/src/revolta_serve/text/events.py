"""The one event stream of an answer: every dialect, streaming or not, is rendered from it.

`AnswerStream` turns the engine's Output messages of one choice into `Delta` and `Finish` events: reasoning is told from content,
bytes become text, stop strings are found, logprobs are put beside the text they belong to. A streaming answer writes events as they
come; a whole answer is `collect(events)`. Both therefore hold the same text, tokens, logprobs and counts, byte for byte.

Logprobs are told of content only, as clients read them beside it: those of reasoning and of the tokens around it are dropped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from msgspec import Struct

from revolta_serve.text.alignment import Alignment, Placed
from revolta_serve.text.detokenizer import Detokenizer
from revolta_serve.text.reasoning import ReasoningSplitter, ThinkTokens
from revolta_serve.text.stops import StopMatcher
from revolta_serve.text.tokenizer import Tokenizer
from revolta_serve.types import Output, TokenLogprobs

Reason = Literal["stop", "length", "repetition"]
Kind = Literal["content", "reasoning"]


class Delta(Struct, frozen=True, kw_only=True):
    """New text. `tokens` are the ids generated since the previous event, whether or not their text is complete."""

    kind: Kind
    text: str
    tokens: tuple[int, ...]
    generated: int
    """Tokens of this choice so far."""
    logprobs: tuple[Placed, ...] = ()
    """The tokens whose text begins to go out here, and those between them, where the request asks for logprobs."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first event of a choice: of the tokens of the prompt from the second one on, where the request asks for them."""


class AnswerUsage(Struct, frozen=True, kw_only=True):
    """Token counts of one choice. `generated` ends with the token that completed a stop string, even if more were computed."""

    prompt: int
    cached: int
    generated: int
    reasoning: int


class Finish(Struct, frozen=True, kw_only=True):
    """The last event of a choice. `stop` is the matched stop string or the caller's stop token id, None for the model's own end."""

    reason: Reason
    stop: str | int | None
    tokens: tuple[int, ...]
    usage: AnswerUsage
    logprobs: tuple[Placed, ...] = ()
    """Of the tokens after the last text."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """As in Delta."""


Event = Delta | Finish


@dataclass(frozen=True)
class TextOptions:
    """How the tokens of a request become text."""

    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Those the caller asked for, to be named in `Finish.stop`."""
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings are looked for in the text of this token and of later ones."""
    logprobs: bool = False
    """The engine's messages carry logprobs."""


class AnswerStream:
    """Events of one choice. `finished` turns true with the Finish event; later outputs are ignored."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        options: TextOptions,
        think: ThinkTokens | None,
        *,
        prompt_logprobs: bool = False,
    ) -> None:
        """think: None where reasoning is not told apart (raw completions). prompt_logprobs: the engine sends those of the prompt too."""
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
        self._alignment = Alignment()
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs_due = len(prompt) - 1 if prompt_logprobs else 0
        self.finished = False

    def push(self, output: Output) -> list[Event]:
        """Events of one engine message, whose `finish` is None or a Reason: other endings are errors, not answers.

        A stop token is the last of the tokens of the message that names it. Raises ValueError when logprobs of the answer's or the
        prompt's tokens are missing that the request asks for.
        """
        self._cached = max(self._cached, output.cached_tokens)
        self._prompt_logprobs.extend(output.prompt_logprobs)
        if self._options.logprobs and len(output.logprobs) != len(output.tokens):
            raise ValueError(f"the engine sent {len(output.logprobs)} logprobs for {len(output.tokens)} tokens of {output.id}")
        matched = None
        entries = output.logprobs if self._options.logprobs else repeat(None)
        for number, (token, entry) in enumerate(zip(output.tokens, entries, strict=False), start=1):
            ends = output.stop_token is not None and number == len(output.tokens)
            if ends and not self._options.include_stop:
                self._count(token)
                if entry is not None:
                    self._alignment.add(Placed(entry, self._alignment.made + self._detokenizer.holds, False))
                break
            matched = self._token(token, entry)
            if matched is not None:
                break
        if matched is None and output.finish is not None:
            matched = self._flush()
        if matched is not None:
            self._finish("stop", matched)
        elif output.finish is not None:
            reason: Reason = output.finish if output.finish in ("length", "repetition") else "stop"
            self._finish(reason, self._stop_token(output.stop_token))
        else:
            self._emit()
        events, self._events = self._events, []
        return events

    def _token(self, token: int, entry: TokenLogprobs | None) -> str | None:
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
        if part == "reasoning" or entry is None:
            return self._put(self._detokenizer.push(token))
        return self._put_aligned(token, entry)

    def _put_aligned(self, token: int, entry: TokenLogprobs) -> str | None:
        """The same for a token of the content whose place is wanted."""
        offset = self._alignment.made + self._detokenizer.gap(token)
        matched = self._put(self._detokenizer.push(token))
        begun = self._detokenizer.holds and bool(self._detokenizer.spelling(token))
        self._alignment.add(Placed(entry, offset, begun or self._alignment.made > offset))
        return matched

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
        self._alignment.made += len(text)
        if self._generated < self._options.min_tokens:
            self._text.append(text)
            return None
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
        if not text:
            return
        logprobs = self._alignment.release(text) if self._kind == "content" else ()
        delta = Delta(
            kind=self._kind,
            text=text,
            tokens=self._take_tokens(),
            generated=self._generated,
            logprobs=logprobs,
            prompt_logprobs=self._take_prompt_logprobs(),
        )
        self._events.append(delta)

    def _finish(self, reason: Reason, stop: str | int | None) -> None:
        self._emit()
        usage = AnswerUsage(prompt=self._prompt, cached=self._cached, generated=self._generated, reasoning=self._reasoning)
        finish = Finish(
            reason=reason,
            stop=stop,
            tokens=self._take_tokens(),
            usage=usage,
            logprobs=self._alignment.release(""),
            prompt_logprobs=self._take_prompt_logprobs(),
        )
        self._events.append(finish)
        self.finished = True

    def _take_tokens(self) -> tuple[int, ...]:
        tokens = tuple(self._tokens)
        self._tokens.clear()
        return tokens

    def _take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        taken, due = tuple(self._prompt_logprobs), self._prompt_logprobs_due
        if len(taken) != due:
            raise ValueError(f"the engine sent the logprobs of {len(taken)} tokens of a prompt before its answer; {due} are due")
        self._prompt_logprobs.clear()
        self._prompt_logprobs_due = 0
        return taken

    def _stop_token(self, token: int | None) -> int | None:
        return token if token in self._options.stop_token_ids else None


@dataclass(frozen=True)
class Answer:
    """One whole choice. A part the model never started is None."""

    content: str | None
    reasoning: str | None
    tokens: tuple[int, ...]
    reason: Reason
    stop: str | int | None
    usage: AnswerUsage
    logprobs: tuple[Placed, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]


def collect(events: Iterable[Event]) -> Answer:
    """Fold all events of one choice. `content` is None only when nothing but reasoning came."""
    parts: dict[Kind, list[str]] = {"content": [], "reasoning": []}
    tokens: list[int] = []
    logprobs: list[Placed] = []
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    for event in events:
        tokens.extend(event.tokens)
        logprobs.extend(event.logprobs)
        prompt_logprobs += event.prompt_logprobs
        if isinstance(event, Finish):
            finish = event
        else:
            parts[event.kind].append(event.text)
    if finish is None:
        raise ValueError("the events of an answer end with Finish")
    reasoning = "".join(parts["reasoning"]) if parts["reasoning"] else None
    content = "".join(parts["content"]) if parts["content"] or reasoning is None else None
    return Answer(content, reasoning, tuple(tokens), finish.reason, finish.stop, finish.usage, tuple(logprobs), prompt_logprobs)
