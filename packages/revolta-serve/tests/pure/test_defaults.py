"""Stop ids and sampling defaults of a checkpoint."""

import pytest

from revolta_serve.errors import CheckpointError
from revolta_serve.text.defaults import GenerationDefaults
from support.text import directory, tokenizer


def test_a_checkpoint() -> None:
    defaults = GenerationDefaults.load(directory())
    added = tokenizer().added
    assert defaults == GenerationDefaults((added["<|im_end|>"], added["<|endoftext|>"]), temperature=0.6, top_k=20, top_p=0.95)


@pytest.mark.parametrize(
    ("generation", "config", "stop_ids"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, (1, 2)),
        ({}, {"eos_token_id": 3}, (3,)),
        ({}, {"text_config": {"eos_token_id": 4}}, (4,)),
        ({"eos_token_id": 0}, {}, (0,)),
    ],
)
def test_where_stop_ids_come_from(generation: dict, config: dict, stop_ids: tuple[int, ...]) -> None:  # type: ignore[type-arg]
    assert GenerationDefaults.from_dicts(generation, config).stop_ids == stop_ids


def test_greedy_checkpoints() -> None:
    assert GenerationDefaults.from_dicts({"do_sample": False, "temperature": 0.6, "eos_token_id": 1}, {}).temperature == 0.0


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({}, "eos_token_id is None"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"eos_token_id": [True]}, "eos_token_id"),
        ({"eos_token_id": 1, "temperature": "hot"}, "temperature"),
        ({"eos_token_id": 1, "repetition_penalty": 1.1}, "repetition_penalty"),
    ],
)
def test_what_is_refused(generation: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(CheckpointError, match=message):
        GenerationDefaults.from_dicts(generation, {})
    GenerationDefaults.from_dicts({"eos_token_id": 1, "repetition_penalty": 1.0}, {})


def test_a_directory_without_config(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError, match=r"config\.json"):
        GenerationDefaults.load(tmp_path)
