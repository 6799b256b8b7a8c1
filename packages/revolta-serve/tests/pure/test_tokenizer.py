"""Ids against transformers, bytes against the vocabulary, and plain text that spells added tokens."""

import json

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from revolta_serve.errors import CheckpointError
from revolta_serve.text.tokenizer import Tokenizer, byte_alphabet
from support.text import SIZE, directory, oracle, tokenizer

TEXTS = [
    "",
    "a",
    "hello world",
    "  two\n\n\nlines ",
    "naïve café",
    "🙂👨‍👩‍👧",
    "12345",
    "it's WE'LL",
    "\t\x00\x7f",
    "한국어 中文 ไทย",
    "<think",
    "e\u0301 \u212b",
]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_is_the_oracles(text: str) -> None:
    assert tokenizer().encode(text) == oracle().encode(text, add_special_tokens=False)
    assert tokenizer().encode_plain(text) == tokenizer().encode(text)


@settings(deadline=None)
@given(st.text(max_size=60))
@example("<think>")
def test_plain_text_round_trips_to_its_composed_form(text: str) -> None:
    import unicodedata

    ids = tokenizer().encode_plain(text)
    assert tokenizer().decode(ids) == unicodedata.normalize("NFC", text)
    # The oracle splits only those added tokens that are marked special; of the others, such as <think>, plain text knows none either.
    unmarked = [str(token) for token in oracle().added_tokens_decoder.values() if not token.special]
    assume(not any(literal in text for literal in unmarked))
    assert ids == oracle().encode(text, add_special_tokens=False, split_special_tokens=True)


def test_trusted_text_parses_added_tokens_and_plain_text_does_not() -> None:
    for literal, token in tokenizer().added.items():
        text = f"a {literal}b"
        assert token in tokenizer().encode(text)
        plain = tokenizer().encode_plain(text)
        assert not set(plain) & set(tokenizer().added.values())
        assert tokenizer().decode(plain) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", " b", "\n", "<|im_start|>", "<|im_end|>", "<think>", "<thi", "nk>", "é"]), max_size=12))
def test_split_then_encode_is_encode(parts: list[str]) -> None:
    text = "".join(parts)
    assert tokenizer().encode_pieces(tokenizer().split(text)) == tokenizer().encode(text)


def test_the_longest_of_two_added_tokens_at_one_place_wins() -> None:
    raw = json.loads((directory() / "tokenizer.json").read_text())
    entry = {**raw["added_tokens"][-1], "id": SIZE, "content": "<think>more"}
    two = Tokenizer({**raw, "added_tokens": [*raw["added_tokens"], entry]})
    assert two.split("x<think>more") == ["x", SIZE] == ["x", *two.encode("<think>more")]
    assert two.size == SIZE + 1


def test_bytes_cover_every_id() -> None:
    assert len(byte_alphabet()) == 256
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert all(tokenizer().token_bytes(token) for token in range(tokenizer().size))
    assert tokenizer().size == SIZE
    assert tokenizer().token_bytes(SIZE) == b"" == tokenizer().token_bytes(-1)
    assert tokenizer().token_bytes(tokenizer().added["<think>"]) == b"<think>"


def test_decode_skips_only_special_tokens() -> None:
    ids = tokenizer().encode("<think>x</think><|im_end|>")
    assert tokenizer().decode(ids) == "<think>x</think><|im_end|>"
    assert tokenizer().decode(ids, skip_special_tokens=True) == "<think>x</think>" == oracle().decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: {**raw, "decoder": {"type": "WordPiece", "prefix": "#", "cleanup": True}}, "only byte-level BPE"),
        (lambda raw: {**raw, "added_tokens": [{**raw["added_tokens"][0], "lstrip": True}]}, "lstrip"),
    ],
)
def test_other_kinds_of_tokenizer_are_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    raw = json.loads((directory() / "tokenizer.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(change(raw))


def test_a_missing_file_is_named(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
