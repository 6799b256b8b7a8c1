"""Packed weight banks: one weight matrix w [N, K] as one flat u8 tensor in the order in which kernels read it.

    bank = pack(Int4.from_zeros(codes, scale, zeros))        u8 [bank_bytes("int4", N, K)]
    unpack(bank, "int4", N, K)                               the codes and scales that were packed, bit for bit
    dequantise(bank, "int4", N, K)                           w f32 [N, K]

A bank is a plane of codes and planes of metadata, each beginning at a multiple of 16 bytes. Its layout is a function of format, N, K and
phase alone, and its size is a multiple of 64, so a layer's experts stack to [X, bytes]: torch.stack([pack(w) for w in experts]).

Rows of w (columns of the product) are padded to tiles of 32 and k to steps of 32, with codes and scales that give w = 0. Below, T counts
tiles, S steps and B blocks of 128 k; a plane's order is that of its indices, the last fastest.

    codes    u8 [T, S, 32 lanes, 16]     int4 and nvfp4: a lane's 32 codes, two a byte
             u8 [T, S, 2, 32 lanes, 16]  fp8 and int8: 16 codes of the first half of the step's k, then of the second
    groups   f16 [T, S, 32 lanes, 2]     int4: scale and bias
             u8 [T, S, 32 lanes, 2]      nvfp4: the scale codes of the step's first and second 16 k
    rows     f32 [T, 32 lanes]           nvfp4: global scales
    scales   f32 [T, B, 4, 2, 4]         fp8: columns 8 q + 2 t + (0, 1, 4, 5) for q, t: the four whose sums a lane of quad-pair q holds
             f32 [T, 32]                 int8, in the order of columns

Lane l holds column 8 ((l / 4) mod 4) + l mod 4 + 4 (l / 16) of its tile: the one whose fragment it feeds to the tensor core when the four
quad-pairs of a warp stand side by side along N. Within each 32-bit word codes are ordered so that a mask yields pairs of consecutive k:
nibbles 0 2 4 6 1 3 5 7, bytes 0 2 1 3, from the lowest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sm70kernels.banks_weights import BankError, Fp8, Int4, Int8, Nvfp4, Weights, blocks, check_phase

__all__ = [
    "CLASSES", "FORMATS", "BankError", "Fp8", "Int4", "Int8", "Nvfp4", "Plane", "Weights", "bank_bytes", "dequantise", "layout", "pack",
    "unpack",
]  # fmt: skip

FORMATS = ("int4", "nvfp4", "fp8", "int8")

CLASSES = {"int4": "Int4", "nvfp4": "Nvfp4", "fp8": "Fp8", "int8": "Int8"}
"""What include/bank.cuh calls the formats."""

TILE = 32
"""Rows of w in a tile: 8 for each quad-pair of a warp."""

STEP = 32
"""k that a warp takes at a time."""

_COLUMN = torch.tensor([8 * (lane // 4 % 4) + lane % 4 + lane // 16 * 4 for lane in range(TILE)])
_LANE = _COLUMN.argsort()
_SUMS = torch.tensor([8 * q + 2 * t + i for q in range(4) for t in range(2) for i in (0, 1, 4, 5)])
_NIBBLES = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
_BYTES = torch.tensor([0, 2, 1, 3])


class Plane(NamedTuple):
    """One part of a bank: its first byte and what lies there."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, bank: Tensor) -> Tensor:
        """Return the plane as a view of the bank."""
        return bank[self.offset : self.offset + self.bytes].view(self.dtype).view(self.shape)


def layout(format: str, n: int, k: int, phase: int = 0) -> dict[str, Plane]:
    """Return the planes of a bank by name, in order. Raises BankError for an unknown format and for a phase the format does not have."""
    if format not in FORMATS:
        raise BankError(f"no bank format {format!r}; there are {', '.join(FORMATS)}")
    check_phase(format, phase)
    tiles, steps = -(-n // TILE), -(-k // STEP)
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "int4": dict(codes=((tiles, steps, TILE, 4, 4), torch.uint8), groups=((tiles, steps, TILE, 2), torch.float16)),
        "nvfp4": dict(
            codes=((tiles, steps, TILE, 4, 4), torch.uint8),
            groups=((tiles, steps, TILE, 2), torch.uint8),
            rows=((tiles, TILE), torch.float32),
        ),
        "fp8": dict(codes=((tiles, steps, 2, TILE, 4, 4), torch.uint8), scales=((tiles, blocks(k, phase), TILE), torch.float32)),
        "int8": dict(codes=((tiles, steps, 2, TILE, 4, 4), torch.uint8), scales=((tiles, TILE), torch.float32)),
    }[format]
    planes: dict[str, Plane] = {}
    offset = 0
    for name, (shape, dtype) in parts.items():
        planes[name] = Plane(offset, shape, dtype)
        offset += planes[name].bytes
    return planes


def bank_bytes(format: str, n: int, k: int, phase: int = 0) -> int:
    """Return the bytes of a bank, a multiple of 64. Raises BankError as `layout` does."""
    last = list(layout(format, n, k, phase).values())[-1]
    return last.offset + last.bytes


