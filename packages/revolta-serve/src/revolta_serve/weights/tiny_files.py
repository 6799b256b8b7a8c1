"""Writing a tiny checkpoint so that nobody's weights are lost: all or nothing, and never over a checkpoint that was made elsewhere.

What is written carries a mark: weight files in their header's metadata, config.json in a field. Files are first written into a folder
beside their places and then moved there; a disk that is full leaves the directory as it was.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from revolta_serve.errors import CheckpointError, ConfigError
from revolta_serve.weights.header import read_metadata
from revolta_serve.weights.index import INDEX, some

MARK_FIELD = "made_by"
MARK = "revolta-serve make-tiny"
SHARD = "model-{:05d}-of-{:05d}.safetensors"
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX,
)  # fmt: skip
"""Files of a checkpoint beside its weights that are written or, the index, removed."""


def encode_json(value: Mapping[str, Any]) -> bytes:
    """One JSON object, indented, with a final newline."""
    return (json.dumps(value, indent=2) + "\n").encode()


def encode_weights(tensors: Mapping[str, Tensor], shards: int = 1) -> dict[str, bytes]:
    """Return `tensors` by file name: model.safetensors, or `shards` files of about equal size and their index.

    Raises ConfigError unless shards is between 1 and the number of tensors.
    """
    if not 1 <= shards <= len(tensors):
        raise ConfigError(f"shards is {shards}; must be an integer in [1, {len(tensors)}], the number of tensors", param="shards")
    if shards == 1:
        return {"model.safetensors": _safetensors(tensors)}
    total, seen = sum(t.nbytes for t in tensors.values()), 0
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for name, tensor in tensors.items():
        parts[min(seen * shards // total, shards - 1)][name] = tensor
        seen += tensor.nbytes
    named = {SHARD.format(i + 1, shards): part for i, part in enumerate(parts)}
    where = {name: file for file, part in named.items() for name in part}
    index = encode_json({"metadata": {"total_size": total}, "weight_map": where})
    return {file: _safetensors(part) for file, part in named.items()} | {INDEX: index}


def _safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """A marked safetensors file. The library keeps metadata in an order that changes from run to run, so one key is all it gets."""
    raw = save({name: t.contiguous() for name, t in tensors.items()}, metadata={"format": "pt"})
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"][MARK_FIELD] = MARK
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def _present(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.suffix == ".safetensors" or path.name in COMPANIONS]


def foreign(directory: Path) -> list[str]:
    """Names, sorted, of the checkpoint files in `directory` that do not carry the mark; they are somebody's."""
    present = _present(directory)
    ours = _is_marked_config(directory / "config.json")
    return sorted(path.name for path in present if not (_is_marked_file(path) if path.suffix == ".safetensors" else ours))


def _is_marked_file(path: Path) -> bool:
    try:
        return read_metadata(path).get(MARK_FIELD) == MARK
    except CheckpointError:
        return False


def _is_marked_config(path: Path) -> bool:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get(MARK_FIELD) == MARK


def check_target(directory: Path, *, force: bool = False) -> None:
    """Raise ConfigError if `directory` cannot be a directory, or holds checkpoint files of somebody else's and force is false."""
    if not directory.is_dir():
        if os.path.lexists(directory):
            raise ConfigError(f"{directory}: is not a directory; name one, or a path that does not exist yet")
        return
    try:
        folders = [path.name for path in _present(directory) if path.is_dir()]
        theirs = [] if folders or force else foreign(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read ({error.strerror}); choose another directory") from None
    if folders:
        raise ConfigError(f"{directory}: {some(folders)} is a folder where a file has to be; choose another directory")
    if theirs:
        raise ConfigError(
            f"{directory}: holds {some(theirs)}, which make-tiny did not write; choose another directory, "
            "or say --force (force=True) to delete the checkpoint that lies there"
        )


def replace_files(directory: Path, files: Mapping[str, bytes], *, force: bool = False) -> None:
    """Write `files` into `directory` (created), in the place of every weight file and index that lies there.

    Raises ConfigError as `check_target` does, and when a file cannot be written; the directory is then as it was.
    """
    check_target(directory, force=force)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".make-tiny-", dir=directory) as staging:
            for name, data in files.items():
                (Path(staging) / name).write_bytes(data)
            for stale in [*directory.glob("*.safetensors"), directory / INDEX]:
                stale.unlink(missing_ok=True)
            for name in files:
                os.replace(Path(staging) / name, directory / name)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written ({error.strerror}); choose another directory") from None


def write_weights(directory: str | Path, tensors: Mapping[str, Tensor], shards: int = 1, *, force: bool = False) -> None:
    """Replace the weights of a checkpoint that make-tiny wrote, keeping its other files.

    Raises ConfigError when there are weights of another origin and force is false, for an impossible number of shards, and when
    they cannot be written.
    """
    replace_files(Path(directory), encode_weights(tensors, shards), force=force)
