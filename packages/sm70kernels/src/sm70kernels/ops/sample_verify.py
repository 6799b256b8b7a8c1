"""sample_verify: draw the token after every row and keep a request's tokens while they agree with its drafts.

    token = lowest argmax over v of (logit_v + gumbel(seed, position, v))         temperature > 0
    token = lowest argmax over v of logit_v                                       temperature 0

That is a draw from softmax(logits) (Gumbel-max). The noise belongs to the token at its position (sm70kernels.philox), so a verify
row draws what plain decoding would draw there: accepting while draft = token gives plain decoding's tokens at any temperature.
Temperature, top-k, top-p and min-p are process_logits' work; here temperature only says whether noise is added.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sm70kernels import acceptance, inputs, philox
from sm70kernels.op import INV, Dim, Exact, Op


def _add_noise(scores: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Return scores f32 [R, V] plus the noise of each token; seed and position [R]. Groups of four dead tokens draw none."""
    vocabulary = scores.shape[1]
    noisy = F.pad(scores, (0, -vocabulary % 4), value=-torch.inf).view(scores.shape[0], -1, 4)
    row, group = (noisy > -torch.inf).any(-1).nonzero().unbind(1)
    noise = philox.gumbel(seed[row], position[row], group)
    flat, index = noisy.view(-1, 4), row * noisy.shape[1] + group
    flat.index_copy_(0, index, flat.index_select(0, index) + noise)
    return noisy.view(scores.shape[0], -1)[:, :vocabulary]


def reference(logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, draft: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens i32 [N, T], count i32 [N]) from logits f32 [N, T, V], V >= 1.

    seed i64 [N]; position i32 [N] of the token that row 0 produces; temperature f32 [N]; draft i32 [N, T], column t judged by row t
    (-1: none); rows i32 [N], 0 .. T. count = 1 + accepted drafts, 0 for a request without rows; tokens from count on are -1. NaN
    counts as -inf; a row of -inf gives token 0.
    """
    requests, width, vocabulary = logits.shape
    # fmax is the other number where one is NaN.
    scores = torch.from_numpy(np.fmax(logits.numpy().reshape(-1, vocabulary), np.float32(-np.inf)))
    if any(t > 0 for t in temperature.tolist()):
        request, row = ((temperature > 0)[:, None] & (torch.arange(width) < rows[:, None])).nonzero().unbind(1)
        drawn = request * width + row
        if drawn.shape[0]:
            scores.index_copy_(0, drawn, _add_noise(scores.index_select(0, drawn), seed[request], position[request] + row))
    return acceptance.accept(acceptance.lowest_argmax(scores).view(requests, width), draft, rows)


sample_verify = Op(
    "sample_verify",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Exact(),
    args=dict(
        logits="f32[N,T,V]",
        seed="i64[N]",
        position="i32[N]",
        temperature="f32[N]",
        draft="i32[N,T]",
        rows="i32[N]",
        tokens="i32[N,T] out",
        count="i32[N] out",
    ),
    dims=dict(N=Dim(0, 64, test=(0, 6)), T=Dim(1, 8, test=(1, 5)), V=Dim(1, 1 << 20, test=(1, 40))),
    inputs=dict(
        logits=inputs.normal(2.0),
        seed=inputs.integers(0, (1 << 63) - 2),
        position=inputs.integers(0, (1 << 31) - 2),
        temperature=lambda draw: inputs.integers(0, 1)(draw) * 0.7,
        draft=inputs.integers(-1, "min(V-1,2)"),
        rows=inputs.integers(0, "T"),
    ),
)