def pack(weights: Weights) -> Tensor:
    """Return u8 [bank_bytes(weights.format, N, K, phase)] on the device of the weights; the same bytes on every device."""
    n, k = weights.codes.shape
    phase = weights.phase if isinstance(weights, Fp8) else 0
    planes = layout(weights.format, n, k, phase)
    bank = torch.zeros(bank_bytes(weights.format, n, k, phase), dtype=torch.uint8, device=weights.codes.device)

    def put(name: str, values: Tensor) -> None:
        planes[name].of(bank).copy_(values)

    if isinstance(weights, Int4 | Nvfp4):
        put("codes", _nibbles(_padded(weights.codes)))
    else:
        put("codes", _bytes(_padded(weights.codes.view(torch.uint8))))
    if isinstance(weights, Int4):
        put("groups", torch.stack([_lanes(_padded(values, 1)) for values in (weights.scale, weights.bias)], -1))
    elif isinstance(weights, Nvfp4):
        groups = _padded(weights.scale, 2)
        put("groups", _lanes(groups.view(len(groups), groups.shape[1] // 2, 2)))
        put("rows", _padded(weights.rows[:, None], 1).view(-1, TILE)[:, _COLUMN.to(bank.device)])
    elif isinstance(weights, Fp8):
        put("scales", _padded(weights.scale, 1).view(-(-n // TILE), TILE, blocks(k, phase))[:, _SUMS.to(bank.device)].transpose(1, 2))
    else:
        put("scales", _padded(weights.scale[:, None], 1).view(-1, TILE))
    return bank


def unpack(bank: Tensor, format: str, n: int, k: int, phase: int = 0) -> Weights:
    """Return what was packed into the bank u8 [bytes]. Raises BankError for a bank of another size."""
    expected = bank_bytes(format, n, k, phase)
    if bank.dtype != torch.uint8 or bank.shape != (expected,):
        raise BankError(f"{format} of {n} x {k}: expected a bank of u8 [{expected}], got {bank.dtype} {list(bank.shape)}")
    plane = {name: plane.of(bank) for name, plane in layout(format, n, k, phase).items()}
    if format == "int4":
        scale, bias = (_columns(plane["groups"][..., i])[:n].contiguous() for i in (0, 1))
        return Int4(_from_nibbles(plane["codes"])[:n, :k].contiguous(), scale, bias)
    if format == "nvfp4":
        scale = _columns(plane["groups"]).flatten(1)[:n, : k // 16].contiguous()
        rows = plane["rows"][:, _LANE.to(bank.device)].flatten()[:n].contiguous()
        return Nvfp4(_from_nibbles(plane["codes"])[:n, :k].contiguous(), scale, rows)
    codes = _from_bytes(plane["codes"])[:n, :k].contiguous()
    if format == "fp8":
        scale = plane["scales"].transpose(1, 2)[:, _SUMS.argsort().to(bank.device)]
        return Fp8(codes, scale.flatten(0, 1)[:n].contiguous(), phase)
    return Int8(codes.view(torch.int8), plane["scales"].flatten()[:n].contiguous())


def dequantise(bank: Tensor, format: str, n: int, k: int, phase: int = 0) -> Tensor:
    """Return w f32 [N, K] by the format's rule: exact float16 numbers for int4 and nvfp4. Raises BankError for a bank of another size."""
    return unpack(bank, format, n, k, phase).dequantise()


def _padded(matrix: Tensor, step: int = STEP) -> Tensor:
    """Zero rows up to a tile and zero columns up to a multiple of `step`."""
    n, k = matrix.shape
    padded = matrix.new_zeros(n + -n % TILE, k + -k % step)
    padded[:n, :k] = matrix
    return padded


def _lanes(rows: Tensor) -> Tensor:
    """[T · 32, S, ...] by row -> [T, S, 32, ...] by lane."""
    return rows.view(len(rows) // TILE, TILE, *rows.shape[1:])[:, _COLUMN.to(rows.device)].transpose(1, 2)


def _columns(lanes: Tensor) -> Tensor:
    """[T, S, 32, ...] by lane -> [T · 32, S, ...] by row."""
    return lanes.transpose(1, 2)[:, _LANE.to(lanes.device)].flatten(0, 1)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes [T · 32, S · 32] -> [T, S, 32 lanes, 4 words, 4 bytes]."""
    n, k = codes.shape
    words = codes.view(n, k // STEP, 4, 8)[..., _NIBBLES.to(codes.device)]
    return _lanes(words[..., 0::2] | words[..., 1::2] << 4)


def _from_nibbles(plane: Tensor) -> Tensor:
    pairs = torch.stack([plane & 15, plane >> 4], -1).flatten(-2)
    return _columns(pairs[..., _NIBBLES.argsort().to(plane.device)]).flatten(1)


def _bytes(codes: Tensor) -> Tensor:
    """Codes [T · 32, S · 32] -> [T, S, 2, 32 lanes, 4 words, 4 bytes]."""
    n, k = codes.shape
    return _lanes(codes.view(n, k // STEP, 2, 4, 4)[..., _BYTES.to(codes.device)]).transpose(2, 3)


def _from_bytes(plane: Tensor) -> Tensor:
    return _columns(plane.transpose(2, 3)[..., _BYTES.argsort().to(plane.device)]).flatten(1)
