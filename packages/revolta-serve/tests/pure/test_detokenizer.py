"""Streaming equals decoding at once, and no more than three bytes wait."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revolta_serve.text.detokenizer import Detokenizer
from support.text import byte_tokens, tokenizer


def stream(tokens: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer(), **options)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", ["🙂", "👨‍👩‍👧‍👦", "é", "e\u0301", "한국어", "\ufffd", "a🙂b"])
def test_split_characters_come_whole(text: str) -> None:
    pieces = stream(byte_tokens(text))
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert all(piece in ("", *text) for piece in pieces)


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_stream_to_what_they_decode_to(raw: bytes) -> None:
    tokens = byte_tokens(raw)
    detokenizer = Detokenizer(tokenizer())
    text = ""
    for count, token in enumerate(tokens, start=1):
        text += detokenizer.push(token)
        # What is held may turn out to be several invalid sequences (ED A0 is two), but never more than 3 bytes.
        emitted = [raw[: max(0, count - held)].decode("utf-8", "replace") for held in range(4)]
        assert text in emitted, "more than the 3 bytes of an unfinished character are held"
    assert text + detokenizer.flush() == raw.decode("utf-8", "replace")


@settings(deadline=None)
@given(st.lists(st.integers(0, tokenizer().size - 1), max_size=40))
def test_any_tokens_stream_to_what_they_decode_to(tokens: list[int]) -> None:
    for skip in (False, True):
        assert "".join(stream(tokens, skip_special_tokens=skip)) == tokenizer().decode(tokens, skip_special_tokens=skip)


def test_invalid_bytes_do_not_stall_the_stream() -> None:
    pieces = stream(byte_tokens(b"\xff" + b"x" * 20))
    assert pieces == ["\ufffd", *"x" * 20, ""]


def test_a_character_cut_by_the_end_is_one_replacement() -> None:
    assert stream(byte_tokens("🙂".encode()[:2])) == ["", "", "\ufffd"]


def test_special_tokens_are_skipped_and_others_kept() -> None:
    tokens = tokenizer().encode("a<|im_end|><think>b")
    assert "".join(stream(tokens)) == "a<think>b"
    assert "".join(stream(tokens, skip_special_tokens=False)) == "a<|im_end|><think>b"


def test_padding_ids_are_silent() -> None:
    assert stream([tokenizer().size + 5]) == ["", ""]
