"""The request fields that chat and completions share: sampling, lengths, stops, streaming, scheduling.

Fields that would change the answer and are not supported are refused by name; nothing is dropped in silence but what says so here.
"""

import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from revolta_serve.api import logprobs as logprob_fields
from revolta_serve.api.context import Api
from revolta_serve.api.errors import UnsupportedParameterError
from revolta_serve.api.fields import Fields, shown
from revolta_serve.api.lengths import Lengths, read_lengths
from revolta_serve.api.sampling import read_sampling, read_token_ids
from revolta_serve.errors import RequestError
from revolta_serve.text.events import TextOptions
from revolta_serve.types import Repetition, SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_SALT = 1024
"""Characters."""
MAX_PATTERN = 1024
"""Tokens of a pattern that counts as a repetition."""
MAX_REPEATS = 1024
INT32 = 2**31 - 1
INT64 = (-(2**63), 2**63 - 1)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "length_penalty": (1,),
    "typical_p": (1,),
    "logits_processors": ([],),
    "grammar": ("",),
}
"""Unsupported fields of both routes and the values that ask for nothing; null and absence always do."""

IGNORED = ("kv_transfer_params", "vllm_xargs")
"""Objects for parts that this server does not have: their type is checked, and that is all."""


@dataclass(frozen=True)
class Options:
    """What a request asks for beside its prompt."""

    sampling: SamplingParams
    """Without a seed: `choice_seed` gives every choice its own."""
    seed: int
    n: int
    lengths: Lengths
    text: TextOptions
    stop_token_ids: tuple[int, ...]
    """Every id that ends the answer."""
    thinking_budget: int
    """Tokens of reasoning after which it is closed; -1: any number."""
    repetition: Repetition | None
    priority: int
    cache_salt: str
    prompt_logprobs: int
    """Most likely ids to report at each position of the prompt, by prompt_logprobs alone; -1: none."""
    echo: bool
    """The prompt is part of the answer, and so are its logprobs where those of the answer are asked for."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_prompt_text: bool
    ids_as_text: bool
    """Logprobs name a token token_id:N."""

    @property
    def runs(self) -> int:
        """Requests of the engine for each prompt: greedy choices are all the same, so one is made and shown n times."""
        return self.n if self.sampling.temperature > 0 else 1


def read_options(api: Api, fields: Fields, length_names: tuple[str, ...], logprobs: int, *, echo: bool = False) -> Options:
    """Read and check the shared fields. Raises RequestError.

    length_names: the spellings of max_tokens on this route. logprobs, echo: from the fields of the route.
    """
    refuse_unsupported(fields, NEUTRAL)
    for name in IGNORED:
        fields.object(name)
    # Between tokens of a byte-level vocabulary there is nothing that could be left out: the value makes no difference.
    fields.boolean("spaces_between_special_tokens", True)
    stream = fields.boolean("stream", False)
    if fields.has("stream_options") and not stream:
        raise RequestError("stream_options: only allowed with stream: true", param="stream_options")
    streaming = fields.object("stream_options")
    include_usage = streaming.boolean("include_usage", False)
    stop_token_ids = read_token_ids(fields, "stop_token_ids", api.tokenizer.size)
    ends = () if fields.boolean("ignore_eos", False) else api.defaults.stop_ids
    ending = tuple(dict.fromkeys((*ends, *stop_token_ids)))
    prompt_logprobs = logprob_fields.read_prompt_logprobs(api, fields, stream=stream)
    asked = max(prompt_logprobs, logprobs) if echo else prompt_logprobs
    sampling = read_sampling(api, fields, ending, logprobs=logprobs, prompt_logprobs=asked)
    seed = fields.integer("seed", -1, *INT64)
    return Options(
        sampling=sampling,
        seed=secrets.randbits(63) if seed == -1 else seed,
        n=fields.integer("n", 1, 1, MAX_CHOICES),
        lengths=read_lengths(fields, length_names),
        text=TextOptions(
            stops=_stops(fields),
            stop_token_ids=stop_token_ids,
            include_stop=fields.boolean("include_stop_str_in_output", False),
            skip_special_tokens=fields.boolean("skip_special_tokens", True),
            min_tokens=sampling.min_tokens,
            logprobs=logprobs >= 0,
        ),
        stop_token_ids=ending,
        thinking_budget=fields.integer("thinking_token_budget", -1, -1, INT32),
        repetition=_repetition(fields),
        priority=_priority(api, fields),
        cache_salt=_salt(fields),
        prompt_logprobs=prompt_logprobs,
        echo=echo,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=streaming.boolean("continuous_usage_stats", False) and include_usage,
        return_token_ids=fields.boolean("return_token_ids", False),
        return_prompt_text=fields.boolean("return_prompt_text", False),
        ids_as_text=fields.boolean("return_tokens_as_token_ids", False),
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


def _repetition(fields: Fields) -> Repetition | None:
    """repetition_detection; one of patterns of no length asks for nothing."""
    if not fields.has("repetition_detection"):
        return None
    given = fields.object("repetition_detection")
    longest = given.integer("max_pattern_size", 0, 0, MAX_PATTERN)
    shortest = given.integer("min_pattern_size", 0, 0, MAX_PATTERN)
    if shortest > longest:
        raise given.fail("min_pattern_size", f"at most max_pattern_size, {longest}")
    if not longest:
        return None
    count = given.integer("min_count", None, 2, MAX_REPEATS)
    if count is None:
        raise given.fail("min_count", f"an integer between 2 and {MAX_REPEATS}")
    return Repetition(shortest=max(1, shortest), longest=longest, count=count)


def _priority(api: Api, fields: Fields) -> int:
    priority = fields.integer("priority", 0, -INT32, INT32)
    if priority and api.config.schedule.policy != "priority":
        raise UnsupportedParameterError(
            f"{fields.at('priority')}: {priority} needs schedule.policy priority, and this server has {api.config.schedule.policy}; "
            "leave it out or set it to 0",
            param=fields.at("priority"),
        )
    return priority


def _salt(fields: Fields) -> str:
    salt = fields.string("cache_salt", None)
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT:
        raise fields.fail("cache_salt", f"a string of 1 to {MAX_SALT} characters")
    return salt
