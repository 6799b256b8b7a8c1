"""What the attention ops share besides the softmax: the output gate, partial results, and the makers of their test inputs."""

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.dims import evaluate


@np.errstate(all="ignore")  # infinities and NaN are data
def gated(o: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return h(f32(h(o)) * sigmoid(f32(gate))), or h(o) without a gate; h rounds to `dtype` (kernels.md 1.C).

    o f32[...]; gate of the same shape, f32 or f16. The gate comes last, after any merge over ranks.
    """
    rounded = o.to(dtype)
    if gate is None:
        return rounded
    y = rows.logistic(rows.floats(gate))
    y *= rows.floats(rounded)
    return rows.tensor(y, dtype)


def check_partial(op: str, gate: Tensor | None, partial: bool) -> None:
    """Refuse a gate on a partial result, which attention_merge has to apply. Raises ValueError."""
    if partial and gate is not None:
        raise ValueError(f"{op}: partial=True takes no gate; give it to attention_merge, which joins the parts")


def check_out(op: str, out: Tensor, act: torch.dtype, partial: bool) -> None:
    """Refuse an out buffer whose dtype is not that of the result. Raises ValueError."""
    expected = torch.float32 if partial else act
    if out.dtype != expected:
        raise ValueError(f"{op}: out: expected {expected} for partial={partial}, got {out.dtype}; allocate it with that dtype")


def selection(context: int | str) -> inputs.Maker:
    """Make selections i32[M, W]: distinct tokens below `context` in ascending order, holes of -1 anywhere, some rows empty."""

    def maker(draw: inputs.Draw) -> Tensor:
        m, w = draw.shape
        limit = evaluate(context, draw.dims)
        order = torch.rand(m, limit, generator=draw.generator).argsort(1)[:, :w].sort(1).values
        sel = torch.full((m, w), -1)
        sel[:, : order.shape[1]] = order
        kept = torch.rand(m, 1, generator=draw.generator) * 1.5 - 0.2  # from no column to every column
        return sel.masked_fill_(torch.rand(m, w, generator=draw.generator) > kept, -1).to(draw.dtype)

    return maker


def draw_partial(draw: inputs.Draw) -> bool:
    """True exactly where there is no gate: batches that agree on their optional arguments then agree on the dtype of out too."""
    return draw.made["gate"] is None


def draw_out(draw: inputs.Draw) -> Tensor:
    """Values of the output buffer before the call, in the dtype the result will have."""
    return draw.normal(*draw.shape).to(torch.float32 if draw.made["partial"] else draw.dtype)
