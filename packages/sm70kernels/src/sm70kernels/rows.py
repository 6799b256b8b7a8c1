"""Row independence on CPU: the arithmetic every reference uses so that a row's bits do not depend on its neighbours.

torch picks a GEMM kernel, a vector tail and a thread split from the whole shape of a call, so the same row can differ in its
last bits between a batch of one and a batch of nine. Three rules remove that:

* matrix products run on tiles with a fixed number of rows (:data:`TILE`), padded with zero rows;
* transcendental functions see a multiple of 32 elements, at most 32,768 at a time, so neither a scalar tail nor a thread split occurs;
* sums run over the last, contiguous axis.

A small matrix in a decode tile is the exception to the first: it multiplies every row on its own, by a matrix-vector product, so there
is no tile to pad.

Every (rows, N, K) product is probed once, on first use: one row at every position of the tile, among random neighbours, must give
the same bits. A shape that fails takes the next method; a shape that fails all of them is refused. Where tiles of 4, 8, 12, ... rows
are found to give the very bits of the full tile, a product uses the smallest that holds its rows.

The references of decode ops do the rest of their work in numpy on the tensors' memory: its calls cost a third of torch's, and a
decode step is a few hundred calls on a few hundred numbers each. numpy's quotients and roots are rounded as IEEE 754 asks and its
exponential masks the tail of a vector, so neither needs the second rule.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]

TILE = {"decode": 16, "prefill": 64}
"""Rows of one tile by slice kind. Decode and verify rows share a tile; a prefill tile belongs to one request."""

GRANULE = 4
"""Tiles may be cut to a multiple of this many rows where the probe finds that it changes no bits: a lone request costs 4 rows, not 16."""

ELEMENTS = 32_768
"""Largest element-wise call: torch splits longer ones over threads at positions that depend on the length."""

LANES = 32
"""Element-wise calls are padded to this: two AVX-512 vectors of float32, torch's widest unrolled step."""

SMALL = 1 << 17
"""Largest matrix, in weights, that a decode tile reads once for every row: half a megabyte stays in cache between the rows."""

UNTHREADED = 8192
"""Weights of one matrix-vector product. numpy's BLAS hands larger ones (from 9,216) to a thread team, for longer than they take."""


_ONE = np.float32(1.0)


class RowDependenceError(RuntimeError):
    """No method computes a matrix product of this shape independently of the neighbouring rows."""


