"""Spelling a text so that three tokens always determine the next one.

Byte-level vocabularies allow many spellings of the same bytes. Where a repeated passage must go on differently the second time, it is
spelled with other tokens; where the vocabulary has none, with new ones, which the checkpoint's tokenizer then gets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from revolta_serve.text.tokenizer import byte_alphabet

Context = tuple[int, int, int]
"""A token and the two before it, newest first, as the n-gram hash sees them."""

_TRIES = 200
"""Search steps per byte of the script before a spelling is given up."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A script in tokens, and what follows every context of it, in the ids of the enlarged tokenizer."""

    emitted: tuple[int, ...]
    """The script and the final end token."""
    successors: dict[Context, int]
    extra: tuple[str, ...]
    """New tokens, in the byte-level alphabet; they stand before the control tokens, whose ids move up."""
    end: int


class Speller:
    """Lays out scripts after some starts: texts after whose last three tokens the script begins."""

    def __init__(self, tokenizer: Tokenizer, starts: Iterable[str], bytewise: bool) -> None:
        self.tokenizer, self.bytewise = tokenizer, bytewise
        self.starts = [tokenizer.encode(text, add_special_tokens=False).ids for text in starts]
        byte = byte_alphabet()
        self.alphabet = list(byte)
        self.size = tokenizer.get_vocab_size()
        self.control = {token.content.encode(): i for i, token in tokenizer.get_added_tokens_decoder().items()}
        control_ids = set(self.control.values())
        self.first_control = min(control_ids)
        self.plain = {bytes(byte[c] for c in t): i for t, i in tokenizer.get_vocab().items() if i not in control_ids}
        self.bytes = {i: text for text, i in (self.control | self.plain).items()}
        self.longest = max(map(len, self.plain))
        self.end, self.mark = self.control[b"<|im_end|>"], self.control[b"<|endoftext|>"]
        self.successors: dict[Context, int] = {}
        self.minted: dict[bytes, int] = {}

    def follow(self, script: Sequence[int]) -> Layout:
        """Lay out exact ids; ValueError for an unknown id, or for three tokens with two successors."""
        emitted: list[int] = []
        for token in [*script, self.end]:
            if token not in self.bytes:
                raise ValueError(f"script[{len(emitted)}] is {token}; the tokenizer's ids are 0..{self.size - 1}")
            for context in self._contexts(emitted):
                if (other := self.successors.setdefault(context, token)) != token:
                    clash = f"script[{len(emitted)}] is {token}, but {context[::-1]} was followed by {other} before"
                    raise ValueError(f"{clash}; give the script as text, so that it can be respelled")
            emitted.append(token)
        return self._layout(emitted)

    def spell(self, script: str) -> Layout:
        """Lay out a text; ValueError when no spelling is found.

        Names of control tokens become those tokens; only when that leaves no way out are some of them spelled as text.
        """
        emitted = self._search(script, strict=True) or self._search(script, strict=False)
        if not emitted:
            raise ValueError("found no spelling of the script in which three tokens determine the next; make it less repetitive")
        return self._layout(emitted)

    def _search(self, script: str, strict: bool) -> list[int]:
        """Depth-first through all spellings, the tokenizer's own first; empty when there is none within the limit."""
        text = script.encode()
        usual = self._usual(script)
        self.successors.clear()
        emitted: list[int] = []
        position = [0]
        recorded: list[list[Context]] = []
        options = [self._options(text, 0, usual, emitted, strict)]
        for _ in range(_TRIES * (len(text) + 50)):
            if not options[-1]:
                options.pop()
                position.pop()
                if not options:
                    break
                emitted.pop()
                for context in recorded.pop():
                    del self.successors[context]
                continue
            token = options[-1].pop(0)
            fresh = [context for context in self._contexts(emitted) if context not in self.successors]
            self.successors |= dict.fromkeys(fresh, token)
            emitted.append(token)
            if position[-1] == len(text):
                return emitted
            recorded.append(fresh)
            position.append(position[-1] + len(self.bytes[token]))
            options.append(self._options(text, position[-1], usual, emitted, strict))
        return []

    def _usual(self, script: str) -> dict[int, int]:
        """The tokenizer's own spelling, by byte position."""
        usual, at = {}, 0
        for token in self.tokenizer.encode(script, add_special_tokens=False).ids:
            usual[at] = token
            at += len(self.bytes[token])
        return usual

    def _options(self, text: bytes, at: int, usual: dict[int, int], emitted: list[int], strict: bool) -> list[int]:
        """Tokens that may come next, best first: the one an earlier use of the context forces, else all that spell the text from `at`."""
        forced = {self.successors[context] for context in self._contexts(emitted) if context in self.successors}
        control = next((i for name, i in self.control.items() if text.startswith(name, at)), None)
        if at == len(text):
            found = [self.end]
        elif control is not None and strict:
            found = [control]
        else:
            stop = min([len(text), *(place for name in self.control if (place := text.find(name, at + 1)) >= 0)])
            spans = [text[at : at + n] for n in range(1, min(self.longest, stop - at) + 1)]
            found = [self.plain[span] for span in spans if span in self.plain]
            if not self.bytewise:
                found.sort(key=lambda i: (i != usual.get(at), -len(self.bytes[i])))
            found += [i for span, i in self.minted.items() if text.startswith(span, at) and i in forced]
            found += self._mint(text[at:stop], emitted)
            found = found if control is None else [control, *found]
        return [token for token in found if forced <= {token}]

    def _mint(self, text: bytes, emitted: list[int]) -> list[int]:
        """A token that nothing has used yet: the shortest beginning of `text` that is none; its id is provisional, beyond all others."""
        for n in range(2, len(text) + 1):
            span = text[:n]
            if span not in self.plain and self.minted.get(span) not in emitted:
                token = self.minted.setdefault(span, self.size + len(self.minted))
                self.bytes[token] = span
                return [token]
        return []

    def _contexts(self, emitted: Sequence[int]) -> set[Context]:
        """What the hash sees after `emitted`, for every start."""
        return {self._context([*start, *emitted] if len(emitted) < 3 else emitted) for start in self.starts}

    def _context(self, tokens: Sequence[int]) -> Context:
        """The last three tokens; before the request, and before a segment mark, the mark stands for all."""
        c0, c1, c2 = [*reversed(tokens[-3:]), self.mark, self.mark, self.mark][:3]
        return (c0, c1, self.mark if c1 == self.mark else c2)

    def _layout(self, emitted: list[int]) -> Layout:
        """Give used new tokens their place before the control tokens."""
        used = [span for span, token in self.minted.items() if token in emitted]
        moved = {self.minted[span]: self.first_control + i for i, span in enumerate(used)}

        def final(token: int) -> int:
            return moved.get(token, token if token < self.first_control else token + len(used))

        successors = {(final(a), final(b), final(c)): final(token) for (a, b, c), token in self.successors.items()}
        extra = tuple("".join(self.alphabet[b] for b in span) for span in used)
        return Layout(tuple(final(token) for token in emitted), successors, extra, final(self.end))
