"""Token ids to text, one at a time, never a broken character.

Bytes are fed to an incremental UTF-8 decoder that replaces errors: at most the 3 bytes of one unfinished character are held back,
an invalid sequence becomes U+FFFD as soon as it is known to be invalid, and a character cut off by the end becomes one U+FFFD.
The pieces always add up to what decoding all bytes at once gives.
"""

import codecs

from revolta_serve.text.tokenizer import Tokenizer


class Detokenizer:
    """The text side of one answer."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text completed by this token; may be empty. A skipped special token contributes no bytes."""
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What an unfinished character leaves at the end: "" or one U+FFFD. The detokenizer starts afresh after it."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
