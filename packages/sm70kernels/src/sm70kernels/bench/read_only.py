"""The yardstick of every streaming kernel: a kernel that only reads, compiled and stored as those of the ops are.

It lies beside the benchmarks and not in ops/, because it computes nothing anyone would call.
"""

import hashlib
from functools import cache
from pathlib import Path

from sm70kernels import cuda, nvrtc
from sm70kernels.nvrtc import Image, compile_source

NAME = "read_only"
THREADS = 256
LOADS = 4
"""16-byte loads a thread has in flight."""

_SOURCE = Path(__file__).with_name("read_only.cu")


def file_name() -> str:
    """Return the name the image is stored under: it changes with the source, its constants and how it is compiled."""
    digest = hashlib.blake2b(digest_size=12)
    for part in (_SOURCE.read_bytes(), str(THREADS).encode(), Path(nvrtc.__file__).read_bytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{NAME}.{digest.hexdigest()}.zip"


@cache
def image() -> Image:
    """Return the image: shipped, cached or compiled now. Raises CompileError."""
    for folder in (cuda.SHIPPED, cuda.CACHE):
        stored = cuda.read(folder / file_name())
        if stored is not None:
            return stored
    made = compile_source(_SOURCE.read_text(encoding="utf-8"), dict(THREADS=THREADS), name=_SOURCE.name)
    cuda.write(cuda.CACHE / file_name(), made)
    return made


def grid(count: int, multiprocessors: int) -> int:
    """Return how many blocks read `count` 16-byte words: one pass of every thread, at most eight blocks a multiprocessor."""
    return max(1, min(-(-count // (THREADS * LOADS)), 8 * multiprocessors))
