"""kv_store: write the rows' keys and values into the paged cache.

    k_cache[index // P, index % P] = store(k[m]),  v_cache likewise,  index = kv_index[m];  -1 skips the row

A cache holds the values as they are, in the dtype of k and v; or E4M3 codes (uint8) under the two float32 scales of a layer, k_scale and
v_scale; or INT8 codes under a float32 scale for every token and head, which is stored beside them in k_scales and v_scales
[B, P, HK]. sm70kernels.kv_format defines the codes. Exact in all of them. A row that another rank owns, and padding, come with index -1
(kernels.md C1, C2).

The kernel stores 8 values at a time: D is a multiple of 8 up to 256, tensors are aligned to 16 bytes. It checks no index that a host
would have to wait for: a row outside the pool is skipped, and of two rows for one cell either may stay.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, kv_format
from sm70kernels.cuda import Kernel
from sm70kernels.op import EXACT, Dim, Exact, Op, Spec


def _check(kept: list[int], cells: int) -> None:
    """Refuse indices outside the pool and, unless Python runs with -O, duplicates: two rows for one cell is a caller's error."""
    if min(kept) < 0 or max(kept) >= cells:
        wrong = next(i for i in kept if not 0 <= i < cells)
        raise IndexError(f"kv_store: kv_index {wrong} is outside the pool of {cells} cells; pass -1 for a row to skip")
    if __debug__ and len(set(kept)) != len(kept):
        twice = next(i for i in kept if kept.count(i) > 1)
        raise ValueError(f"kv_store: kv_index names cell {twice} more than once in one call; give every row its own cell")


def reference(
    k: Tensor,
    v: Tensor,
    kv_index: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    """Store k, v act[M, HK, D] at kv_index i64[M], flat into B * P, of k_cache, v_cache act, u8 or i8 [B, P, HK, D], in place.

    k_scale, v_scale f32, with u8 only; k_scales, v_scales f32[B, P, HK], with i8 only, changed in place. Raises IndexError for an index
    outside the pool, ValueError for a cell named twice.
    """
    every = kv_index.tolist()
    kept = [i for i in every if i != -1]
    if not kept:
        return
    blocks, page, heads, d = k_cache.shape
    _check(kept, blocks * page)
    index = kv_index.numpy()
    (live,) = (index >= 0).nonzero() if len(kept) < len(every) else (None,)
    if live is not None:
        index = index.take(live)
    for x, cache, scale, scales in ((k, k_cache, k_scale, k_scales), (v, v_cache, v_scale, v_scales)):
        # numpy scatters a few rows in a third of the time of torch.
        values = x.numpy() if live is None else x.numpy().take(live, 0)
        if scale is not None:
            values = kv_format.encode_e4m3(values.astype(np.float32), np.float32(scale.item()))
        elif scales is not None:
            values, scales.numpy().reshape(-1, heads)[index] = kv_format.encode_i8(values.astype(np.float32))
        cache.numpy().reshape(-1, heads, d)[index] = values


KERNELS = {
    torch.float16: Kernel("kv_store", "kv_store_f16"),
    torch.uint8: Kernel("kv_store", "kv_store_e4m3"),
    torch.int8: Kernel("kv_store", "kv_store_i8"),
}


def launch(
    config: int,
    d: Mapping[str, int],
    k: Tensor,
    v: Tensor,
    kv_index: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    """Blocks of `config` threads, one warp a row and head."""
    defines = dict(HK=d["HK"], D=d["D"], THREADS=config)
    grid = -(-d["M"] * d["HK"] * 32 // config)
    scales = [scale for scale in (k_scale, v_scale, k_scales, v_scales) if scale is not None]
    KERNELS[k_cache.dtype](defines, grid, config, k, v, kv_index, d["M"], d["B"] * d["P"], k_cache, v_cache, *scales)


kv_store = Op(
    "kv_store",
    reference=reference,
    launch=launch,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(
        k="act[M,HK,D] aligned",
        v="act[M,HK,D] aligned",
        kv_index="i64[M]",
        k_cache="kv[B,P,HK,D] inout aligned",
        v_cache="kv[B,P,HK,D] inout aligned",
        k_scale="f32 device when=kv:u8",
        v_scale="f32 device when=kv:u8",
        k_scales="f32[B,P,HK] inout when=kv:i8",
        v_scales="f32[B,P,HK] inout when=kv:i8",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 20)),
        HK=Spec(1, 2),
        D=Spec(256, test=(5, 32), kernel=(32, 80)),
        B=Dim(1, 1 << 24, test=(1, 5)),
        P=Dim(1, 4096, test=(1, 24)),
    ),
    inputs=dict(kv_index=inputs.distinct("B*P")),
    configs=(128, 64, 256),
    bytes=lambda d, dtype: d["M"] * (8 + 4 * d["HK"] * d["D"] * dtype.itemsize),
    shapes=[dict(M=M, HK=HK, D=256, B=16, P=64) for HK in (2, 1) for M in (1, 5, 40, 64)],
)
