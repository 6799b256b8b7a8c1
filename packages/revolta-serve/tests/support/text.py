"""The tiny tokenizer and chat template, built once, and a plain view of the oracle's encoding."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from revolta_serve.text.chat_template import ChatTemplate
from revolta_serve.text.defaults import GenerationDefaults
from revolta_serve.text.tokenizer import Tokenizer
from revolta_serve.weights.tiny_tokenizer import write_tokenizer

SIZE = 600


@cache
def directory() -> Path:
    """A directory with the tokenizer files of a tiny checkpoint."""
    path = Path(tempfile.mkdtemp(prefix="revolta-text-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    ids = write_tokenizer(path, SIZE)
    stop = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stop, "temperature": 0.6, "top_k": 20, "top_p": 0.95}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": ids["<|endoftext|>"]}))
    return path


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(directory())


@cache
def template() -> ChatTemplate:
    return ChatTemplate.load(directory(), tokenizer())


@cache
def oracle() -> Any:
    """transformers' tokenizer over the same files."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory())


def byte_tokens(text: str | bytes) -> list[int]:
    """One id per UTF-8 byte: a spelling that BPE would merge."""
    raw = text.encode() if isinstance(text, str) else text
    by_bytes = {tokenizer().token_bytes(token): token for token in range(tokenizer().size)}
    return [by_bytes[bytes([byte])] for byte in raw]


@cache
def defaults() -> GenerationDefaults:
    return GenerationDefaults.load(directory(), tokenizer().size)
