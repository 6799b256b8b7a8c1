"""Stop ids and sampling defaults of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from revolta_serve.errors import CheckpointError
from revolta_serve.text.defaults import GenerationDefaults
from support.text import directory, tokenizer

SIZE = 600


def test_a_checkpoint() -> None:
    defaults = GenerationDefaults.load(directory(), tokenizer().size)
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
def test_where_stop_ids_come_from(generation: dict[str, Any], config: dict[str, Any], stop_ids: tuple[int, ...]) -> None:
    assert GenerationDefaults.from_dicts(generation, config, SIZE).stop_ids == stop_ids


def test_greedy_checkpoints() -> None:
    assert GenerationDefaults.from_dicts({"do_sample": False, "temperature": 0.6, "eos_token_id": 1}, {}, SIZE).temperature == 0.0


NOT_NUMBERS: list[Any] = ["hot", True, False, [], {}, [1.0], "0.5", float("nan"), float("inf"), -float("inf")]
WRONG: dict[str, tuple[list[Any], str]] = {
    "temperature": ([*NOT_NUMBERS, -1, -1e-9, 1e7, 10**400], "a number between 0 and 1e+06 is expected"),
    "top_p": ([*NOT_NUMBERS, 0, -0.1, 1.0001, 7], "a number above 0 and at most 1 is expected"),
    "min_p": ([*NOT_NUMBERS, -0.1, 1.0001], "a number between 0 and 1 is expected"),
    "top_k": ([*NOT_NUMBERS, -2, 1.5, 20.0, 2**31], "an integer between -1 and 2147483647 is expected"),
    "max_new_tokens": ([*NOT_NUMBERS, 0, -5, 2.0, 10**400], "an integer between 1 and 2147483647 is expected"),
    "do_sample": (["no", "false", 0, 1, 0.0, [], {}], "true or false is expected"),
    "eos_token_id": (
        [[], {}, "1", True, [True], -1, [1, -1], SIZE, [1, SIZE], 10**400, 1.0, [None]],
        f"one token id between 0 and {SIZE - 1}",
    ),
    "repetition_penalty": ([*NOT_NUMBERS, 0, 0.009, 10.1, 99, 10**400], "a number between 0.01 and 10 is expected"),
    "presence_penalty": ([*NOT_NUMBERS, -2.1, 2.1, 99], "a number between -2 and 2 is expected"),
    "frequency_penalty": ([*NOT_NUMBERS, -2.1, 2.1, 99], "a number between -2 and 2 is expected"),
    "min_new_tokens": ([1, False], "remove it or set it to 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    """As it stands in a file: the error names the file, the field, its value and what is legal."""
    values, legal = WRONG[name]
    (tmp_path / "config.json").write_text("{}")
    for value in values:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, name: value}))
        with pytest.raises(CheckpointError) as caught:
            GenerationDefaults.load(tmp_path, SIZE)
        for word in (f"{tmp_path / 'generation_config.json'}: {name} ", repr(value)[:80], legal):
            assert word in caught.value.message
        assert len(caught.value.message) < 400 + len(str(tmp_path))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 1, name: None} if name != "eos_token_id" else {name: [0, SIZE - 1]})
    )
    GenerationDefaults.load(tmp_path, SIZE)


def test_the_ends_of_the_ranges() -> None:
    low: dict[str, Any] = {"eos_token_id": 0, "temperature": 0, "top_p": 1e-9, "min_p": 0, "top_k": -1, "max_new_tokens": 1}
    low |= {"do_sample": True, "repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": -2}
    assert GenerationDefaults.from_dicts(low, {}, SIZE) == GenerationDefaults((0,), 0.0, 0, 1e-9, 0.0, 0.01, -2.0, -2.0, 1)
    high: dict[str, Any] = {"eos_token_id": SIZE - 1, "temperature": 1e6, "top_p": 1, "min_p": 1, "top_k": 2**31 - 1}
    high |= {"max_new_tokens": 2**31 - 1, "repetition_penalty": 10, "presence_penalty": 2, "frequency_penalty": 2}
    expected = GenerationDefaults((SIZE - 1,), 1e6, 2**31 - 1, 1.0, 1.0, 10.0, 2.0, 2.0, 2**31 - 1)
    assert GenerationDefaults.from_dicts(high, {}, SIZE) == expected


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({}, "config.json: eos_token_id is None"),
        ({"eos_token_id": SIZE}, "config.json: eos_token_id is 600"),
        ({"text_config": {"eos_token_id": -1}}, "config.json: text_config: eos_token_id is -1"),
        ({"text_config": "none"}, "config.json: eos_token_id is None"),
    ],
)
def test_a_stop_id_is_blamed_on_its_file(config: dict[str, Any], place: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        GenerationDefaults.from_dicts({}, config, SIZE, "model")
    assert caught.value.message.startswith(f"model/{place}; ")


@pytest.mark.parametrize("text", ["[]", "", "{", "null", "[" * 100_000, b"\xff"])
def test_files_that_are_no_object(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        GenerationDefaults.load(tmp_path, SIZE)


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        GenerationDefaults.load(tmp_path, SIZE)
