"""Token ids to text, one at a time, never a broken character.

Bytes are fed to an incremental UTF-8 decoder that replaces errors: at most the 3 bytes of one unfinished character are held back,
an invalid sequence becomes U+FFFD as soon as it is known to be invalid, and a character cut off by the end becomes one U+FFFD.
The pieces always add up to what decoding all bytes at once gives.
"""

import codecs

from revolta_serve.text.tokenizer import Tokenizer

_Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text side of one answer."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _Decoder("replace")

    def push(self, token: int) -> str:
        """Text completed by this token; may be empty. A skipped special token contributes no bytes."""
        return self._decoder.decode(self.spelling(token))

    def spelling(self, token: int) -> bytes:
        """Bytes that a token contributes."""
        return b"" if token in self._skipped else self._tokenizer.token_bytes(token)

    @property
    def holds(self) -> bool:
        """Bytes of an unfinished character are held back."""
        return bool(self._decoder.getstate()[0])

    def gap(self, token: int) -> int:
        """Characters that will stand between the text so far and that of the next token: 1 if held bytes turn out invalid, else 0."""
        raw = self.spelling(token)
        if not raw or not self.holds:
            return 0
        probe = _Decoder("replace")
        probe.setstate(self._decoder.getstate())
        text = probe.decode(raw[:1])
        # One character, or none yet, says that the byte goes on with what is held; else what is held is a character of its own.
        return len(text) + bool(probe.getstate()[0]) - 1

    def flush(self) -> str:
        """What an unfinished character leaves at the end: "" or one U+FFFD. The detokenizer starts afresh after it."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
