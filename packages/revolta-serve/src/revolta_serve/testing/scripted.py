"""A checkpoint that says a given text: the real architecture and the whole server, with an answer known in advance.

The n-gram embedding does the talking. Its table row for the last three tokens holds a ±1 code of the token that follows them in the
script; every other block writes nothing, the final mixer only normalises, and the rows of lm_head are the codes of all tokens, so
the coded one wins by a wide margin at any temperature up to about 1. Where the script is left, the answer ends.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from revolta_serve.model import ngram_hash
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.testing.spelling import Context, Layout, Speller
from revolta_serve.weights.tiny import DTYPES, make_tiny
from revolta_serve.weights.tiny_files import write_weights
from revolta_serve.weights.tiny_tokenizer import tokenizer_json

ANSWERS = ("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
"""Ends of a chat prompt with thinking on and off: the script starts after either."""

MARGIN = 50.0
"""Logit of the scripted token above that of every other."""

_SILENT = (
    "linear_attn.out_proj.weight", "self_attn.o_proj.weight", "down_proj", "down_proj.weight", "input_mix_weight_up.weight",
    "hc_norm.weight", "ple.key_proj.weight", "ple.value_proj.weight", "ple.conv1d.weight",
)  # fmt: skip
"""Tensors that are zero, so that every other block adds nothing to the streams."""


def scripted_checkpoint(
    directory: str | Path,
    script: str | Sequence[int],
    *,
    prompts: Iterable[str] = (),
    bytewise: bool = False,
    dtype: str = "float32",
    tokens: int = 1024,
    **shape: Any,
) -> tuple[int, ...]:
    """Write a tiny checkpoint whose answer is `script`; return the ids it will emit, the final <|im_end|> included.

    script    a text (control tokens by their names) or exact ids. A text is spelled with the tokenizer's own tokens where the last
              three tokens determine the next; elsewhere with other or, if need be, new tokens for the same bytes
    prompts   further prompt texts after which the script starts, besides every chat prompt of the checkpoint's own template
    bytewise  spell with the shortest tokens: a byte at a time, multi-byte characters cut
    dtype     of the weights: float32, float16 or bfloat16
    tokens    size of the tokenizer before new tokens
    shape     further fields of weights.tiny.TinyShape

    Raises ValueError when ids are unknown, or when three tokens are followed by different ones and cannot be respelled; ConfigError
    as make_tiny does, above all when `directory` holds another checkpoint.
    """
    speller = Speller(Tokenizer.from_str(tokenizer_json(tokens)), starts=[*ANSWERS, *prompts], bytewise=bytewise)
    layout = speller.spell(script) if isinstance(script, str) else speller.follow(script)
    tokens += len(layout.extra)
    bits = math.ceil(math.log2(tokens))
    rows = max(997, len(layout.successors) ** 2 // 2)
    fixed: dict[str, Any] = {
        "hidden": 32, "layers": 2, "interval": 2, "rank": 4, "experts": 4, "experts_per_token": 2, "expert_width": 16, "shared_width": 16,
        "ple_layers": (1,), "ngram": 3, "ngram_heads": 1, "ple_dim": 2 * bits, "ngram_base": rows,
    } | shape  # fmt: skip
    hash_seed = _free_of_collisions(layout.successors, tokens, rows)
    config = make_tiny(directory, dtype=dtype, tokens=tokens, extra_tokens=layout.extra, hash_seed=hash_seed, **fixed)
    where = Path(directory)
    tensors = load_file(where / "model.safetensors")
    _write_script(tensors, config, layout)
    write_weights(where, {name: t.to(DTYPES[dtype]) if t.is_floating_point() else t for name, t in tensors.items()})
    return layout.emitted


def _hash(context: Context, multipliers: Sequence[int], size: int) -> int:
    """Row of a token and its two predecessors in a trigram table of `size` rows; products stay below 2^63 by construction."""
    a, b, c = (token * m for token, m in zip(context, multipliers, strict=True))
    return (a ^ b ^ c) % size


def _free_of_collisions(successors: dict[Context, int], vocab: int, base: int) -> int:
    """The first hash seed under which no two contexts with different successors share a row."""
    size = ngram_hash.primes(base, 2, 0)[1]
    for seed in range(1234, 11_234):
        multipliers = ngram_hash.multipliers(vocab, 3, seed, 0)
        rows: dict[int, int] = {}
        if all(rows.setdefault(_hash(context, multipliers, size), token) == token for context, token in successors.items()):
            return seed
    raise ValueError(f"no hash seed keeps {len(successors)} contexts apart in {size} rows; shorten the script")


def _write_script(tensors: dict[str, Tensor], config: ModelConfig, layout: Layout) -> None:
    """Silence every block and put the script into the n-gram table, in place."""
    prefix = "model.language_model."
    for name, tensor in tensors.items():
        if name.startswith(prefix) and (name.endswith(_SILENT) or ".ngram_embedding." in name):
            tensor.zero_()
    bits = config.ngram_width
    codes = 2.0 * ((torch.arange(config.vocab).unsqueeze(1) >> torch.arange(bits)) & 1) - 1
    # The n-gram value arrives halved (its gate is the sigmoid of zero) and outweighs the embedding's default, which ends the answer.
    path = f"{prefix}layers.{config.ple_layers[0]}.ple"
    tensors[f"{path}.value_proj.weight"][:bits, bits:] = 2.0 * torch.eye(bits)
    embedding = tensors[f"{prefix}embed_tokens.weight"].zero_()
    embedding[:, :bits] = 0.01 * codes[layout.end]
    # Codes differ in at least one of `bits` signs, worth two units of a normalised stream that the mixer halves.
    gain = MARGIN / math.sqrt(config.hidden / bits)
    head = tensors["lm_head.weight"].zero_()
    head[:, :bits] = gain * codes

    layer = config.ple_layers[0]
    (_, size), (_, offset) = config.ngram_primes(layer), config.ngram_offsets(layer)
    multipliers = config.ngram_multipliers(layer)
    step = -(-config.ngram_rows(layer) // config.ngram_shards)
    for context, token in layout.successors.items():
        shard, row = divmod(offset + _hash(context, multipliers, size), step)
        tensors[f"{path}.ple_embedding.ngram_embedding.shard_{shard}.weight"][row] = codes[token]
