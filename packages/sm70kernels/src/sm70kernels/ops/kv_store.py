"""kv_store: write the rows' keys and values into the paged cache.

    k_cache[index // P, index % P] = k[m],  v_cache likewise,  index = kv_index[m];  -1 skips the row

Exact: a dense cache has the dtype of k and v. A row that another rank owns, and padding, come with index -1 (kernels.md C2).
"""

from torch import Tensor

from sm70kernels import inputs
from sm70kernels.op import EXACT, Dim, Exact, Op, Spec


def _check(kept: list[int], cells: int) -> None:
    """Refuse indices outside the pool and, unless Python runs with -O, duplicates: two rows for one cell is a caller's error."""
    if min(kept) < 0 or max(kept) >= cells:
        wrong = next(i for i in kept if not 0 <= i < cells)
        raise IndexError(f"kv_store: kv_index {wrong} is outside the pool of {cells} cells; pass -1 for a row to skip")
    if __debug__ and len(set(kept)) != len(kept):
        twice = next(i for i in kept if kept.count(i) > 1)
        raise ValueError(f"kv_store: kv_index names cell {twice} more than once in one call; give every row its own cell")


def reference(k: Tensor, v: Tensor, kv_index: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Store k, v act[M, HK, D] at kv_index i64[M], flat into B * P, of k_cache, v_cache act[B, P, HK, D], in place.

    Raises IndexError for an index outside the pool, ValueError for a cell named twice.
    """
    every = kv_index.tolist()
    kept = [i for i in every if i != -1]
    if not kept:
        return
    blocks, page, heads, d = k_cache.shape
    _check(kept, blocks * page)
    index, near, far = kv_index.numpy(), k.numpy(), v.numpy()
    if len(kept) < len(every):
        (rows,) = (index >= 0).nonzero()
        index, near, far = index.take(rows), near.take(rows, 0), far.take(rows, 0)
    # numpy scatters a few rows in a third of the time of torch.
    k_cache.numpy().reshape(-1, heads, d)[index] = near
    v_cache.numpy().reshape(-1, heads, d)[index] = far


kv_store = Op(
    "kv_store",
    reference=reference,
    launch=None,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(
        k="act[M,HK,D]",
        v="act[M,HK,D]",
        kv_index="i64[M]",
        k_cache="act[B,P,HK,D] inout",
        v_cache="act[B,P,HK,D] inout",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 20)),
        HK=Spec(1, 2),
        D=Spec(256, test=(5, 32)),
        B=Dim(1, 1 << 24, test=(1, 5)),
        P=Dim(1, 4096, test=(1, 24)),
    ),
    inputs=dict(kv_index=inputs.distinct("B*P")),
)
