"""From logits to tokens: per-request sampling parameters, applied row by row with noise that belongs to the token."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from revolta_serve.types import SamplingParams, Slice
from sm70kernels import process_logits, sample_verify

PER_ROW = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
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

    def __call__(self, logits: Tensor, slices: Sequence[Slice]) -> list[tuple[int, ...]]:
        """Draw the tokens of each slice.

        logits f32[N, T, V]: row (n, t) judges the slice's draft t and, past the last accepted draft, gives the next token. Rows beyond
        a slice's drafts are padding. Modified in place. Returns 1 + accepted tokens per slice.
        """
        n, width, vocab = logits.shape
        params = [self.params[piece.request] for piece in slices]
        temperature = torch.from_numpy(np.array([p.temperature for p in params], np.float32))
        if any(p.temperature > 0 for p in params):
            per_row = [
                torch.tensor([getattr(p, name) for p in params], dtype=dtype).repeat_interleave(width)
                for name, dtype in PER_ROW.items()
            ]
            process_logits(logits.view(n * width, vocab), *per_row)
        tokens, count = sample_verify(
            logits,
            torch.from_numpy(np.array([p.seed for p in params], np.int64)),
            _vector([piece.start + len(piece.tokens) for piece in slices]),
            temperature,
            _vector([piece.drafts + (-1,) * (width - len(piece.drafts)) for piece in slices]),
            _vector([1 + len(piece.drafts) for piece in slices]),
        )
        return [tuple(row[:k]) for row, k in zip(tokens.tolist(), count.tolist(), strict=True)]


def _vector(values: Sequence[object]) -> Tensor:
    """Integers, or equally long tuples of them, as int32."""
    return torch.from_numpy(np.array(values, np.int32))
