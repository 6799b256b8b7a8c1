"""process_logits: from a model's logits to those a token is drawn from, in place: bias, mask, penalties, temperature, filters.

In this order, all in float32; z is a logit, c how often its token occurs in the answer so far:

    bias         z + bias
    mask         -inf for a token whose bit is 0
    repetition   z / repetition if z > 0, else z * repetition       tokens of the prompt or the answer
    frequency    z - frequency * c                                  tokens of the answer
    presence     z - presence                                       tokens of the answer
    temperature  z / temperature
    min-p        weight >= min_p, with weight = exp(z - largest) = probability / largest probability
    top-k        the first k
    top-p        the shortest prefix whose share of the weight left by the others reaches top_p

A token is kept when it passes the last three; the others become -inf. They order tokens by value descending, then id ascending, so
each keeps a prefix of that order. A greedy row (temperature 0) ends after presence.

Sources: repetition is the penalised sampling of CTRL (Keskar et al. 2019, section 4.1), which divides; a logit below 0 is multiplied
instead, for it too must fall. Frequency and presence are OpenAI's: mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.inputs import Draw, Maker
from sm70kernels.op import INV, Derived, Dim, Op, Ratio


def _cells(name: str, row: Tensor, column: Tensor, shape: torch.Size) -> NDArray[np.int64]:
    """Return row * V + id of each pair of a sparse argument. Raises ValueError for one outside logits [M, V] or given twice."""
    for place, index, dim, size in ((f"{name}_row", row.numpy(), "M", shape[0]), (f"{name}_id", column.numpy(), "V", shape[1])):
        outside = index[(index < 0) | (index >= size)]
        if outside.size:
            raise ValueError(f"process_logits: {place}: {outside[0]}, but logits has {dim}={size}; pass 0 .. {dim}-1")
    cells: NDArray[np.int64] = row.numpy().astype(np.int64) * shape[1] + column.numpy()
    if (cells[1:] <= cells[:-1]).any():  # ascending pairs differ: only others need the sort
        found, times = np.unique(cells, return_counts=True)
        if found.size < cells.size:
            first = int((times > 1).argmax())
            m, v = divmod(int(found[first]), shape[1])
            raise ValueError(
                f"process_logits: {name}_row, {name}_id: row {m}, id {v} comes {times[first]} times; merge its entries into one"
            )
    return cells


def _add_bias(logits: Tensor, row: Tensor, column: Tensor, bias: Tensor) -> None:
    logits.numpy().reshape(-1)[_cells("bias", row, column, logits.shape)] += bias.numpy()


def _forbid(logits: Tensor, mask: Tensor) -> None:
    # Bit v % 32 of word v // 32 is bit v % 8 of byte v // 8 when the words are little-endian.
    octets = mask.numpy().astype("<i4", copy=False).view(np.uint8)
    allowed = np.unpackbits(octets, axis=1, count=logits.shape[1], bitorder="little")
    np.copyto(logits.numpy(), np.float32(-np.inf), where=allowed == 0)


def _penalise(logits: Tensor, row: Tensor, column: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> None:
    cells, count = _cells("seen", row, column, logits.shape), counts.numpy()
    if (negative := np.flatnonzero(count < 0)).size:
        at = negative[0]
        raise ValueError(f"process_logits: seen_count {at}: {count[at]} times; pass 0 for a token of the prompt only, or more")
    divisor, each, once = (x.numpy()[row.numpy()] for x in (repetition, frequency, presence))
    z = logits.numpy().reshape(-1)[cells]
    z = np.where(z > 0, z / divisor, z * divisor)
    z -= each * count.astype(np.float32)
    z -= np.where(count > 0, once, np.float32(0.0))
    logits.numpy().reshape(-1)[cells] = z


def _weights(x: Tensor) -> Tensor:
    """Return exp(x - max) of each row [R, V]; 1 for every +inf of a row that has one, 0 for -inf."""
    apart = x - x.amax(-1, keepdim=True)
    # inf - inf: both are the largest.
    return rows.exp(apart.nan_to_num_(nan=0.0, neginf=-torch.inf))


def _filtered(x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return x / temperature, x f32 [R, V] without NaN, with every token that a filter drops at -inf; the vectors are [R, 1]."""
    # Sorted before the division, which can round two logits to one value.
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    scaled = order.values / temperature
    weight = _weights(scaled)
    rank = torch.arange(x.shape[1])
    kept = (weight >= min_p) & ((top_k < 1) | (rank < top_k))
    # Double: the running sum of a large vocabulary must not stall below top_p. cumsum is sequential, so its last value is the total.
    mass = torch.where(kept, weight, 0.0).double()
    running = mass.cumsum(-1)
    kept &= (running - mass < top_p.double() * running[:, -1:]) | (top_p >= 1.0) | (rank == 0)
    return torch.full_like(x, -torch.inf).scatter_(1, order.indices, scaled.masked_fill_(~kept, -torch.inf))


