"""From logits to tokens: per-request sampling parameters, applied row by row with noise that belongs to the token."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from revolta_serve.types import SamplingParams, Slice
from sm70kernels import process_logits, sample_verify

PER_ROW = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
"""Parameters that process_logits takes per row, in its order."""


class Sampler:
    """Remembers each request's parameters from its first slice on."""

    def __init__(self) -> None:
        self.params: dict[int, SamplingParams] = {}

    def admit(self, piece: Slice) -> None:
        """Take note of the parameters a slice brings on first sight of its request."""
        if piece.sampling is not None:
            self.params[piece.request] = piece.sampling

    def forget(self, request: int) -> None:
        """Drop a request; one that never sampled here is ignored."""
        self.params.pop(request, None)

    def __call__(self, logits: Tensor, slices: Sequence[Slice]) -> list[int]:
        """Draw the next token of each slice from logits f32[N, V], which are modified in place."""
        params = [self.params[piece.request] for piece in slices]
        count = len(params)
        temperature = torch.from_numpy(np.array([p.temperature for p in params], np.float32))
        if any(p.temperature > 0 for p in params):
            per_row = [torch.from_numpy(np.array([getattr(p, name) for p in params], dtype)) for name, dtype in PER_ROW.items()]
            process_logits(logits, *per_row)
        # A verify step of one row: no draft to accept, one token to draw at the position after the slice.
        tokens, _ = sample_verify(
            logits.unsqueeze(1),
            torch.from_numpy(np.array([p.seed for p in params], np.int64)),
            torch.from_numpy(np.array([piece.start + len(piece.tokens) for piece in slices], np.int32)),
            temperature,
            torch.from_numpy(np.full((count, 1), -1, np.int32)),
            torch.from_numpy(np.ones(count, np.int32)),
        )
        drawn: list[int] = tokens.squeeze(1).tolist()
        return drawn
