"""Keys of token blocks: a chain of hashes in which each names its block's tokens and all before them.

A key is BLAKE2b over the key before it and the block's ids as little-endian int32, both of fixed length, so that no two chains have
the same bytes. The first link stands for whatever must be equal for cached work to be interchangeable: the domain and the salt.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from revolta_serve.cache.layout import BLOCK

Key = bytes
KEY_BYTES = 16


def root(domain: str, salt: str) -> Key:
    """The key before the first block. Each part is preceded by its length in 8 bytes."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (domain.encode(), salt.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def chain(before: Key, tokens: Sequence[int], first: int = 0) -> list[Key]:
    """Keys of the whole blocks of tokens[first:]; `before` is the key of the block that ends at `first`, a multiple of 64."""
    count = (len(tokens) - first) // BLOCK
    ids = array("i", tokens[first : first + count * BLOCK])
    if sys.byteorder == "big":
        ids.byteswap()
    data, width = ids.tobytes(), BLOCK * ids.itemsize
    keys = []
    for at in range(0, count * width, width):
        before = blake2b(before + data[at : at + width], digest_size=KEY_BYTES).digest()
        keys.append(before)
    return keys
