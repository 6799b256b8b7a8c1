"""Headers of safetensors files: what a file holds, from its first kilobytes. Imports no torch.

A file is an 8-byte little-endian length, that many bytes of JSON ({name: {dtype, shape, data_offsets}}), then the data.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

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


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file without reading their data.

    Raises CheckpointError naming the file, and the tensor where there is one, when the file is missing, truncated or malformed, or
    when the tensors do not fill its data exactly: each as many bytes as its shape has, none over another, no gap, nothing after them.
    """
    raw, start, size = _read(path)
    raw.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in raw.items():
        tensors[name], begin, end = _tensor(path, name, entry)
        spans.append((begin, end, name))
    at, before = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin != at:
            wrong = "overlaps" if begin < at else f"leaves {begin - at} bytes of nobody's after"
            raise CheckpointError(f"{path}: {name} at data bytes {begin} to {end} {wrong} {before}; the file is corrupt, download it again")
        at, before = end, name
    if start + at > size:
        raise CheckpointError(f"{path}: truncated: {before} ends at byte {start + at} of a file of {size}; download it again")
    if start + at < size:
        more = size - start - at
        raise CheckpointError(f"{path}: {more} bytes follow {before}, the last tensor; the file is corrupt, download it again")
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Return the `__metadata__` of a safetensors file, empty when it has none. Raises CheckpointError when it cannot be read."""
    metadata: dict[str, str] = _read(path)[0].get("__metadata__", {})
    return metadata


def _read(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header's object, the byte at which the data starts, and the size of the file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            names = [name for name, _ in pairs]
            raise CheckpointError(f"{path}: its header lists {next(n for n in names if names.count(n) > 1)} twice; download it again")
        return seen

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST):
                raise CheckpointError(f"{path}: {size} bytes cannot hold the header it announces ({length} bytes); download the file again")
            raw = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; download it, or correct the index") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file ({error}); download it again") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a safetensors file (its header is no object); download it again")
    metadata = raw.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: its __metadata__ is no object of texts; download it again")
    return raw, 8 + length, size


def _tensor(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    """One entry of a header: the tensor, and where its data begins and ends after the header."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _is_naturals(shape) or not _is_naturals(offsets) or len(offsets) != 2:
        text = repr(entry)
        shown = text if len(text) <= 200 else f"{text[:197]}..."
        raise CheckpointError(f"{path}: the header entry of {name} is malformed: {shown}; the file is corrupt, download it again")
    if dtype not in BITS:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}; known are {', '.join(BITS)}")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise CheckpointError(f"{path}: {name} is {dtype} {list(shape)} but occupies {end - begin} bytes; the file is corrupt")
    return TensorInfo(dtype, tuple(shape)), begin, end


def _is_naturals(value: Any) -> TypeGuard[list[int]]:
    """Whether a value is a list of integers >= 0; JSON's true, 1.0 and "1" are none."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
