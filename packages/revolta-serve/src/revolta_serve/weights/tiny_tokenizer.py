"""The tokenizer of a tiny checkpoint: byte-level BPE in the dialect of the real vocabulary, trained in a moment on public-domain text."""

import json
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from revolta_serve.errors import ConfigError

PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How text is cut before byte pairs merge. Reference tokenizers rebuild exactly this one for the architecture."""

CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>",
    "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
"""Added tokens in the order of the real vocabulary, where they are its last ids too."""

_PLAIN = {t for t in CONTROL_TOKENS if t.strip("</>") in ("tool_call", "tool_response", "think")} | {
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
}  # fmt: skip
"""Added tokens that are not special: decoding with special tokens skipped keeps their text."""

SMALLEST = 256 + len(CONTROL_TOKENS)


def data(name: str) -> str:
    """Text of a file that ships beside this module."""
    return (files("revolta_serve.weights") / "data" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def tokenizer_json(size: int = 1024, extra: tuple[str, ...] = ()) -> str:
    """Return a tokenizer.json of `size` ids: 256 bytes, merges learned from the excerpt, `extra`, then the control tokens.

    `extra` are further tokens in the byte-level alphabet that decode but that no merge produces. Deterministic. Raises ConfigError when
    `size` has no room for bytes, extra and control tokens, when the excerpt has not enough merges, or when an extra token is empty, of
    other characters, or exists already.
    """
    smallest = SMALLEST + len(extra)
    if size < smallest:
        needed = f"256 bytes, {smallest - 256} extra and control tokens"
        raise ConfigError(f"tokens is {size}; must be at least {smallest}: {needed}", param="tokens")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if strange := [token for token in extra if not token or set(token) - set(alphabet)]:
        raise ConfigError(f"extra_tokens holds {strange[0]!r}; must be non-empty texts in the byte-level alphabet", param="extra_tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    learned = size - len(extra) - len(CONTROL_TOKENS)
    trainer = trainers.BpeTrainer(vocab_size=learned, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([data("austen_excerpt.txt")], trainer)
    raw = json.loads(tokenizer.to_str())
    raw["model"]["vocab"] |= {token: learned + i for i, token in enumerate(extra)}
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_tokens([AddedToken(t, special=t not in _PLAIN, normalized=False) for t in CONTROL_TOKENS])
    if (made := tokenizer.get_vocab_size()) != size:
        raise ConfigError(f"tokens is {size}; the excerpt and {len(extra)} new extra tokens yield only {made}", param="tokens")
    return tokenizer.to_str(pretty=True)


def tokenizer_files(size: int, extra: tuple[str, ...] = ()) -> tuple[dict[str, bytes], dict[str, int]]:
    """Return tokenizer.json, tokenizer_config.json and chat_template.jinja by name, and the ids of the control tokens.

    Raises ConfigError as `tokenizer_json` does.
    """
    text = tokenizer_json(size, extra)
    ids = {token["content"]: int(token["id"]) for token in json.loads(text)["added_tokens"]}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "model_max_length": 262144,
        "added_tokens_decoder": {
            str(i): {"content": t, "special": t not in _PLAIN, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
            for t, i in ids.items()
        },
    }
    made = {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
        "chat_template.jinja": data("chat_template.jinja"),
    }
    return {name: content.encode() for name, content in made.items()}, ids


def write_tokenizer(directory: Path, size: int, extra: tuple[str, ...] = ()) -> dict[str, int]:
    """Write the tokenizer's files alone; return the ids of the control tokens. Raises ConfigError as `tokenizer_json` does."""
    files, ids = tokenizer_files(size, extra)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return ids
