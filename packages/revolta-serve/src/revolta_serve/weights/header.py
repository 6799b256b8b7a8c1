"""Headers of safetensors files: what a file holds, from its first kilobytes. Imports no torch.

A file is an 8-byte little-endian length, that many bytes of JSON ({name: {dtype, shape, data_offsets}}), then the data.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from revolta_serve.errors import CheckpointError

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
}  # fmt: skip
"""Bits per element by the format's dtype names."""

_LONGEST = 100_000_000
"""The format's limit on the JSON part, in bytes."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as a file's header describes it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file without reading their data.

    Raises CheckpointError naming the file when it is missing, truncated, malformed, or its offsets do not fit shapes and file size.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST):
                raise CheckpointError(f"{path}: {size} bytes cannot hold the header it announces ({length} bytes); download the file again")
            raw = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; download it, or correct the index") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error}); download it again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a safetensors file (its header is no object); download it again")
    raw.pop("__metadata__", None)
    tensors = {}
    for name, entry in raw.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: the header entry of {name} is malformed: {entry!r}") from None
        if dtype not in BITS:
            raise CheckpointError(f"{path}: {name} has dtype {dtype}; known are {', '.join(BITS)}")
        info = TensorInfo(dtype, shape, end - begin)
        if info.nbytes * 8 != info.elements * BITS[dtype]:
            raise CheckpointError(f"{path}: {name} is {dtype} {list(shape)} but occupies {info.nbytes} bytes; the file is corrupt")
        if 8 + length + end > size:
            raise CheckpointError(f"{path}: truncated: {name} ends at byte {8 + length + end} of a file of {size}; download it again")
        tensors[name] = info
    return tensors
