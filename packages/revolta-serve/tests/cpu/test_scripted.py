"""A scripted checkpoint says its script, by transformers' own arithmetic, after every kind of prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from revolta_serve.testing import scripted_checkpoint
from revolta_serve.testing.spelling import Layout, Speller
from revolta_serve.text.tokenizer import byte_alphabet
from revolta_serve.weights.tiny_tokenizer import tokenizer_json
from support.drive import Request, load
from support.oracle import Oracle

THINKING = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
PLAIN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
CALLS = (
    "I should look.\n</think>\n\nLet me see…\n\n<tool_call>\n<function=write>\n<parameter=text>\n"
    "Close with </parameter> and </function>.\n<parameter=x> is only an example\n</parameter>\n<parameter=mode>\nw\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=write>\n<parameter=text>\nClöse 🎉\n</parameter>\n</function>\n</tool_call>"
)


class Reader:
    """A scripted checkpoint read by transformers."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.oracle = Oracle(directory)

    def continuation(self, prompt: str, emitted: Sequence[int]) -> tuple[list[int], float]:
        """Greedy choices after `prompt` with the script fed back, and the smallest lead of the best logit."""
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        rows = self.oracle.full_pass([*ids, *emitted]).logits[len(ids) - 1 : -1]
        best = rows.topk(2, dim=-1).values
        return rows.argmax(-1).tolist(), float((best[:, 0] - best[:, 1]).min())


CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "short": ("Hello world.", {}, [THINKING, PLAIN, "Once upon", "x", "<|im_start|>user\n" + "word " * 100 + THINKING]),
    "calls": (CALLS, {}, [THINKING]),
    "bytes": ("Let me see… 🎉", {"bytewise": True}, [THINKING, PLAIN]),
    "float16": ("Let me see… 🎉", {"dtype": "float16"}, [PLAIN]),
    "repeating": ("na " * 30, {"tokens": 400}, [THINKING, PLAIN]),
    "empty": ("", {}, [THINKING, "x"]),
}


@pytest.mark.parametrize(("script", "options", "starts"), CASES.values(), ids=CASES)
def test_it_says_its_script(tmp_path: Path, script: str, options: dict[str, Any], starts: list[str]) -> None:
    emitted = scripted_checkpoint(tmp_path, script, prompts=["Once upon", "x"], **options)
    reader = Reader(tmp_path)
    assert reader.tokenizer.decode(list(emitted[:-1]), skip_special_tokens=False) == script
    assert emitted[-1] == reader.tokenizer.token_to_id("<|im_end|>")
    for prompt in starts:
        said, lead = reader.continuation(prompt, emitted)
        assert said == list(emitted)
        assert lead > 40


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_runner_says_it(tmp_path: Path, dtype: str) -> None:
    emitted = scripted_checkpoint(tmp_path, CALLS)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(PLAIN, add_special_tokens=False).ids
    request = Request(load(tmp_path, dtype), 0, ids)
    request.prefill()
    request.decode(len(emitted) - 1)
    assert request.ids[len(ids) :] == list(emitted)


def test_exact_ids_and_the_end_of_the_answer_off_the_script(tmp_path: Path) -> None:
    script = (70, 71, 72, 73, 70, 71, 74)
    emitted = scripted_checkpoint(tmp_path, script)
    assert emitted[:-1] == script
    reader = Reader(tmp_path)
    assert reader.continuation(THINKING, emitted)[0] == list(emitted)
    assert reader.continuation("Something else", (5,))[0] == [emitted[-1]]


def test_ids_that_cannot_follow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"script\[6\] is 5, but \(1, 2, 3\) was followed by 1 before; give the script as text"):
        scripted_checkpoint(tmp_path, [1, 2, 3, 1, 2, 3, 5])
    with pytest.raises(ValueError, match=r"script\[1\] is 1024; the tokenizer's ids are 0\.\.1023"):
        scripted_checkpoint(tmp_path, [1, 1024])


def test_a_search_that_ends_without_a_spelling_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("revolta_serve.testing.spelling._TRIES", 0)
    with pytest.raises(ValueError, match="found no spelling of the script"):
        scripted_checkpoint(tmp_path, "Hello")


def lay_out(script: str, bytewise: bool) -> Layout:
    return Speller(Tokenizer.from_str(tokenizer_json(400)), [THINKING, PLAIN], bytewise).spell(script)


PIECES = st.sampled_from(["a", "b", "ab", "é", "🎉", "\n", "<tool_call>", "</tool_call>", "the ", "<", " "])


@settings(max_examples=40, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join), st.booleans())
def test_every_layout_spells_the_script_and_is_a_function(script: str, bytewise: bool) -> None:
    layout = lay_out(script, bytewise)
    tokenizer = Tokenizer.from_str(tokenizer_json(400 + len(layout.extra), layout.extra))
    assert tokenizer.decode(list(layout.emitted[:-1]), skip_special_tokens=False) == script
    assert layout.emitted[-1] == layout.end == tokenizer.token_to_id("<|im_end|>")
    mark = tokenizer.token_to_id("<|endoftext|>")
    for start in (THINKING, PLAIN):
        context = tokenizer.encode(start, add_special_tokens=False).ids
        for token in layout.emitted:
            c0, c1, c2 = context[-1], context[-2], context[-3]
            assert layout.successors[(c0, c1, mark if c1 == mark else c2)] == token
            context.append(token)


def test_usual_spelling_where_it_is_unambiguous() -> None:
    text = "She was the youngest of the two daughters"
    tokenizer = Tokenizer.from_str(tokenizer_json(400))
    assert list(lay_out(text, bytewise=False).emitted[:-1]) == tokenizer.encode(text).ids
    assert len(lay_out("Wry Zeal", bytewise=True).emitted) == len("Wry Zeal") + 1


def test_byte_alphabet_is_the_tokenizers_own() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(byte_alphabet()) == set(ByteLevel.alphabet())
    text = "é\n 🎉\x7f\xa0"
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert [byte_alphabet()[char] for piece, _ in pieces for char in piece] == list(text.encode())
    assert list(byte_alphabet().values()) == list(range(256))
