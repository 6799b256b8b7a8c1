"""transformers' own implementation as the judge: one uncached full pass, with every gap that decides a discrete choice."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor


@dataclass
class Pass:
    """What the oracle computed for T tokens."""

    logits: Tensor
    """f32[T, V]"""
    states: list[Tensor]
    """f32[T, S·E] the residual streams after each layer."""
    router_gap: float
    """Smallest distance between the last chosen and the first rejected router logit."""
    selection_gap: float
    """The same for index block scores, over rows that had to choose."""
    choosing: float
    """Share of attention rows with more blocks than they may select."""

    @property
    def top_gap(self) -> float:
        """Smallest distance between the best two logits of a row."""
        best = self.logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())

    def decided(self, gap: float = 1e-5) -> bool:
        """Whether no discrete choice is closer than `gap`: below that, the order of float32 additions decides."""
        return min(self.router_gap, self.selection_gap, self.top_gap) > gap


class Oracle:
    """A checkpoint loaded by transformers, float32, eager attention."""

    def __init__(self, directory: Path) -> None:
        from transformers import Qwen4ExpForConditionalGeneration

        self.model = Qwen4ExpForConditionalGeneration.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        self.text = self.model.model.language_model

    @torch.inference_mode()
    def full_pass(self, ids: list[int]) -> Pass:
        """One pass over ids without a cache."""
        states: list[Tensor] = []
        router: list[float] = []
        handles = [layer.register_forward_hook(lambda _m, _i, out: states.append(out[0])) for layer in self.text.layers]
        for layer in self.text.layers:
            hook = layer.mlp.gate.register_forward_hook(lambda m, _i, out: router.append(_router_gap(out[0], m.top_k)))
            handles.append(hook)
        with _recorded_choices() as choices:
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        decided = [gap for gap in choices if gap is not None]
        layers = sum(kind != "linear_attention" for kind in self.text.config.layer_types)
        return Pass(logits, states, min(router), min(decided, default=float("inf")), len(decided) / max(1, layers * len(ids)))


def _router_gap(logits: Tensor, k: int) -> float:
    if k == logits.shape[-1]:
        return float("inf")
    best = logits.float().topk(k + 1, dim=-1).values
    return float((best[..., k - 1] - best[..., k]).min())


@contextmanager
def _recorded_choices() -> Iterator[list[float | None]]:
    """The gap of every index selection made inside, None where all blocks were taken. Only the indexer selects along axis 0."""
    choices: list[float | None] = []
    original = torch.Tensor.topk

    def topk(self: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        if dim == 0:
            ordered = self.sort(descending=True).values
            choices.append(float(ordered[k - 1] - ordered[k]) if k < len(ordered) else None)
        return original(self, k, dim, *args, **kwargs)

    torch.Tensor.topk = topk  # type: ignore[method-assign]
    try:
        yield choices
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]
