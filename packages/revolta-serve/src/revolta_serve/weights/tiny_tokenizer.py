"""The tokenizer of a tiny checkpoint: byte-level BPE in the dialect of the real vocabulary, trained in a moment on public-domain text."""

import json
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

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

    `extra` are further tokens in the byte-level alphabet that decode but that no merge produces. Deterministic. Raises ValueError when
    `size` has no room for bytes, extra and control tokens, when the excerpt has not enough merges, or an extra token exists already.
    """
    smallest = SMALLEST + len(extra)
    if size < smallest:
        raise ValueError(f"tokenizer size is {size}; must be at least {smallest}: 256 bytes, {smallest - 256} extra and control tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    learned = size - len(extra) - len(CONTROL_TOKENS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=learned, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([data("austen_excerpt.txt")], trainer)
    raw = json.loads(tokenizer.to_str())
    raw["model"]["vocab"] |= {token: learned + i for i, token in enumerate(extra)}
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.add_tokens([AddedToken(t, special=t not in _PLAIN, normalized=False) for t in CONTROL_TOKENS])
    if (made := tokenizer.get_vocab_size()) != size:
        raise ValueError(f"tokenizer size is {size}; the excerpt and {len(extra)} new extra tokens yield only {made}")
    return tokenizer.to_str(pretty=True)


def write_tokenizer(directory: Path, size: int, extra: tuple[str, ...] = ()) -> dict[str, int]:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; return the ids of the control tokens."""
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
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(data("chat_template.jinja"), encoding="utf-8")
    return ids
