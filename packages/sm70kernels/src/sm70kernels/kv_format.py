"""Storage formats of the K/V cache beside the activation dtype: what a code is, in numpy. include/kv_format.cuh does the same in a kernel.

* E4M3 (uint8): code = nearest(x / scale), one float32 scale a cache; values beyond ±448 become ±448 and NaN becomes 0x7f.
* INT8 (int8): scale = max(absmax / 127, 1e-6) of the row of one token and head, code = clamp(nearest(x / scale), -128, 127). A row
  with an infinity or a NaN has scale NaN and codes 0, so that whoever reads it sees NaN.

Nearest is to even in ties; quotients and products are float32 (kernels.md C1).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from sm70kernels.rows import Floats

LARGEST = np.float32(448.0)
"""The largest E4M3 value."""

NAN = 0x7F
"""The E4M3 code stored for NaN."""

LEAST_SCALE = np.float32(1e-6)
"""The least INT8 scale: that of a row of zeros."""


@np.errstate(all="ignore")  # infinities and NaN are data
def encode_e4m3(x: Floats, scale: np.float32) -> NDArray[np.uint8]:
    """Return the codes of x under `scale`, shaped like x."""
    quotient: Floats = x / scale
    wanted = torch.from_numpy(np.clip(quotient, -LARGEST, LARGEST)).to(torch.float8_e4m3fn)
    codes: NDArray[np.uint8] = wanted.view(torch.uint8).numpy()
    codes[np.isnan(quotient)] = NAN
    return codes


@np.errstate(all="ignore")  # infinities and NaN are data
def decode_e4m3(codes: NDArray[np.uint8], scale: np.float32) -> Floats:
    """Return code * scale in float32, shaped like codes; NaN for 0x7f and 0xff."""
    values: Floats = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    return values * scale


@np.errstate(all="ignore")  # infinities and NaN are data
def encode_i8(x: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return (codes [..., D], scale [...]) of rows x [..., D]."""
    scale: Floats = np.maximum(np.abs(x).max(-1) / np.float32(127.0), LEAST_SCALE)
    scale[~np.isfinite(x).all(-1)] = np.nan
    quotient: Floats = np.nan_to_num(np.rint(x / scale[..., None]), nan=0.0)
    return np.clip(quotient, -128, 127).astype(np.int8), scale


@np.errstate(all="ignore")  # infinities and NaN are data
def decode_i8(codes: NDArray[np.int8], scale: Floats) -> Floats:
    """Return code * scale in float32 of codes [..., D] and scale [...]."""
    return codes.astype(np.float32) * scale[..., None]
