"""What the checkpoint says about generation: stop ids and sampling defaults (generation_config.json, config.json).

The ranges of the sampling values are here too: a request may ask for what a checkpoint may, and for nothing else.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revolta_serve.errors import CheckpointError

GENERATION, CONFIG = "generation_config.json", "config.json"


@dataclass(frozen=True)
class Range:
    """Legal numbers: low..high, without low itself if `above`, integers only if `whole`. A bool is no number."""

    low: float
    high: float
    above: bool = False
    whole: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a decoded JSON value is one of these numbers."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a number"
        low, high = (f"{int(end)}" if self.whole else f"{end:g}" for end in (self.low, self.high))
        return f"{kind} above {low} and at most {high}" if self.above else f"{kind} between {low} and {high}"


TEMPERATURE = Range(0, 1e6)
TOP_K = Range(-1, 2**31 - 1, whole=True)
TOP_P = Range(0, 1, above=True)
MIN_P = Range(0, 1)
REPETITION = Range(0.01, 10)
"""Beyond it a logit may leave what float32 can hold."""
PENALTY = Range(-2, 2)
"""Of presence and frequency."""
LENGTH = Range(1, 2**31 - 1, whole=True)

UNUSED = {"min_new_tokens": 0}
"""Fields that would change the answer and are not supported: only their neutral value is accepted."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Used where a request says nothing. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalties of 1, 0 and 0 are off."""

    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None

    @classmethod
    def load(cls, directory: str | Path, vocabulary: int) -> "GenerationDefaults":
        """Read DIRECTORY. Stop ids: eos_token_id of generation_config.json, else of config.json, else of its text_config.

        vocabulary: ids of the tokenizer are below it. Raises CheckpointError naming file, field, value and what is legal.
        """
        generation = _read(Path(directory) / GENERATION, required=False)
        config = _read(Path(directory) / CONFIG, required=True)
        return cls.from_dicts(generation, config, vocabulary, directory)

    @classmethod
    def from_dicts(
        cls, generation: dict[str, Any], config: dict[str, Any], vocabulary: int, directory: str | Path = ""
    ) -> "GenerationDefaults":
        """The same from decoded files of `directory`."""
        origin = str(Path(directory) / GENERATION)
        sampled = generation.get("do_sample")
        if sampled is not None and not isinstance(sampled, bool):
            raise CheckpointError(f"{origin}: do_sample is {_shown(sampled)}; true or false is expected")
        for name, neutral in UNUSED.items():
            value = generation.get(name)
            if value is not None and (isinstance(value, bool) or value != neutral):
                raise CheckpointError(f"{origin}: {name} {_shown(value)} is not supported; remove it or set it to {neutral}")
        temperature = _number(generation, "temperature", 1.0, TEMPERATURE, origin)
        length = _number(generation, "max_new_tokens", None, LENGTH, origin)
        return cls(
            stop_ids=_stop_ids(generation, config, vocabulary, Path(directory)),
            temperature=0.0 if sampled is False else float(temperature),
            top_k=max(0, _number(generation, "top_k", 0, TOP_K, origin)),
            top_p=float(_number(generation, "top_p", 1.0, TOP_P, origin)),
            min_p=float(_number(generation, "min_p", 0.0, MIN_P, origin)),
            repetition_penalty=float(_number(generation, "repetition_penalty", 1.0, REPETITION, origin)),
            presence_penalty=float(_number(generation, "presence_penalty", 0.0, PENALTY, origin)),
            frequency_penalty=float(_number(generation, "frequency_penalty", 0.0, PENALTY, origin)),
            max_tokens=length,
        )


def _stop_ids(generation: dict[str, Any], config: dict[str, Any], vocabulary: int, directory: Path) -> tuple[int, ...]:
    text = config.get("text_config")
    sources = {GENERATION: generation, CONFIG: config, f"{CONFIG}: text_config": text if isinstance(text, dict) else {}}
    where, eos = next(((name, raw["eos_token_id"]) for name, raw in sources.items() if raw.get("eos_token_id") is not None), (CONFIG, None))
    ids: list[Any] = eos if isinstance(eos, list) else [eos]
    if not ids or not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise CheckpointError(
            f"{directory / where}: eos_token_id is {_shown(eos)}; one token id between 0 and {vocabulary - 1}, or a list of them, is "
            "needed to end an answer"
        )
    return tuple(ids)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _number(raw: dict[str, Any], name: str, default: Any, legal: Range, origin: str) -> Any:
    value = raw.get(name)
    if value is None:
        return default
    if not legal.holds(value):
        raise CheckpointError(f"{origin}: {name} is {_shown(value)}; {legal} is expected")
    return value


def _read(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return raw
