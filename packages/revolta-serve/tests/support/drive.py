"""A runner driven by hand: one request at a time, every slice chosen by the test."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from revolta_serve.config import ModelSource, ServeConfig
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.runner.runner import Runner
from revolta_serve.types import SamplingParams, Slice, StepPlan

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 64


def load(directory: Path, dtype: str = "float32", max_model_len: int = 2048) -> Runner:
    """A runner of one rank with room for a few requests."""
    from dataclasses import replace

    config = ServeConfig(model=ModelSource(path=str(directory), dtype=dtype))  # type: ignore[arg-type]
    config = replace(config, schedule=replace(config.schedule, max_model_len=max_model_len))
    return Runner.load(config.resolve(ModelConfig.load(directory)), 0)


class Request:
    """A request with fixed blocks and a slot of its own, cut and stepped as the test wants."""

    def __init__(self, runner: Runner, number: int, ids: Sequence[int], *, slot: int | None = None, first_block: int | None = None) -> None:
        self.runner, self.number = runner, number
        self.ids = list(ids)
        self.done = 0
        self.slot = number if slot is None else slot
        self.next_block = number * 32 if first_block is None else first_block
        self.blocks = 0

    def slice(self, count: int, kind: str = "prefill") -> Slice:
        """The next `count` known tokens as a slice."""
        start, end = self.done, self.done + count
        need = -(-end // BLOCK) - self.blocks
        blocks = tuple(range(self.next_block + self.blocks, self.next_block + self.blocks + need))
        self.blocks += need
        self.done = end
        config = self.runner.model.config
        back = [self.ids[start - i] if start - i >= 0 else config.eos for i in range(1, config.ngram)]
        return Slice(
            request=self.number,
            kind=kind,  # type: ignore[arg-type]
            slot=self.slot,
            start=start,
            tokens=tuple(self.ids[start:end]),
            before=tuple(back),
            blocks=blocks,
            fresh=start == 0,
            sample=end == len(self.ids),
            sampling=GREEDY if start == 0 else None,
        )

    def prefill(self, chunk: int = 1 << 20) -> None:
        """Run the whole prompt in slices of `chunk` tokens and append the sampled token."""
        prompt = len(self.ids)
        while self.done < prompt:
            result = self.runner.step(StepPlan(step=0, slices=(self.slice(min(chunk, prompt - self.done)),)))
            self.ids += result.slices[0].tokens

    def decode(self, count: int) -> None:
        """Generate `count` further tokens, one row a step."""
        for _ in range(count):
            result = self.runner.step(StepPlan(step=0, slices=(self.slice(1, "decode"),)))
            self.ids += result.slices[0].tokens

    def finish(self) -> None:
        """Let the runner forget the request."""
        self.runner.step(StepPlan(step=0, slices=(), forget=(self.number,)))


@torch.inference_mode()
def full_pass(runner: Runner, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits f32[T, V] of every row of one prefill pass, and the streams f32[T, S·E] after each layer."""
    request = Request(runner, 0, ids)
    piece = request.slice(len(ids))
    runner.builder.admit(piece)
    batch, _ = runner.builder.prefill([piece])
    states: list[Tensor] = []
    hidden = runner.model.forward(batch, runner.pools, lambda _i, h: states.append(h[: len(ids)].flatten(1).float().clone()))
    logits = runner.model.logits(hidden.mixed[: len(ids)])
    runner.builder.forget(0)
    return logits, states
