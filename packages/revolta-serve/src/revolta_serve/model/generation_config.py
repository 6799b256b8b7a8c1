"""What generation_config.json says: the ids that end an answer and the sampling defaults of the checkpoint's authors."""

from dataclasses import dataclass
from pathlib import Path

from revolta_serve.model.fields import Fields, read_json
from revolta_serve.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """Defaults of a request; a request's own fields win."""

    stop_ids: tuple[int, ...]
    """Ids that end an answer. They do not change the n-gram hash, which uses the model config's eos."""
    temperature: float = 1.0
    """0 is greedy: what a file with do_sample false asks for."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, directory: str | Path, model: ModelConfig) -> "GenerationConfig":
        """Read `directory`/generation_config.json; without the file the model's eos ids stop and sampling is plain.

        Raises ConfigError naming the field, its value and what is legal.
        """
        path = Path(directory) / "generation_config.json"
        if not path.exists():
            return cls(stop_ids=model.eos_ids)
        fields = Fields(read_json(path), str(path))
        greedy = not fields.flag("do_sample", True)
        temperature = fields.number("temperature", "a number >= 0", low=0.0, default=1.0)
        return cls(
            stop_ids=tuple(dict.fromkeys(fields.integers("eos_token_id", high=model.vocab - 1, default=model.eos_ids))),
            temperature=0.0 if greedy else temperature,
            top_k=fields.integer("top_k", low=0, default=0),
            top_p=fields.number("top_p", "a number in (0, 1]", low=1e-9, high=1.0, default=1.0),
            min_p=fields.number("min_p", "a number in [0, 1]", low=0.0, high=1.0, default=0.0),
            repetition_penalty=fields.number("repetition_penalty", "a number > 0", low=1e-9, default=1.0),
        )
