"""How deep and how large a JSON text is, counted on its bytes before anything is built from it.

Decoding holds the interpreter for as long as it takes: milliseconds for text and numbers, seconds for millions of lists and keys.
Counting costs less than decoding and goes piece by piece, so that other threads get their turn in between.
"""

from revolta_serve.errors import RequestError

MAX_DEPTH = 100
"""Levels of nesting in a body; real tool schemas stay far below."""
MAX_CONTAINERS = 200_000
"""Lists and objects."""
MAX_KEYS = 200_000
MAX_VALUES = 4_000_000
"""Values that others follow: several prompts of a million token ids."""

PIECE = 1 << 16
_KEPT = b'"[]{},:'
_OTHER = bytes(set(range(256)) - set(_KEPT))


def check_bounds(raw: bytes) -> None:
    """Raise RequestError naming the bound that a JSON text exceeds. A malformed text may pass: decoding will refuse it."""
    depth = containers = keys = values = start = 0
    inside = False
    while start < len(raw):
        piece = raw[start : start + PIECE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and start + len(piece) < len(raw):
            piece = piece[:-1]  # an escape stays together with what it escapes
        start += len(piece)
        # Pairs of backslashes go first: what is then left of a run of them escapes what follows.
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHER).split(b'"')
        outside = b"".join(parts[int(inside) :: 2])
        inside ^= len(parts) % 2 == 0
        keys += outside.count(b":")
        values += outside.count(b",")
        brackets = outside.translate(None, b":,")
        containers += brackets.count(b"[") + brackets.count(b"{")
        if containers > MAX_CONTAINERS or keys > MAX_KEYS or values > MAX_VALUES:
            raise RequestError(
                f"the request body is too intricate; at most {MAX_CONTAINERS} lists and objects, {MAX_KEYS} keys and {MAX_VALUES} values "
                "are read: send several requests"
            )
        for bracket in brackets:
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                raise RequestError(f"the request body is nested too deeply; at most {MAX_DEPTH} levels are read")
