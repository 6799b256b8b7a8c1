"""What the checkpoint says about generation: stop ids and sampling defaults (generation_config.json, config.json)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revolta_serve.errors import CheckpointError

UNUSED = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_new_tokens": 0}
"""Fields that would change the answer and are not supported: only their neutral value is accepted."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Used where a request says nothing. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = None

    @classmethod
    def load(cls, directory: str | Path) -> "GenerationDefaults":
        """Read DIRECTORY. Stop ids: eos_token_id of generation_config.json, else of config.json, else of its text_config."""
        generation = _read(Path(directory) / "generation_config.json", required=False)
        config = _read(Path(directory) / "config.json", required=True)
        return cls.from_dicts(generation, config, str(directory))

    @classmethod
    def from_dicts(cls, generation: dict[str, Any], config: dict[str, Any], origin: str = "generation_config.json") -> "GenerationDefaults":
        """The same from decoded files. Raises CheckpointError on a wrong type, an unsupported field, or when nothing ends an answer."""
        text = config.get("text_config") or {}
        sources = (generation.get("eos_token_id"), config.get("eos_token_id"), text.get("eos_token_id"))
        eos: Any = next((value for value in sources if value is not None), None)
        stop_ids: list[Any] = eos if isinstance(eos, list) else [eos]
        if not stop_ids or not all(type(token) is int and token >= 0 for token in stop_ids):
            raise CheckpointError(f"{origin}: eos_token_id is {eos!r}; one token id or a list of them is needed to end an answer")
        for name, neutral in UNUSED.items():
            value = generation.get(name)
            if value is not None and value != neutral:
                raise CheckpointError(f"{origin}: {name} {value!r} is not supported; remove it or set it to {neutral}")
        greedy = generation.get("do_sample") is False
        return cls(
            stop_ids=tuple(stop_ids),
            temperature=0.0 if greedy else _number(generation, "temperature", 1.0, origin),
            top_k=max(0, int(_number(generation, "top_k", 0, origin))),
            top_p=_number(generation, "top_p", 1.0, origin),
            min_p=_number(generation, "min_p", 0.0, origin),
            max_tokens=int(_number(generation, "max_new_tokens", 0, origin)) or None,
        )


def _number(raw: dict[str, Any], name: str, default: float, origin: str) -> float:
    value = raw.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{origin}: {name} is {value!r}, not a number")
    return float(value)


def _read(path: Path, *, required: bool) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return raw
