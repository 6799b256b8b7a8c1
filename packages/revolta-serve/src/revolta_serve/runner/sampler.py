"""From logits to tokens: per-request sampling parameters, applied row by row with noise that belongs to the token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from revolta_serve.runner.logprobs import describe
from revolta_serve.runner.rules import Rules, Words, mask_of
from revolta_serve.types import SamplingParams, Slice, SliceResult, TokenLogprobs
from sm70kernels import process_logits, sample_verify

FILTERS = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
"""Parameters that process_logits takes per row after the temperature, in its order."""

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
"""Those it takes per row with the ids seen, in its order."""


class Sampler:
    """Remembers each request's parameters from its first slice on, and where its rules stand."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.params: dict[int, SamplingParams] = {}
        self.rules: dict[int, Rules] = {}
        """Of the requests that have any."""

    def admit(self, piece: Slice) -> None:
        """Take note of the parameters a slice brings on first sight of its request. Raises EngineError for a missing history."""
        if piece.sampling is not None:
            self.params[piece.request] = piece.sampling
            rules = Rules.of(piece, self.vocabulary)
            if rules is not None:
                self.rules[piece.request] = rules

    def forget(self, request: int) -> None:
        """Drop a request; one that never came here is ignored."""
        self.params.pop(request, None)
        self.rules.pop(request, None)

    def __call__(self, logits: Tensor, slices: Sequence[Slice]) -> list[SliceResult]:
        """Draw the next token of each slice from logits f32[N, V], which are modified in place.

        A row that is not finite, or whose rules leave nothing to draw, fails its own request only.
        """
        params = [self.params[piece.request] for piece in slices]
        rules = {row: self.rules[piece.request] for row, piece in enumerate(slices) if piece.request in self.rules} if self.rules else {}
        usable = torch.isfinite(logits).all(1).tolist()
        raw = [row for row, p in enumerate(params) if p.logprobs >= 0 and not p.processed_logprobs]
        untouched = logits[raw] if raw else None
        temperature = _column(params, "temperature", np.float32)
        if rules or any(p.temperature > 0 for p in params):
            filters = [_column(params, name, dtype) for name, dtype in FILTERS.items()]
            process_logits(logits, temperature, *filters, **self._arguments(rules, params))
        for row in rules:
            usable[row] = usable[row] and float(logits[row].max()) > -np.inf
        tokens = _draw(logits, slices, params, temperature)
        for row, rule in rules.items():
            if usable[row]:
                rule.append(tokens[row])
        told: dict[int, TokenLogprobs] = {}
        if untouched is not None:
            told |= _told(untouched, raw, params, tokens)
        if processed := [row for row, p in enumerate(params) if p.logprobs >= 0 and p.processed_logprobs]:
            told |= _told(logits[processed], processed, params, tokens)
        return [
            SliceResult(piece.request, (token,), logprobs=(told[row],) if row in told else ()) if ok
            else SliceResult(piece.request, corrupt=True)
            for row, (piece, token, ok) in enumerate(zip(slices, tokens, usable, strict=True))
        ]  # fmt: skip

    def _arguments(self, rules: dict[int, Rules], params: Sequence[SamplingParams]) -> dict[str, Tensor]:
        """What the rules of these rows are to process_logits."""
        arguments: dict[str, Tensor] = {}
        forced = {row: token for row, rule in rules.items() if (token := rule.forced) is not None}
        free = {row: rule for row, rule in rules.items() if row not in forced}
        masks = {row: mask_of((token,), self.vocabulary) for row, token in forced.items()}
        masks |= {row: rule.mask for row, rule in free.items() if rule.mask is not None}
        if masks:
            arguments["mask"] = _masks(masks, len(params))
        if bias := {row: pair for row, rule in free.items() if len((pair := rule.bias)[0])}:
            arguments |= zip(("bias_row", "bias_id", "bias"), _sparse(bias), strict=True)
        if seen := {row: (rule.seen.ids, rule.seen.counts) for row, rule in free.items() if rule.seen is not None}:
            arguments |= zip(("seen_row", "seen_id", "seen_count"), _sparse(seen), strict=True)
            for name in PENALTIES:
                arguments[name.removesuffix("_penalty")] = _column(params, name, np.float32)
        return arguments


def _draw(logits: Tensor, slices: Sequence[Slice], params: Sequence[SamplingParams], temperature: Tensor) -> list[int]:
    """One token a row, from its processed logits and the noise of its seed and position."""
    count = len(params)
    # A verify step of one row: no draft to accept, one token to draw at the position after the slice.
    tokens, _ = sample_verify(
        logits.unsqueeze(1),
        _column(params, "seed", np.int64),
        torch.from_numpy(np.array([piece.start + len(piece.tokens) for piece in slices], np.int32)),
        temperature,
        torch.from_numpy(np.full((count, 1), -1, np.int32)),
        torch.from_numpy(np.ones(count, np.int32)),
    )
    drawn: list[int] = tokens.squeeze(1).tolist()
    return drawn


def _told(logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
    """The drawn tokens of these rows, from logits f32[len(rows), V]."""
    described = describe(logits, [tokens[row] for row in rows], [params[row].logprobs for row in rows])
    return dict(zip(rows, described, strict=True))


def _column(params: Sequence[SamplingParams], name: str, dtype: DTypeLike) -> Tensor:
    """One parameter of every row."""
    return torch.from_numpy(np.array([getattr(p, name) for p in params], dtype))


def _masks(masks: dict[int, Words], count: int) -> Tensor:
    """The masks of all rows, i32[M, W]; a row that has none allows everything."""
    words = np.full((count, len(next(iter(masks.values())))), -1, np.int32)
    for row, mask in masks.items():
        words[row] = mask
    return torch.from_numpy(words)


def _sparse(pairs: dict[int, tuple[NDArray[np.int32], NDArray[Any]]]) -> tuple[Tensor, Tensor, Tensor]:
    """(row, id, value) of the pairs of ids and values of some rows, ascending by row and id as those are."""
    rows = np.repeat(np.array(list(pairs), np.int32), [len(ids) for ids, _ in pairs.values()])
    ids, values = (np.concatenate(column) for column in zip(*pairs.values(), strict=True))
    return torch.from_numpy(rows), torch.from_numpy(ids), torch.from_numpy(values)