def _filter(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Divide by the temperature and filter, in place; greedy rows are not touched."""
    sampled = (temperature > 0).nonzero().squeeze(1)
    if sampled.shape[0] == 0:
        return
    temperature, top_k, top_p, min_p = (x[sampled][:, None] for x in (temperature, top_k, top_p, min_p))
    min_p = min_p.clamp(max=1.0)  # the largest weight is 1, and its token stays
    x = logits.index_select(0, sampled)
    x.masked_fill_(x.isnan(), -torch.inf)
    if bool(((top_k >= 1) & (top_k < x.shape[1])).any() | (top_p < 1.0).any()):
        x = _filtered(x, temperature, top_k, top_p, min_p)
    else:
        x /= temperature
        if bool((min_p > 0).any()):
            x.masked_fill_(_weights(x) < min_p, -torch.inf)
    logits.index_copy_(0, sampled, x)


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    bias_row: Tensor | None,
    bias_id: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    seen_row: Tensor | None,
    seen_id: Tensor | None,
    seen_count: Tensor | None,
    repetition: Tensor | None,
    frequency: Tensor | None,
    presence: Tensor | None,
) -> None:
    """Process logits f32 [M, V] in place; temperature, top_p, min_p f32 [M], top_k i32 [M].

    bias f32 [B] is added at bias_row, bias_id i32 [B]. mask i32 [M, W], W = ceil(V / 32): bit v % 32 of word v // 32 set allows token
    v. The tokens seen in a row are seen_row, seen_id, seen_count i32 [S]: count in the answer, 0 for one in the prompt only;
    repetition (> 0), frequency and presence f32 [M] apply to them. Arguments left out change nothing.

    Off: top_k < 1 or >= V, top_p >= 1, min_p 0, repetition 1, frequency and presence 0. NaN counts as -inf; a row of -inf stays one.
    The most likely token is always kept. Raises ValueError for a (row, id) outside logits or given twice, and for a negative count.
    """
    biased = [x for x in (bias_row, bias_id, bias) if x is not None]  # all of a group are given, or none
    if biased:
        _add_bias(logits, *biased)
    if mask is not None:
        _forbid(logits, mask)
    seen = [x for x in (seen_row, seen_id, seen_count, repetition, frequency, presence) if x is not None]
    if seen:
        _penalise(logits, *seen)
    _filter(logits, temperature, top_k, top_p, min_p)


def _sometimes(off: float, maker: Maker) -> Maker:
    """The value that switches a filter off for half of the rows."""

    def mixed(draw: Draw) -> Tensor:
        made: Tensor = maker(draw)
        return made.masked_fill(torch.rand(draw.shape, generator=draw.generator) < 0.5, off)

    return mixed


def _some_rows(size: str) -> Maker:
    """The row of each of so many distinct cells of logits [M, V]; None half of the time."""

    def maker(draw: Draw) -> Tensor:
        cells = torch.randperm(draw.dims["M"] * draw.dims["V"], generator=draw.generator)[: draw.dims[size]]
        return (cells // draw.dims["V"]).to(draw.dtype)

    return inputs.optional(maker)


def _some_ids(row: str) -> Maker:
    """Distinct ids within each row of the argument `row`, made before."""

    def maker(draw: Draw) -> Tensor:
        rows_of, ids = draw.made[row], torch.zeros(draw.shape, dtype=draw.dtype)
        for m in range(draw.dims["M"]):
            here = rows_of == m
            ids[here] = torch.randperm(draw.dims["V"], generator=draw.generator)[: int(here.sum())].to(draw.dtype)
        return ids

    return maker


process_logits = Op(
    "process_logits",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        logits="f32[M,V] inout",
        temperature="f32[M]",
        top_k="i32[M]",
        top_p="f32[M]",
        min_p="f32[M]",
        bias_row="i32[B] optional",
        bias_id="i32[B] when=bias_row",
        bias="f32[B] when=bias_row",
        mask="i32[M,W] optional",
        seen_row="i32[S] optional",
        seen_id="i32[S] when=seen_row",
        seen_count="i32[S] when=seen_row",
        repetition="f32[M] when=seen_row",
        frequency="f32[M] when=seen_row",
        presence="f32[M] when=seen_row",
    ),
    dims=dict(
        M=Dim(0, 512, test=(0, 12)),
        V=Dim(1, 1 << 20, test=(1, 90)),
        B=Dim(0, "M*V", test=(0, "min(M*V,30)")),
        W=Derived("(V+31)//32"),
        S=Dim(0, "M*V", test=(0, "min(M*V,60)")),
    ),
    inputs=dict(
        logits=inputs.normal(3.0),
        temperature=_sometimes(0.0, inputs.uniform(0.3, 2.0)),
        top_k=_sometimes(0, inputs.integers(-1, "V+1")),
        top_p=_sometimes(1.0, inputs.uniform(0.05, 1.0)),
        min_p=_sometimes(0.0, inputs.uniform(0.0, 0.3)),
        bias_row=_some_rows("B"),
        bias_id=_some_ids("bias_row"),
        bias=inputs.normal(5.0),
        mask=inputs.optional(_sometimes(-1, inputs.integers(-(1 << 31), (1 << 31) - 1))),
        seen_row=_some_rows("S"),
        seen_id=_some_ids("seen_row"),
        seen_count=inputs.integers(0, 4),
        repetition=_sometimes(1.0, inputs.uniform(0.5, 2.0)),
        frequency=_sometimes(0.0, inputs.uniform(-2.0, 2.0)),
        presence=_sometimes(0.0, inputs.uniform(-2.0, 2.0)),
    ),
)
