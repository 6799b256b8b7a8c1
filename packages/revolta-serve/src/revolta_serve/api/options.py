"""The request fields that chat and completions share: sampling, lengths, stops, streaming.

Precedence of a sampling value: request, then the checkpoint's generation config, then off. Fields that would change the answer and
are not supported are refused by name; nothing is dropped in silence.
"""

import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from revolta_serve.api.errors import UnsupportedParameterError
from revolta_serve.api.fields import Fields, shown
from revolta_serve.errors import ContextLengthError, RequestError
from revolta_serve.text.defaults import MIN_P, TEMPERATURE, TOP_K, TOP_P, GenerationDefaults
from revolta_serve.text.events import TextOptions
from revolta_serve.types import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
INT64 = (-(2**63), 2**63 - 1)
GREEDY_BELOW = 1e-5
COLDEST = 0.01
"""Sampling below this temperature divides by almost nothing; it is raised to it."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "truncate_prompt_tokens": (),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "use_beam_search": (False,),
    "priority": (0,),
    "cache_salt": (),
    "response_format": ({"type": "text"},),
    "length_penalty": (1,),
    "typical_p": (1,),
    "logits_processors": ([],),
    "grammar": ("",),
}
"""Unsupported fields of both routes and the values that ask for nothing; null and absence always do."""


@dataclass(frozen=True)
class Options:
    """What a request asks for beside its prompt."""

    sampling: SamplingParams
    """Without a seed: `choice_seed` gives every choice its own."""
    seed: int
    n: int
    max_tokens: int | None
    """None where the request leaves it to the server."""
    max_tokens_name: str
    text: TextOptions
    stop_token_ids: tuple[int, ...]
    """Every id that ends the answer."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


def read_options(fields: Fields, defaults: GenerationDefaults, vocabulary: int, length_names: tuple[str, ...]) -> Options:
    """Read and check the shared fields. `length_names` are the spellings of max_tokens on this route."""
    refuse_unsupported(fields, NEUTRAL)
    stream = fields.boolean("stream", False)
    if fields.has("stream_options") and not stream:
        raise RequestError("stream_options: only allowed with stream: true", param="stream_options")
    streaming = fields.object("stream_options")
    include_usage = streaming.boolean("include_usage", False)
    max_tokens, name = _max_tokens(fields, length_names)
    stop_token_ids = _token_ids(fields, "stop_token_ids", vocabulary)
    ends = () if fields.boolean("ignore_eos", False) else defaults.stop_ids
    seed = fields.integer("seed", -1, *INT64)
    return Options(
        sampling=_sampling(fields, defaults),
        seed=secrets.randbits(63) if seed == -1 else seed,
        n=fields.integer("n", 1, 1, MAX_CHOICES),
        max_tokens=max_tokens,
        max_tokens_name=name,
        text=TextOptions(
            stops=_stops(fields),
            stop_token_ids=stop_token_ids,
            include_stop=fields.boolean("include_stop_str_in_output", False),
            skip_special_tokens=fields.boolean("skip_special_tokens", True),
        ),
        stop_token_ids=tuple(dict.fromkeys((*ends, *stop_token_ids))),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=streaming.boolean("continuous_usage_stats", False) and include_usage,
        return_token_ids=fields.boolean("return_token_ids", False),
    )


def refuse_unsupported(fields: Fields, table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedParameterError for the first field of `table` whose value is not one of its neutral ones."""
    for name, neutral in table.items():
        value = fields.raw.get(name)
        if value is None or any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral):
            continue
        way_out = f"leave it out or set it to {shown(neutral[0])}" if neutral else "leave it out"
        raise UnsupportedParameterError(f"{fields.at(name)}: {shown(value)} is not supported; {way_out}", param=fields.at(name))


def choice_seed(seed: int, choice: int) -> int:
    """63 bits: the key of the noise of one choice, from the request's seed and the index of the choice among those of its prompt."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qQ", seed, choice)) >> 1


def answer_budget(prompt: int, limit: int, options: Options, default: int | None, param: str) -> int:
    """Tokens an answer to a prompt of `prompt` tokens may have in a context of `limit`. Raises ContextLengthError.

    An explicit max_tokens must fit; a default (None: as long as possible) is cut to what is left.
    """
    left = limit - prompt
    maximum = f"This model's maximum context length is {limit} tokens"
    if left < 1:
        raise ContextLengthError(
            f"{maximum}, but the prompt alone has {prompt} tokens and an answer needs at least 1. Shorten the prompt.", param=param
        )
    if options.max_tokens is None:
        return left if default is None else min(left, default)
    if options.max_tokens > left:
        raise ContextLengthError(
            f"{maximum}, but you requested {prompt + options.max_tokens} tokens: {prompt} in the prompt and {options.max_tokens} in the "
            f"answer ({options.max_tokens_name}). Shorten the prompt or ask for at most {left} tokens.",
            param=options.max_tokens_name,
        )
    return options.max_tokens


def _sampling(fields: Fields, defaults: GenerationDefaults) -> SamplingParams:
    temperature = fields.number("temperature", defaults.temperature, TEMPERATURE)
    temperature = 0.0 if temperature < GREEDY_BELOW else max(temperature, COLDEST)
    return SamplingParams(
        temperature=temperature,
        top_k=max(0, fields.integer("top_k", defaults.top_k, int(TOP_K.low), int(TOP_K.high))),
        top_p=fields.number("top_p", defaults.top_p, TOP_P),
        min_p=fields.number("min_p", defaults.min_p, MIN_P),
    )


def _max_tokens(fields: Fields, names: tuple[str, ...]) -> tuple[int | None, str]:
    given = {name: fields.integer(name, None, 1) for name in names if fields.has(name)}
    if len(set(given.values())) > 1:
        stated = " and ".join(f"{name} {shown(value)}" for name, value in given.items())
        raise RequestError(f"{stated} contradict each other; send one", param=names[0])
    return next(((value, name) for name, value in given.items()), (None, names[0]))


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw.get("stop")
    stops = [value] if isinstance(value, str) else (fields.array("stop") or [])
    if len(stops) > MAX_STOPS:
        raise fields.fail("stop", f"at most {MAX_STOPS} strings")
    for number, stop in enumerate(stops):
        path = fields.at("stop") if isinstance(value, str) else f"{fields.at('stop')}[{number}]"
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise RequestError(f"{path}: expected a string of 1 to {MAX_STOP_LENGTH} characters, got {shown(stop)}", param=path)
    return tuple(dict.fromkeys(stops))


def _token_ids(fields: Fields, name: str, vocabulary: int) -> tuple[int, ...]:
    ids = fields.array(name) or []
    if len(ids) > MAX_STOP_TOKENS:
        raise fields.fail(name, f"at most {MAX_STOP_TOKENS} token ids")
    check_token_ids(ids, fields.at(name), vocabulary)
    return tuple(ids)


def check_token_ids(ids: list[Any], path: str, vocabulary: int) -> None:
    """Raise RequestError naming the first entry that is not a token id."""
    for number, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            where = f"{path}[{number}]"
            raise RequestError(f"{where}: expected a token id between 0 and {vocabulary - 1}, got {shown(token)}", param=where)
