"""A prompt that is ready for the engine: cut if the request says so, with room for an answer, and with what follows from its ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from revolta_serve.api.context import Api
from revolta_serve.api.lengths import answer_budget
from revolta_serve.api.options import Options
from revolta_serve.errors import RequestError
from revolta_serve.text.boundaries import Marks, spread
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.types import Thinking

MOST_PROMPT_LOGPROBS = 64 << 20
"""Bytes of the prompt logprobs of one request: 12 for every token they tell of, 8 for every position."""


NO_MARKS = Marks()


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request and what goes with it."""

    ids: tuple[int, ...]
    max_tokens: int
    """Tokens each of its answers may have."""
    boundaries: tuple[int, ...]
    opening: int
    """Where its system text ends; 0: it has none, or is cut within it (GenerateRequest.opening)."""
    thinking: Thinking | None
    text: str
    """What the ids spell, special tokens included; empty where the answer does not show it."""


def ready(api: Api, options: Options, ids: Sequence[int], default: int | None, param: str, marks: Marks = NO_MARKS) -> Prompt:
    """Cut and check a prompt.

    default: as for `answer_budget`. param: the prompt's field. marks: where it may part from others. Raises ContextLengthError, and
    RequestError for a min_tokens that its answer cannot reach.
    """
    limit, lengths = api.engine.max_model_len, options.lengths
    part = lengths.kept(len(ids), limit, default)
    used = tuple(ids[part])
    budget = answer_budget(len(used), limit, lengths, default, param)
    least = options.sampling.min_tokens
    if least > budget:
        raise RequestError(
            f"min_tokens: {least} is more than the {budget} tokens the answer may have; lower it, or raise {lengths.name} where the "
            f"context of {limit} tokens allows",
            param="min_tokens",
        )
    thinking = _thinking(api.think, used, options.thinking_budget)
    text = api.tokenizer.decode(used) if options.echo or options.return_prompt_text else ""
    marks = marks.shifted(part.start)
    opening = marks.opening if marks.opening <= len(used) else 0
    return Prompt(used, budget, spread(marks.places, len(used)), opening, thinking, text)


def check_prompt_logprobs(options: Options, prompts: Sequence[Prompt]) -> None:
    """Raise RequestError where the logprobs of the prompts would take too much memory."""
    count = options.sampling.prompt_logprobs
    runs = options.runs if options.stream else 1
    positions = sum(len(prompt.ids) - 1 for prompt in prompts) * runs
    size = positions * (12 * (1 + count) + 8)
    if count >= 0 and size > MOST_PROMPT_LOGPROBS:
        name = "prompt_logprobs" if options.prompt_logprobs == count else "logprobs"
        raise RequestError(
            f"{name}: {count} most likely tokens at {positions} positions of the prompt take {size} bytes; at most "
            f"{MOST_PROMPT_LOGPROBS} are given: ask for fewer, or send a shorter prompt",
            param=name,
        )


def _thinking(tokens: ThinkTokens, ids: Sequence[int], budget: int) -> Thinking | None:
    """The limit of the reasoning part, unless there is none: a prompt that has closed its reasoning gets an answer without."""
    if budget < 0:
        return None
    last = tokens.last(ids)
    if last == tokens.close:
        return None
    return Thinking(budget=budget, close=tokens.close, open=tokens.open, begun=last == tokens.open)
