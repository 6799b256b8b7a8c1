"""The checkpoint's tokenizer: text to ids, ids to bytes.

Two encoders are built from one tokenizer.json. `encode` knows the added tokens (`<|im_end|>`, `<think>`, ...) and turns their
spelling into their id: for prompts whose text is trusted. `encode_plain` is the same BPE without any added token: for text that
came from a user, where `<|im_end|>` is ten characters like any other. `encode_pieces` mixes both, as the chat template needs it.

Every id comes from the file; none is known here.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from revolta_serve.errors import CheckpointError

Piece = str | int
"""A part of a rendered prompt: an added token's id, or plain text in which no added token is looked for."""


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE vocabularies, in the order of the bytes (GPT-2's bytes_to_unicode, inverted).

    Printable bytes of Latin-1 stand for themselves, the others are the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(hidden)): byte for byte in range(256)}


class Tokenizer:
    """Immutable after load and safe to use from several threads.

    added: spelling -> id of every added token. special_ids: those of them that detokenizing leaves out.
    size: one more than the largest id.
    """

    def __init__(self, raw: dict[str, Any], origin: str = "tokenizer.json") -> None:
        """`raw` is a decoded tokenizer.json; CheckpointError names `origin` when its kind is not supported."""
        self._full = tokenizers.Tokenizer.from_str(json.dumps(raw))
        self._plain = tokenizers.Tokenizer.from_str(json.dumps({**raw, "added_tokens": [], "post_processor": None}))
        for encoder in (self._full, self._plain):
            encoder.no_truncation()
            encoder.no_padding()
        _require_byte_level(raw, origin)
        entries = raw.get("added_tokens") or []
        for entry in entries:
            _require_simple(entry, origin)
        self.added: dict[str, int] = {entry["content"]: entry["id"] for entry in entries}
        self.special_ids = frozenset(entry["id"] for entry in entries if entry["special"])
        spellings = {index: token for token, index in self._full.get_vocab(with_added_tokens=True).items()}
        self.size = max(spellings) + 1
        self._bytes = _token_bytes(spellings, set(self.added.values()), self.size, origin)
        longest_first = sorted(self.added, key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, longest_first))) if self.added else None

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Read DIRECTORY/tokenizer.json. Raises CheckpointError when it is missing or of another kind than byte-level BPE."""
        path = Path(directory) / "tokenizer.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot read the tokenizer: {error}") from error
        return cls(raw, str(path))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of trusted text: added tokens are recognised. `add_special_tokens` runs the file's post-processor (a BOS, if any)."""
        return list(self._full.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of untrusted text: the spelling of an added token is ordinary text."""
        return self.encode_pieces((text,))

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of a rendered prompt. Equal to `encode` of the joined text where the text pieces spell no added token."""
        # encode_batch_fast releases the GIL, encode does not.
        plain = iter(self._plain.encode_batch_fast([piece for piece in pieces if isinstance(piece, str)], add_special_tokens=False))
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(next(plain).ids)
        return ids

    def split(self, text: str) -> list[Piece]:
        """Cut trusted text at its added tokens, leftmost first, the longest of those that start at one place."""
        if self._literal is None:
            return [text] if text else []
        pieces: list[Piece] = []
        done = 0
        for match in self._literal.finditer(text):
            if match.start() > done:
                pieces.append(text[done : match.start()])
            pieces.append(self.added[match.group()])
            done = match.end()
        if done < len(text):
            pieces.append(text[done:])
        return pieces

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id; empty for an id the file does not name (rows that only pad the vocabulary)."""
        return self._bytes[token] if 0 <= token < self.size else b""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids; every maximal invalid byte sequence becomes one U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(token) for token in ids if token not in skipped).decode("utf-8", "replace")


def _require_byte_level(raw: dict[str, Any], origin: str) -> None:
    model = (raw.get("model") or {}).get("type")
    decoder = (raw.get("decoder") or {}).get("type")
    if model != "BPE" or decoder != "ByteLevel":
        raise CheckpointError(f"{origin}: model {model!r} with decoder {decoder!r}; only byte-level BPE (BPE with ByteLevel) is supported")


def _require_simple(entry: dict[str, Any], origin: str) -> None:
    """Added tokens are cut out of the text by plain search: flags that widen or narrow a match would be lost."""
    flags = [flag for flag in ("single_word", "lstrip", "rstrip") if entry.get(flag)]
    if flags or not entry["content"]:
        reason = f"flags {flags}" if flags else "an empty spelling"
        raise CheckpointError(f"{origin}: added token {entry['content']!r} (id {entry['id']}) has {reason}, which is not supported")


def _token_bytes(spellings: dict[int, str], added: set[int], size: int, origin: str) -> list[bytes]:
    alphabet = byte_alphabet()
    table = [b""] * size
    for index, token in spellings.items():
        if index in added:
            table[index] = token.encode()
            continue
        try:
            table[index] = bytes(alphabet[char] for char in token)
        except KeyError as error:
            raise CheckpointError(f"{origin}: token {token!r} (id {index}) has {error.args[0]!r}, which stands for no byte") from None
    return table
