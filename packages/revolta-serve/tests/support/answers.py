"""What a client has of an answer, however it came: chat or completion, whole or in events."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Choice:
    """One choice."""

    text: str = ""
    reasoning: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None
    logprobs: list[Any] = field(default_factory=list)
    """One entry for each token that is told of."""
    prompt_logprobs: list[Any] = field(default_factory=list)

    def add(self, part: dict[str, Any]) -> None:
        """Take a choice of a whole answer or of an event."""
        message = part.get("message") or part.get("delta") or {"content": part.get("text")}
        self.text += message.get("content") or ""
        self.reasoning += message.get("reasoning") or ""
        self.tokens += part.get("token_ids") or ()
        self.finish = part.get("finish_reason") or self.finish
        self.stop = part.get("stop_reason") or self.stop
        self.prompt_logprobs += part.get("prompt_logprobs") or ()
        told = part.get("logprobs")
        if told is not None:
            columns = (told["content"],) if "content" in told else [told[name] for name in sorted(told)]
            self.logprobs += zip(*columns, strict=True)


@dataclass(slots=True)
class Answer:
    """All choices by their index, and the counts where they were asked for. Whether anything was reused makes no difference."""

    choices: dict[int, Choice]
    prompt_logprobs: list[Any]
    counts: tuple[int, int, int] | None
    """Tokens of the prompts, of all answers, and of their reasoning parts."""

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Of every choice."""
        return {index: choice.tokens for index, choice in self.choices.items()}


def fold(pieces: Iterable[dict[str, Any]]) -> Answer:
    """An answer from its only piece, or from all events of its stream. Raises ValueError if a choice has no end."""
    answer = Answer({}, [], None)
    for piece in pieces:
        for part in piece["choices"]:
            answer.choices.setdefault(part["index"], Choice()).add(part)
        answer.prompt_logprobs += piece.get("prompt_logprobs") or ()
        usage = piece.get("usage")
        if usage is not None:
            reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
            answer.counts = (usage["prompt_tokens"], usage["completion_tokens"], reasoning)
    unfinished = [index for index, choice in answer.choices.items() if choice.finish is None]
    if unfinished or not answer.choices:
        raise ValueError(f"choices {unfinished} of {sorted(answer.choices)} have no finish_reason")
    return answer
