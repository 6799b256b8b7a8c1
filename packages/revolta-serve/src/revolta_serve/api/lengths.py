"""How long prompt and answer may be: max_tokens, truncate_prompt_tokens, and the context they share."""

from dataclasses import dataclass
from typing import Literal

from revolta_serve.api.fields import Fields, shown
from revolta_serve.errors import ContextLengthError, RequestError

FITTING = -1
"""truncate_prompt_tokens that leaves room for the answer."""
INT32 = 2**31 - 1


@dataclass(frozen=True)
class Lengths:
    """What a request says about lengths, in tokens."""

    max_tokens: int | None
    """Of the answer; None where the request leaves it to the server."""
    name: str
    """The field that says so, or would."""
    truncate: int | None
    """Of the prompt, at most; FITTING: what leaves room for the answer; None: all of it."""
    side: Literal["left", "right"]
    """Where a prompt loses tokens: at its beginning or at its end."""

    def kept(self, prompt: int, limit: int, default: int | None) -> slice:
        """The part of a prompt of `prompt` tokens that is used in a context of `limit`, the default answer having `default` tokens."""
        most = prompt if self.truncate is None else self.truncate
        if self.truncate == FITTING:
            # Where nothing would be left the prompt stays as it is, and answer_budget says what does not fit.
            most = limit - (self.max_tokens or default or 1)
        cut = max(0, prompt - most) if most > 0 else 0
        return slice(cut, prompt) if self.side == "left" else slice(0, prompt - cut)


def read_lengths(fields: Fields, names: tuple[str, ...]) -> Lengths:
    """`names` are the spellings of max_tokens on this route, the usual one first. Raises RequestError."""
    given = {name: fields.integer(name, None, 1) for name in names if fields.has(name)}
    if len(set(given.values())) > 1:
        stated = " and ".join(f"{name} {shown(value)}" for name, value in given.items())
        raise RequestError(f"{stated} contradict each other; send one", param=names[0])
    max_tokens, name = next(((value, name) for name, value in given.items()), (None, names[0]))
    truncate = fields.integer("truncate_prompt_tokens", None, FITTING, INT32)
    if truncate == 0:
        raise fields.fail("truncate_prompt_tokens", f"{FITTING} or an integer of at least 1")
    side = fields.choice("truncation_side", ("left", "right"), "left")
    return Lengths(max_tokens, name, truncate, "right" if side == "right" else "left")


def answer_budget(prompt: int, limit: int, lengths: Lengths, default: int | None, param: str) -> int:
    """Tokens an answer to a prompt of `prompt` tokens may have in a context of `limit`. Raises ContextLengthError.

    An explicit max_tokens must fit; a default (None: as long as possible) is cut to what is left.
    """
    left = limit - prompt
    maximum = f"This model's maximum context length is {limit} tokens"
    if left < 1:
        raise ContextLengthError(
            f"{maximum}, but the prompt alone has {prompt} tokens and an answer needs at least 1. Shorten the prompt.", param=param
        )
    if lengths.max_tokens is None:
        return left if default is None else min(left, default)
    if lengths.max_tokens > left:
        raise ContextLengthError(
            f"{maximum}, but you requested {prompt + lengths.max_tokens} tokens: {prompt} in the prompt and {lengths.max_tokens} in the "
            f"answer ({lengths.name}). Shorten the prompt or ask for at most {left} tokens.",
            param=lengths.name,
        )
    return lengths.max_tokens
