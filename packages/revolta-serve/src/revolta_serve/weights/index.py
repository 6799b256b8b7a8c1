"""Which file holds which tensor: the index is the authority, headers confirm it, nothing else in the directory counts."""

import hashlib
import json
import os.path
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revolta_serve.errors import CheckpointError
from revolta_serve.model.fields import read_json
from revolta_serve.weights.header import TensorInfo, read_header

INDEX = "model.safetensors.index.json"
_SAMPLES, _SAMPLE = 64, 4096


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The tensors of a checkpoint directory, confirmed against the headers of their files; no data has been read."""

    directory: Path
    tensors: dict[str, TensorInfo]
    """By name, in the order of the index."""
    files: dict[str, str]
    """File name of every tensor."""
    unlisted: int
    """Tensors that the files hold beside those of the index; they are never read."""

    @classmethod
    def open(cls, directory: str | Path) -> "CheckpointIndex":
        """Read the index of `directory`, or the header of its only safetensors file when there is no index.

        Raises CheckpointError naming tensor and file: no weights, several files without an index, a name listed twice, a file
        that is missing, truncated or outside the directory, a tensor that its file does not hold.
        """
        where = Path(directory)
        index = where / INDEX
        files = _weight_map(index) if index.exists() else _single_file(where)
        headers = {}
        for file in sorted(set(files.values())):
            if Path(file).name != file:
                raise CheckpointError(f"{index}: names the file {file!r}; weight files lie in the checkpoint's own directory")
            if not os.path.exists(where / file):
                lost = [name for name, f in files.items() if f == file]
                raise CheckpointError(f"{where / file}: no such file, but {INDEX} places {some(lost)} there; download it")
            headers[file] = read_header(where / file)
        for name, file in files.items():
            if name not in headers[file]:
                holders = [f for f, header in headers.items() if name in header]
                hint = f"{holders[0]} holds it" if holders else "no file of the index holds it"
                raise CheckpointError(f"{where / file}: does not hold {name}, which {INDEX} places there; {hint}: correct the index")
        unlisted = sum(len(header) for header in headers.values()) - len(files)
        return cls(where, {name: headers[file][name] for name, file in files.items()}, files, unlisted)

    def path(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        return self.directory / self.files[name]

    def fingerprint(self) -> str:
        """Hex digest that tells checkpoints apart: config, every name, dtype and shape, file sizes, and samples of each file's bytes.

        Reads at most 256 KiB a file, so a change of a few bytes may go unseen; another training run does not. Raises CheckpointError
        naming a file that can no longer be read.
        """
        digest = hashlib.blake2b(digest_size=16)
        config = read_json(self.directory / "config.json")
        tensors = sorted((name, info.dtype, info.shape) for name, info in self.tensors.items())
        digest.update(json.dumps([config, tensors], sort_keys=True, separators=(",", ":")).encode())
        for file in sorted(set(self.files.values())):
            path = self.directory / file
            try:
                size = path.stat().st_size
                digest.update(f"{file}:{size}".encode())
                with path.open("rb") as data:
                    for i in range(_SAMPLES):
                        data.seek(max(0, size - _SAMPLE) * i // (_SAMPLES - 1))
                        digest.update(data.read(_SAMPLE))
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read ({error})") from None
        return digest.hexdigest()


def _weight_map(index: Path) -> dict[str, str]:
    """The weight_map of an index file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise CheckpointError(f"{index}: lists {key} twice ({seen[key]} and {value}); remove one")
            seen[key] = value
        return seen

    try:
        raw = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=unique)
        files = raw["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index with a weight_map ({error}); download it again") from None
    if not isinstance(files, dict) or not files or not all(isinstance(f, str) for f in files.values()):
        raise CheckpointError(f"{index}: weight_map must be an object that maps tensor names to file names")
    return files


def _single_file(directory: Path) -> dict[str, str]:
    """Without an index: the one safetensors file of the directory and all it holds."""
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{directory}: no {INDEX} and no safetensors file; not a checkpoint, or its weights are not downloaded")
    if len(found) > 1:
        raise CheckpointError(f"{directory}: {len(found)} safetensors files ({some(found)}) and no {INDEX} to say which tensor to take")
    return dict.fromkeys(read_header(directory / found[0]), found[0])


def some(names: list[str]) -> str:
    """The first names of a list, and how many more, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