def active(counts: Sequence[int]) -> slice | list[int]:
    """Index the entries of counts that are not 0: a slice when they come first, which copies nothing; [] for none."""
    found = [i for i, count in enumerate(counts) if count]
    return slice(0, len(found)) if found and found[-1] == len(found) - 1 else found


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Return x [M, ...] with zero rows appended up to a multiple of `multiple`; x itself when none are missing."""
    missing = -x.shape[0] % multiple
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def floats(x: Tensor) -> Floats:
    """Return x (any float dtype, any strides) as a float32 array, sharing its memory where it is float32 already."""
    array: Floats = x.numpy() if x.dtype is torch.float32 else x.float().numpy()
    return array


def tensor(x: Floats, dtype: torch.dtype) -> Tensor:
    """Return float32 x as a tensor of `dtype`, sharing its memory where that is float32."""
    return torch.from_numpy(x) if dtype is torch.float32 else torch.from_numpy(x).to(dtype)


@cache
def _block(n: int, k: int) -> int:
    """The most rows of w [n, k] that divide n and make a matrix-vector product of at most UNTHREADED weights; 0 for a w unfit for that."""
    fitting = (size for size in range(n, 0, -1) if n % size == 0 and size * k <= UNTHREADED)
    return next(fitting, 0) if 0 < n * k <= SMALL else 0


def _vectors(x: Floats, w: Floats) -> Floats:
    """x [M, K] · w [N, K]ᵀ, every row by matrix-vector products of its own: the very call, whatever M is."""
    (m, k), n = x.shape, len(w)
    size = _block(n, k)
    result: Floats
    if m == 1:  # the same products by shorter ways, as the probe makes sure: a lone request is what most steps are
        result = np.dot(x, w.T) if size == n else np.matmul(w.reshape(n // size, size, k), x[0]).reshape(1, n)
    else:
        result = np.matmul(w.reshape(n // size, size, k), x[:, None, :, None]).reshape(m, n)
    return result


@np.errstate(all="ignore")  # infinities and NaN are data
def _by_vectors(x: Tensor, w: Tensor) -> Tensor:
    return torch.from_numpy(_vectors(x.numpy(), w.numpy()))


def _by_linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def _by_transpose(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(w, x.t()).t().contiguous()


def _by_double(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.double(), w.double()).float()


_METHODS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (_by_vectors, _by_linear, _by_transpose, _by_double)


class Product(NamedTuple):
    """How products of one shape are computed: `method` on any multiple of `granule` rows up to the tile gives a row the same bits."""

    method: Callable[[Tensor, Tensor], Tensor]
    granule: int


@cache
def product(rows: int, n: int, k: int) -> Product:
    """Choose how x [up to `rows`, k] is multiplied by w [n, k]ᵀ in float32 with row-independent bits.

    The granule is 1 for matrix-vector products, GRANULE where every smaller tile gives the bits of the full one, else `rows`. Raises
    RowDependenceError naming the shape when no method keeps a row's bits even at a constant number of rows.
    """
    generator = torch.Generator().manual_seed(rows * 1_000_003 + n * 1_009 + k)
    w = torch.randn(n, k, generator=generator)
    row = torch.randn(k, generator=generator)
    for method in _METHODS:
        if method is _by_vectors and (rows > TILE["decode"] or _block(n, k) == 0):
            continue
        step = 1 if method is _by_vectors else GRANULE
        expected = method(_among(row, rows, 0, None), w)[0]
        if not _holds(method, w, row, expected, rows, generator):
            continue
        smaller = range(step, rows, step)
        if rows % step == 0 and all(_holds(method, w, row, expected, size, generator) for size in smaller):
            return Product(method, step)
        return Product(method, rows)
    raise RowDependenceError(f"linear: no row-independent product for {rows} rows, N={n}, K={k}; use another tile size")


def _among(row: Tensor, rows: int, position: int, generator: torch.Generator | None) -> Tensor:
    """`rows` rows, random or zero, with `row` at `position`."""
    x = torch.zeros(rows, len(row)) if generator is None else torch.randn(rows, len(row), generator=generator)
    x[position] = row
    return x


def _holds(
    method: Callable[[Tensor, Tensor], Tensor], w: Tensor, row: Tensor, expected: Tensor, rows: int, generator: torch.Generator
) -> bool:
    """Whether a tile of `rows` rows gives `row` the expected bits at every position among random neighbours, and among zeros."""
    return torch.equal(method(_among(row, rows, 0, None), w)[0], expected) and all(
        torch.equal(method(_among(row, rows, position, generator), w)[position], expected) for position in range(rows)
    )


def linear(x: Tensor, w: Tensor, rows: int) -> Tensor:
    """Return x [M, K] · w [N, K]ᵀ as float32 [M, N], in tiles of at most `rows` rows (16 decode, 64 prefill).

    float16 inputs are widened first: the product and its sum are float32 and the caller rounds.
    """
    if x.dtype is not torch.float32:
        x = x.float()
    if w.dtype is not torch.float32:
        w = w.float()
    method, granule = product(rows, *w.shape)
    if method is _by_vectors:
        return method(x, w)
    m = x.shape[0]
    if m % granule == 0 and 0 < m <= rows:
        return method(_aligned(x), w)
    padded = pad_rows(x, granule)
    if 0 < padded.shape[0] <= rows:
        return method(_aligned(padded), w)[:m]
    return torch.cat([method(_aligned(tile), w) for tile in padded.split(rows)])[:m]


def multiply(x: Floats, w: Floats, rows: int) -> Floats:
    """Return x [M, K] · w [N, K]ᵀ as a new array [M, N], with the bits of :func:`linear`; call it under np.errstate(all="ignore")."""
    if product(rows, *w.shape).method is _by_vectors:
        return _vectors(x, w)
    result: Floats = linear(torch.from_numpy(x), torch.from_numpy(w), rows).numpy()
    return result


def _aligned(x: Tensor) -> Tensor:
    """x contiguous and on a 16-byte boundary: some narrow products take another path, with other bits, when it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a float32 element-wise function with bits that do not depend on an element's place in x (any shape)."""
    count = x.numel()
    if count % LANES == 0 and count <= ELEMENTS and x.is_contiguous():
        return function(x)
    flat = x.contiguous().view(-1)
    missing = -count % LANES
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    if flat.numel() <= ELEMENTS:
        return function(flat)[:count].view(x.shape)
    return torch.cat([function(part) for part in flat.split(ELEMENTS)])[:count].view(x.shape)


def exp(x: Tensor) -> Tensor:
    """e^x, place-independent."""
    return elementwise(torch.exp, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), place-independent."""
    return elementwise(torch.sigmoid, x)


def logistic(x: Floats) -> Floats:
    """1 / (1 + e^-x) as a new array, place-independent; call it under np.errstate(all="ignore")."""
    y: Floats = np.negative(x)
    np.exp(y, out=y)
    y += _ONE
    np.reciprocal(y, out=y)
    return y


def swish(x: Floats) -> Floats:
    """x / (1 + e^-x) as a new array, place-independent; call it under np.errstate(all="ignore")."""
    y: Floats = np.negative(x)
    np.exp(y, out=y)
    y += _ONE
    np.divide(x, y, out=y)
    return y


def root_mean_square(x: Floats, eps: float) -> Floats:
    """sqrt(mean(x²) + eps) over the last axis of x [..., K], kept as size 1; a row is one dot product, whatever stands beside it."""
    y: Floats = np.vecdot(x, x)[..., None]
    y /= np.float32(x.shape[-1])
    y += np.float32(eps)
    np.sqrt(y, out=y)
    return y


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last axis of x [..., K], kept as size 1; at most 32,768 elements a call so that no thread split occurs."""
    k = x.shape[-1]
    if x.numel() <= ELEMENTS and x.is_contiguous():
        return x.sum(-1, keepdim=True)
    flat = x.contiguous().view(-1, k)
    parts = [part.sum(-1, keepdim=True) for part in flat.split(max(1, ELEMENTS // k))]
    return torch.cat(parts).view(*x.shape[:-1], 1)


def rms(x: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean(x²) + eps) over the last axis, float32 in and out."""
    return x * torch.rsqrt(row_sum(x * x) / x.shape[-1] + eps)
