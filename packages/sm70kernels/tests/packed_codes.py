"""What the bytes of a packed weight bank mean, written from the definition of the layout and of the formats alone.

`weight` reads one weight, `matrix` all of them with arrays of indices. int4 and nvfp4 weights are float16 numbers; for fp8 and int8 the
product of code and scale is exact in float64.
"""

import struct
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .kv_codes import e4m3_value, single

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def half(x: float) -> float:
    """The float16 number nearest to x, ties to even."""
    return float(struct.unpack("<e", struct.pack("<e", x))[0])


def e2m1_value(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def _lane(column: int) -> int:
    """The lane that holds a column of a 32-column tile: quad-pair column / 8, its lower four lanes for the first four columns."""
    return column // 8 * 4 + column % 4 + (16 if column % 8 >= 4 else 0)


def _place(column: int) -> int:
    """Where the fp8 scale of a column of a tile lies: eight by quad-pair, of those four by four so that columns 0 1 4 5 come first."""
    return column // 8 * 8 + (column % 4 // 2) * 4 + column % 8 // 4 * 2 + column % 2


def weight(bank: bytes, format: str, n: int, k: int, phase: int, row: int, column: int) -> float:
    """Weight w[row, column] of a bank of [n, k]."""
    tiles, steps = (n + 31) // 32, (k + 31) // 32
    tile, lane, step, inner = row // 32, _lane(row % 32), column // 32, column % 32
    at = tile * steps + step
    if format in ("int4", "nvfp4"):
        nibble = inner % 8 // 2 + (4 if inner % 2 else 0)
        byte = bank[(at * 32 + lane) * 16 + inner // 8 * 4 + nibble // 2]
        code = byte >> 4 if nibble % 2 else byte & 15
        group = tiles * steps * 512 + at * (128 if format == "int4" else 64)
        if format == "int4":
            scale, bias = struct.unpack_from("<2e", bank, group + 4 * lane)
            return half(code * scale + bias)
        (of_row,) = struct.unpack_from("<f", bank, tiles * steps * 576 + (tile * 32 + lane) * 4)
        scale = half(single(e4m3_value(bank[group + 2 * lane + inner // 16]) * of_row))
        return half(e2m1_value(code) * scale)
    place = inner % 4 // 2 + (2 if inner % 2 else 0)
    code = bank[at * 1024 + inner // 16 * 512 + lane * 16 + inner % 16 // 4 * 4 + place]
    scales = tiles * steps * 1024
    if format == "int8":
        (scale,) = struct.unpack_from("<f", bank, scales + row * 4)
        return (code - 256 if code > 127 else code) * float(scale)
    blocks = (phase + k + 127) // 128
    (scale,) = struct.unpack_from("<f", bank, scales + ((tile * blocks + (phase + column) // 128) * 32 + _place(row % 32)) * 4)
    return e4m3_value(code) * float(scale)


def matrix(bank: NDArray[np.uint8], format: str, n: int, k: int, phase: int) -> NDArray[np.float64]:
    """All weights [n, k] of a bank."""
    tiles, steps = (n + 31) // 32, (k + 31) // 32
    row, column = np.arange(n)[:, None], np.arange(k)[None, :]
    tile, lane, inner = row // 32, np.array([_lane(c) for c in range(32)])[row % 32], column % 32
    at = tile * steps + column // 32

    def numbers(dtype: str, offset: int, count: int) -> NDArray[Any]:
        return bank[offset : offset + count * np.dtype(dtype).itemsize].view(dtype)

    e4m3 = np.array([e4m3_value(code) for code in range(256)])
    if format in ("int4", "nvfp4"):
        nibble = inner % 8 // 2 + inner % 2 * 4
        code = bank[(at * 32 + lane) * 16 + inner // 8 * 4 + nibble // 2] >> (nibble % 2 * 4).astype(np.uint8) & 15
        if format == "int4":
            groups = numbers("<f2", tiles * steps * 512, tiles * steps * 64).astype(np.float64).reshape(-1, 2)[at * 32 + lane]
            exact = code * groups[..., 0] + groups[..., 1]
        else:
            groups = e4m3[bank[tiles * steps * 512 + (at * 32 + lane) * 2 + inner // 16]]
            of_row = numbers("<f4", tiles * steps * 576, tiles * 32)[tile * 32 + lane].astype(np.float64)
            scale = (groups * of_row).astype(np.float32).astype(np.float16).astype(np.float64)
            exact = np.array([e2m1_value(code) for code in range(16)])[code] * scale
        return exact.astype(np.float16).astype(np.float64)
    place = inner % 4 // 2 + inner % 2 * 2
    code = bank[at * 1024 + inner // 16 * 512 + lane * 16 + inner % 16 // 4 * 4 + place]
    scales = tiles * steps * 1024
    if format == "int8":
        return code.view(np.int8) * numbers("<f4", scales, tiles * 32)[row].astype(np.float64)
    blocks, places = (phase + k + 127) // 128, np.array([_place(c) for c in range(32)])
    at_scale = (tile * blocks + (phase + column) // 128) * 32 + places[row % 32]
    return e4m3[code] * numbers("<f4", scales, tiles * blocks * 32)[at_scale].astype(np.float64)


def weights(bank: Tensor, format: str, n: int, k: int, phase: int) -> Tensor:
    """All weights f64 [n, k] of a bank, on its device. Those of recent banks are kept: a definition is evaluated several times."""
    return _weights(bank.cpu().numpy().tobytes(), format, n, k, phase).to(bank.device)


@lru_cache(maxsize=64)
def _weights(bank: bytes, format: str, n: int, k: int, phase: int) -> Tensor:
    return torch.from_numpy(matrix(np.frombuffer(bank, np.uint8), format, n, k, phase))
