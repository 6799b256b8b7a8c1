"""How tokens are drawn: the fields that become SamplingParams.

Precedence of a value: request, then the checkpoint's generation config, then off.
"""

import logging
import re
from typing import Any

from revolta_serve.api.context import Api
from revolta_serve.api.fields import MAX_PATH, Fields, shown
from revolta_serve.errors import RequestError
from revolta_serve.text.defaults import MIN_P, PENALTY, REPETITION, TEMPERATURE, TOP_K, TOP_P
from revolta_serve.text.tokenizer import Tokenizer
from revolta_serve.types import SamplingParams

log = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5
COLDEST = 0.01
"""Sampling below this temperature divides by almost nothing; it is raised to it."""
MOST_BIAS = 100.0
MOST_TOKEN_IDS = 1024
MOST_ENDING_TOKENS = 128
"""Ids that are held back until an answer has min_tokens."""
MOST_BAD_WORDS = 128
"""Id sequences; a word usually makes two."""
MOST_BAD_TOKENS = 1024
LONGEST_WORD = 1024
"""Characters."""
INT32 = 2**31 - 1
_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def read_sampling(api: Api, fields: Fields, stop_token_ids: tuple[int, ...], *, logprobs: int, prompt_logprobs: int) -> SamplingParams:
    """Everything but the seed, which every choice has for itself, and the limit of reasoning, which depends on the prompt.

    stop_token_ids: every id that ends the answer. logprobs, prompt_logprobs: as in SamplingParams. Raises RequestError.
    """
    defaults, size = api.defaults, api.tokenizer.size
    min_tokens = fields.integer("min_tokens", 0, 0, INT32)
    if min_tokens and len(stop_token_ids) > MOST_ENDING_TOKENS:
        raise RequestError(
            f"stop_token_ids: with min_tokens at most {MOST_ENDING_TOKENS} ids may end the answer, got {len(stop_token_ids)} with those "
            "of the model; send fewer, or leave min_tokens out",
            param="stop_token_ids",
        )
    sampling = SamplingParams(
        temperature=usable_temperature(fields.number("temperature", defaults.temperature, TEMPERATURE)),
        top_k=max(0, fields.integer("top_k", defaults.top_k, int(TOP_K.low), int(TOP_K.high))),
        top_p=fields.number("top_p", defaults.top_p, TOP_P),
        min_p=fields.number("min_p", defaults.min_p, MIN_P),
        repetition_penalty=fields.number("repetition_penalty", defaults.repetition_penalty, REPETITION),
        presence_penalty=fields.number("presence_penalty", defaults.presence_penalty, PENALTY),
        frequency_penalty=fields.number("frequency_penalty", defaults.frequency_penalty, PENALTY),
        logit_bias=_bias(fields, size),
        allowed_tokens=_allowed(fields, size),
        bad_words=_bad_words(fields, api.tokenizer),
        min_tokens=min_tokens,
        ending_tokens=stop_token_ids if min_tokens else (),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        processed_logprobs=api.config.api.logprobs_mode == "processed",
    )
    _check_something_is_left(sampling)
    return sampling


def usable_temperature(asked: float) -> float:
    """0, which is greedy, for what is almost that; COLDEST, with a warning, for what is barely above."""
    if asked < GREEDY_BELOW:
        return 0.0
    if asked < COLDEST:
        log.warning("temperature %g is raised to %g, the coldest that is drawn from; 0 is greedy", asked, COLDEST)
    return max(asked, COLDEST)


def read_token_ids(fields: Fields, name: str, vocabulary: int) -> tuple[int, ...]:
    """A list of token ids, each of them once; an absent one is empty."""
    ids = fields.array(name) or []
    if len(ids) > MOST_TOKEN_IDS:
        raise fields.fail(name, f"at most {MOST_TOKEN_IDS} token ids")
    check_token_ids(ids, fields.at(name), vocabulary)
    return tuple(dict.fromkeys(ids))


def check_token_ids(ids: list[Any], path: str, vocabulary: int) -> None:
    """Raise RequestError naming the first entry that is not a token id."""
    for number, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            where = f"{path}[{number}]"
            raise RequestError(f"{where}: expected a token id between 0 and {vocabulary - 1}, got {shown(token)}", param=where)


def _bias(fields: Fields, vocabulary: int) -> tuple[tuple[int, float], ...]:
    """{"id": bias}, as JSON has it; what is beyond -100 or 100 counts as that."""
    bias: dict[int, float] = {}
    table = fields.object("logit_bias")
    for key, value in table.raw.items():
        path = table.at(key[:MAX_PATH])
        if not _ID.fullmatch(key) or int(key) >= vocabulary:
            expected = f"a token id between 0 and {vocabulary - 1}, in digits"
            raise RequestError(f"{path}: expected {expected}, as the name of a bias, got {shown(key)}", param=path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{path}: expected a number, got {shown(value)}", param=path)
        # Clamped first: an integer may be too large for a float.
        bias[int(key)] = float(max(-MOST_BIAS, min(MOST_BIAS, value)))
    return tuple(sorted((token, value) for token, value in bias.items() if value))


def _allowed(fields: Fields, vocabulary: int) -> tuple[int, ...]:
    if fields.array("allowed_token_ids") == []:
        raise fields.fail("allowed_token_ids", "at least one token id")
    return tuple(sorted(read_token_ids(fields, "allowed_token_ids", vocabulary)))


def _bad_words(fields: Fields, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Every word, alone and after a space: the two are different tokens. The name of an added token is that token."""
    words = fields.array("bad_words") or []
    if len(words) > MOST_BAD_WORDS:
        raise fields.fail("bad_words", f"at most {MOST_BAD_WORDS} words")
    sequences: dict[tuple[int, ...], None] = {}
    for number, word in enumerate(words):
        path = f"{fields.at('bad_words')}[{number}]"
        if not isinstance(word, str) or not 1 <= len(word) <= LONGEST_WORD:
            raise RequestError(f"{path}: expected a string of 1 to {LONGEST_WORD} characters, got {shown(word)}", param=path)
        bare = word.lstrip(" ")
        for spelling in (bare, f" {bare}") if bare else (word,):
            sequences[tuple(tokenizer.encode(spelling))] = None
    tokens = sum(map(len, sequences))
    if len(sequences) > MOST_BAD_WORDS or tokens > MOST_BAD_TOKENS:
        raise RequestError(
            f"{fields.at('bad_words')}: with and without a space before them these are {len(sequences)} sequences of {tokens} tokens; at "
            f"most {MOST_BAD_WORDS} sequences of {MOST_BAD_TOKENS} tokens are taken: send fewer or shorter ones",
            param=fields.at("bad_words"),
        )
    return tuple(sequences)


def _check_something_is_left(sampling: SamplingParams) -> None:
    """Raise RequestError where no token could be drawn at the very beginning."""
    if not sampling.allowed_tokens:
        return
    banned = {word[0] for word in sampling.bad_words if len(word) == 1}
    left = [token for token in sampling.allowed_tokens if token not in banned]
    if not left:
        raise RequestError("allowed_token_ids: bad_words forbid every one of them; allow another", param="allowed_token_ids")
    if sampling.min_tokens and set(left) <= set(sampling.ending_tokens):
        raise RequestError(
            "allowed_token_ids: each of them ends the answer, which min_tokens forbids; allow another, or leave min_tokens out",
            param="allowed_token_ids",
        )
