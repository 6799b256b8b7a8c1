"""Loading: every parameter of a rank filled exactly once from the tensors the index lists, or an error that says what to do."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from revolta_serve.errors import CheckpointError, ConfigError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.index import CheckpointIndex, some
from revolta_serve.weights.names import Parameter, Piece, parameters

log = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with bytes read so far, bytes to read, and the parameter that was being filled."""

CHUNK = 256 * 2**20
"""Bytes read at a time: bounds the memory beside the parameters themselves."""

_READABLE = {"F32": 4, "F16": 2, "BF16": 2}
_PREFIXES = ("model.language_model.", "model.")


def load(
    config: ModelConfig,
    directory: str | Path,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Return the parameters of tensor-parallel rank `tp_rank` of `tp_size` by name (names, shapes: weights/names.py).

    dtype: float32 or float16, for all but the parameters that stay float32 and the int64 constants. Only the files of the index
    and only this rank's parts are read.

    Raises CheckpointError naming tensor, file and the way out when anything is missing, left over, of the wrong shape or dtype,
    given in two spellings, not finite after conversion, or different from what config.json implies; ConfigError for another
    dtype, or when the model does not divide over `tp_size`.
    """
    if config.quantization is not None or config.ple_storage is not None:
        kind = config.quantization or f"ple_embedding_dtype {config.ple_storage}"
        raise CheckpointError(f"{directory}: stored as {kind}; only float32, float16 and bfloat16 checkpoints can be loaded")
    if dtype not in (torch.float32, torch.float16):
        raise ConfigError(f"activation dtype is {dtype}; must be torch.float32 or torch.float16", param="dtype")
    reader = _Reader(CheckpointIndex.open(directory), dtype, torch.device(device), progress)
    wanted = [(parameter, reader.spelling(parameter)) for parameter in parameters(config, tp_rank, tp_size)]
    reader.check_complete(wanted)
    return {parameter.name: reader.fill(parameter, pieces) for parameter, pieces in wanted if pieces is not None}


def canonical(name: str) -> tuple[str, str]:
    """Return a checkpoint name without prefix, and why it is not loaded ("" when it is part of the text model).

    Exports of the text model alone use `model.`, those of the whole model `model.language_model.`.
    """
    for marker, reason in (("visual.", "vision tower"), ("mtp.", "draft head")):
        if name.startswith((marker, f"model.{marker}", f"model.language_model.{marker}")):
            return name, reason
    if "hashstats_" in name or "token_lookup" in name:
        return name, "hash statistics"
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    if name == "hyper_connection_mixer.block_inject_weight.weight":
        return name, "unused injection of the final mixer"
    return name, ""


class _Reader:
    """The tensors of one checkpoint by canonical name, and the bytes read so far."""

    def __init__(self, index: CheckpointIndex, dtype: torch.dtype, device: torch.device, progress: Progress | None) -> None:
        self.index, self.dtype, self.device = index, dtype, device
        self.progress = progress or (lambda done, total, name: None)
        self.names: dict[str, str] = {}
        skipped: Counter[str] = Counter()
        for raw in index.tensors:
            name, reason = canonical(raw)
            if reason:
                skipped[reason] += 1
            elif name in self.names:
                raise CheckpointError(
                    f"{index.path(raw)}: {raw} and {self.names[name]} of {index.path(self.names[name])} are the same tensor; keep one"
                )
            else:
                self.names[name] = raw
        self.skipped = skipped
        self.done = self.total = 0
        self.open_path: Path | None = None
        self.open_file: Any = None

    def spelling(self, parameter: Parameter) -> tuple[Piece, ...] | None:
        """The spelling of `parameter` that this checkpoint uses, all of its tensors present; None for constants and absent optionals."""
        used = [pieces for pieces in parameter.sources if any(piece.source in self.names for piece in pieces)]
        if len(used) > 1:
            both = [next(self.names[piece.source] for piece in pieces if piece.source in self.names) for pieces in used]
            raise CheckpointError(f"{self._where(both[1])}: {both[0]} and {both[1]} both hold {parameter.name}; keep one of them")
        if not used and parameter.optional:
            return None
        if not used and parameter.values is not None:
            return ()
        pieces = used[0] if used else parameter.sources[0]
        if missing := list(dict.fromkeys(piece.source for piece in pieces if piece.source not in self.names)):
            lost = f"no file holds {some(missing)}, which {parameter.name} needs"
            raise CheckpointError(f"{self.index.directory}: {lost}; download the whole checkpoint, or correct its index")
        for piece in pieces:
            self._check(parameter, piece)
        return pieces

    def check_complete(self, wanted: list[tuple[Parameter, tuple[Piece, ...] | None]]) -> None:
        """Refuse tensors that nothing explains, log those that are left aside, and add up the bytes to read."""
        pieces = [piece for _, found in wanted for piece in found or ()]
        if unknown := sorted(set(self.names) - {piece.source for piece in pieces}):
            names = [self.names[name] for name in unknown]
            why = "no part of the model that config.json describes"
            raise CheckpointError(f"{self._where(names[0])}: holds {some(names)}: {why}; correct config.json or remove them from the index")
        if self.skipped:
            log.info("not loaded by the text model: %s", ", ".join(f"{n} tensors ({why})" for why, n in sorted(self.skipped.items())))
        if self.index.unlisted:
            log.info("not read: %d tensors that lie in weight files but not in the index", self.index.unlisted)
        self.total = sum(self._bytes(piece) for piece in pieces)

    def fill(self, parameter: Parameter, pieces: tuple[Piece, ...]) -> Tensor:
        """Allocate and fill one parameter."""
        if parameter.values is not None:
            constants = torch.tensor(parameter.values, dtype=torch.int64)
            for piece in pieces:
                self._compare(parameter, piece, constants)
            return constants.to(self.device)
        dtype = torch.float32 if parameter.kind == "f32" else self.dtype
        allocate = torch.zeros if parameter.padded else torch.empty
        out = allocate(parameter.shape, dtype=dtype, device=self.device)
        for piece in pieces:
            self._copy(parameter, piece, out)
        return out

    def _check(self, parameter: Parameter, piece: Piece) -> None:
        raw = self.names[piece.source]
        info = self.index.tensors[raw]
        legal = ("I64",) if parameter.kind == "i64" else tuple(_READABLE)
        if info.dtype not in legal:
            found = f"{raw} is stored as {info.dtype}, only {', '.join(legal)} can be loaded here"
            raise CheckpointError(f"{self._where(raw)}: {found}; config.json announces no quantization: take the config of these weights")
        if info.shape != piece.shape and not (piece.shape == () and info.shape == (1,)):
            wrong = f"{raw} has shape {list(info.shape)}, config.json implies {list(piece.shape)}"
            raise CheckpointError(f"{self._where(raw)}: {wrong}; config and weights are not of the same model")

    def _compare(self, parameter: Parameter, piece: Piece, constants: Tensor) -> None:
        raw = self.names[piece.source]
        stored = self._read(raw)
        if not torch.equal(stored, constants):
            raise CheckpointError(
                f"{self._where(raw)}: {raw} holds {stored.tolist()}, config.json implies {constants.tolist()}; "
                "seed, vocab_size, ngram_size or ngram_vocab_size_base in config.json is not the one the table was made with"
            )
        self._advance(self._bytes(piece), parameter.name)

    def _copy(self, parameter: Parameter, piece: Piece, out: Tensor) -> None:
        raw = self.names[piece.source]
        if not piece.take:
            self._store(parameter, raw, self._read(raw).reshape(()), out)
            return self._advance(self._bytes(piece), parameter.name)
        for take, put in _chunks(piece, _READABLE[self.index.tensors[raw].dtype]):
            data = self._read(raw, take)
            target = out[tuple(slice(a, b) for a, b in put)]
            self._store(parameter, raw, data.reshape(target.shape), target)
            self._advance(data.nbytes, parameter.name)
        return None

    def _store(self, parameter: Parameter, raw: str, data: Tensor, target: Tensor) -> None:
        """Convert and check: a value that is not finite afterwards would poison every answer."""
        target.copy_(data)
        if not bool(torch.isfinite(target).all()):
            bad = data[~torch.isfinite(target.to(data.device))].flatten()[0].item()
            width = str(target.dtype).removeprefix("torch.")
            way = "serve with float32 activations" if math.isfinite(bad) else "the file is damaged, download it again"
            raise CheckpointError(f"{self._where(raw)}: {raw} holds {bad}, not finite in {width}; {way}")
        if parameter.positive and not bool((target > 0).all()):
            raise CheckpointError(f"{self._where(raw)}: {raw} holds {data.min().item()}; a cache scale must be > 0")

    def _read(self, raw: str, box: tuple[tuple[int, int], ...] = ()) -> Tensor:
        """A tensor, or a box of it. Its file stays open until another one is needed."""
        path = self.index.path(raw)
        try:
            if path != self.open_path:
                self.open_file, self.open_path = safe_open(path, framework="pt"), path
            data: Tensor = self.open_file.get_slice(raw)[tuple(slice(a, b) for a, b in box)] if box else self.open_file.get_tensor(raw)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {raw} cannot be read ({error}); download the file again") from None
        return data

    def _bytes(self, piece: Piece) -> int:
        info = self.index.tensors[self.names[piece.source]]
        return math.prod(b - a for a, b in piece.take) * (8 if info.dtype == "I64" else _READABLE[info.dtype])

    def _advance(self, count: int, name: str) -> None:
        self.done += count
        self.progress(self.done, self.total, name)

    def _where(self, raw: str) -> str:
        return str(self.index.path(raw))


def _chunks(piece: Piece, itemsize: int) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]]:
    """Cut a piece along its first axis into boxes of at most CHUNK bytes; pieces that change shape on the way stay whole."""
    (start, stop), *rest = piece.take
    (at, end), *below = piece.put
    if stop == start:
        return
    if stop - start != end - at:
        yield piece.take, piece.put
        return
    step = max(1, CHUNK // max(1, itemsize * math.prod(b - a for a, b in rest)))
    for low in range(start, stop, step):
        high = min(low + step, stop)
        yield ((low, high), *rest), ((at + low - start, at + high - start), *below)
