"""kv_dequant: rows of the paged cache as activations, whatever the cache holds.

    k[m] = load(k_cache[index // P, index % P]),  v[m] likewise,  index = kv_index[m];  -1 makes a row of zeros

A cache of activations is copied bit for bit. E4M3 codes (uint8) become h(code * k_scale), INT8 codes h(code * k_scales[index]), the
product in float32 and one rounding; the E4M3 codes 0x7f and 0xff are NaN, and so is a row whose INT8 scale is NaN
(sm70kernels.kv_format, kernels.md C14). Exact in all of them.

Codes become float16. Nothing of a call with codes says so, hence a kernel wants the outputs k and v given there.

The kernel reads 8 values at a time: D is a multiple of 8 up to 256, tensors are aligned to 16 bytes. Where the reference refuses an
index outside the pool, the kernel, which no host may wait for, makes a row of zeros and reads nothing.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, kv_format
from sm70kernels.cuda import Kernel
from sm70kernels.op import EXACT, Dim, Exact, Op, Spec


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(
    k_cache: Tensor,
    v_cache: Tensor,
    kv_index: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return k, v [M, HK, D] at kv_index i64[M], flat into B * P, of k_cache, v_cache act, u8 or i8 [B, P, HK, D].

    k_scale, v_scale f32, with u8 only; k_scales, v_scales f32[B, P, HK], with i8 only. The dtype is that of the cache, float16 for codes.
    Raises IndexError for an index outside the pool.
    """
    blocks, page, heads, d = k_cache.shape
    index = kv_index.numpy()
    for wrong in index[(index < -1) | (index >= blocks * page)].tolist():
        raise IndexError(f"kv_dequant: kv_index {wrong} is outside the pool of {blocks * page} cells; pass -1 for a row of zeros")
    hole = index < 0
    found = []
    for cache, scale, scales in ((k_cache, k_scale, k_scales), (v_cache, v_scale, v_scales)):
        values = cache.numpy().reshape(-1, heads, d).take(index, 0, mode="clip")
        if scale is not None:
            values = kv_format.decode_e4m3(values, np.float32(scale.item())).astype(np.float16)
        elif scales is not None:
            factor = scales.numpy().reshape(-1, heads).take(index, 0, mode="clip")
            values = kv_format.decode_i8(values, factor).astype(np.float16)
        values[hole] = 0
        found.append(torch.from_numpy(values))
    k, v = found
    return k, v


KERNELS = {
    torch.float16: Kernel("kv_dequant", "kv_dequant_f16"),
    torch.uint8: Kernel("kv_dequant", "kv_dequant_e4m3"),
    torch.int8: Kernel("kv_dequant", "kv_dequant_i8"),
}


def launch(
    config: int,
    d: Mapping[str, int],
    k_cache: Tensor,
    v_cache: Tensor,
    kv_index: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    k: Tensor,
    v: Tensor,
) -> None:
    """Blocks of `config` threads, one warp a row and head."""
    defines = dict(HK=d["HK"], D=d["D"], THREADS=config)
    grid = -(-d["M"] * d["HK"] * 32 // config)
    scales = [scale for scale in (k_scale, v_scale, k_scales, v_scales) if scale is not None]
    KERNELS[k_cache.dtype](defines, grid, config, k_cache, v_cache, kv_index, d["M"], d["B"] * d["P"], *scales, k, v)


kv_dequant = Op(
    "kv_dequant",
    reference=reference,
    launch=launch,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(
        k_cache="kv[B,P,HK,D] aligned",
        v_cache="kv[B,P,HK,D] aligned",
        kv_index="i64[M]",
        k_scale="f32 device when=kv:u8",
        v_scale="f32 device when=kv:u8",
        k_scales="f32[B,P,HK] when=kv:i8",
        v_scales="f32[B,P,HK] when=kv:i8",
        k="act[M,HK,D] out aligned",
        v="act[M,HK,D] out aligned",
    ),
    dims=dict(
        M=Dim(0, 1 << 20, test=(0, 20)),
        HK=Spec(1, 2),
        D=Spec(256, test=(5, 32), kernel=(32, 80)),
        B=Dim(1, 1 << 24, test=(1, 5)),
        P=Dim(1, 4096, test=(1, 24)),
    ),
    inputs=dict(kv_index=inputs.integers(-1, "B*P-1")),
    configs=(128, 64, 256),
    bytes=lambda d, dtype: d["M"] * (8 + 4 * d["HK"] * d["D"] * dtype.itemsize),
    shapes=[dict(M=M, HK=HK, D=256, B=64, P=64) for HK in (2, 1) for M in (1, 5, 40, 64, 4096)],
)
