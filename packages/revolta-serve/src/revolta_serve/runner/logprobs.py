"""Log-probabilities as the engine reports them, of drawn tokens and of a prompt's own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from revolta_serve.types import Slice, TokenLogprobs
from sm70kernels import token_logprobs

CHUNK = 128
"""Prompt rows whose logits exist at the same time: memory is this times the vocabulary, however long the prompt."""


def describe(logits: Tensor, chosen: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    """The chosen token of each row of logits f32[M, V], with as many of the row's most likely ids as its entry of `top` says."""
    most = max(top, default=0)
    logprob, rank, ids, values = token_logprobs(logits, torch.tensor(chosen, dtype=torch.int32), most)
    rows = zip(chosen, top, logprob.tolist(), rank.tolist(), ids.tolist(), values.tolist(), strict=True)
    return [TokenLogprobs(token, own, place, tuple(zip(best[:k], likely[:k], strict=True))) for token, k, own, place, best, likely in rows]


def of_prompt(piece: Slice, rows: Tensor, head: Callable[[Tensor], Tensor], top: int) -> tuple[tuple[TokenLogprobs, ...], bool]:
    """The prompt tokens after the rows of a slice from logprobs_from on, by the model's own distribution at each row.

    rows act[R, E] are the slice's rows, `head` makes logits f32[M, V] of them. Also returns whether all of the logits were finite. The
    row that ends the prompt is left out: what follows it is drawn.
    """
    following = piece.tokens[1:] + ((piece.next_token,) if piece.next_token >= 0 else ())
    told: list[TokenLogprobs] = []
    finite = True
    for begin in range(piece.logprobs_from, len(following), CHUNK):
        chosen = following[begin : begin + CHUNK]
        logits = head(rows[begin : begin + len(chosen)])
        finite = finite and bool(torch.isfinite(logits).all())
        told += describe(logits, chosen, [top] * len(chosen))
    return tuple(told), finite
