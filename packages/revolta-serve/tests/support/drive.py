"""A runner driven by hand: one request at a time, every slice chosen by the test."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from revolta_serve.config import ModelSource, ServeConfig
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.runner.runner import Runner
from revolta_serve.types import History, SamplingParams, Slice, SliceKind, SliceResult, StepPlan

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 64


def load(directory: Path, dtype: str = "float32", max_model_len: int = 2048) -> Runner:
    """A runner of one rank with room for a few requests."""
    config = ServeConfig(model=ModelSource(path=str(directory), dtype=dtype))  # type: ignore[arg-type]
    config = replace(config, schedule=replace(config.schedule, max_model_len=max_model_len))
    return Runner.load(config.resolve(ModelConfig.load(directory)), 0)


class Request:
    """A request with fixed blocks and a slot of its own, cut and stepped as the test wants."""

    def __init__(
        self,
        runner: Runner,
        number: int,
        ids: Sequence[int],
        *,
        slot: int | None = None,
        first_block: int | None = None,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self.runner, self.number, self.sampling = runner, number, sampling
        self.ids = list(ids)
        self.prompt = len(self.ids)
        self.done = 0
        """Tokens that are computed."""
        self.slot = number if slot is None else slot
        self.first_block = number * 32 if first_block is None else first_block
        self.blocks = 0
        """Blocks in its table."""
        self.known = False
        """Whether the runner knows it."""
        self.restore = -1
        """Snapshot slot that its next slice starts from."""

    def slice(self, count: int, kind: SliceKind = "prefill", *, keep: Sequence[tuple[int, int]] = (), logprobs_from: int = -1) -> Slice:
        """The next `count` known tokens as a slice; `keep`: (position, slot) of snapshots."""
        start, end = self.done, self.done + count
        need = max(0, -(-end // BLOCK) - self.blocks)
        blocks = tuple(range(self.first_block + self.blocks, self.first_block + self.blocks + need))
        self.blocks += need
        self.done = end
        config = self.runner.model.config
        back = [self.ids[start - i] if start - i >= 0 else config.eos for i in range(1, config.ngram)]
        first, self.known = not self.known, True
        restore, self.restore = self.restore, -1
        history = History(prompt=tuple(self.ids[: self.prompt]), answer=tuple(self.ids[self.prompt :]))
        return Slice(
            request=self.number,
            kind=kind,
            slot=self.slot,
            start=start,
            tokens=tuple(self.ids[start:end]),
            before=tuple(back),
            blocks=blocks,
            fresh=start == 0,
            restore=restore,
            snapshots=tuple((position - start, slot) for position, slot in keep),
            sample=end == len(self.ids),
            sampling=self.sampling if first else None,
            history=history if first and self.sampling.needs_history else None,
            logprobs_from=logprobs_from,
            next_token=self.ids[end] if logprobs_from >= 0 and end < self.prompt else -1,
        )

    def step(
        self, count: int, kind: SliceKind = "prefill", *, keep: Sequence[tuple[int, int]] = (), logprobs_from: int = -1
    ) -> SliceResult:
        """Run the next `count` known tokens alone and append what is sampled."""
        piece = self.slice(count, kind, keep=keep, logprobs_from=logprobs_from)
        (result,) = self.runner.step(StepPlan(step=0, slices=(piece,))).slices
        self.ids += result.tokens
        return result

    def prefill(self, chunk: int = 1 << 20) -> None:
        """Run the whole prompt in slices of `chunk` tokens and append the sampled token."""
        while self.done < self.prompt:
            self.step(min(chunk, self.prompt - self.done))

    def decode(self, count: int) -> None:
        """Generate `count` further tokens, one row a step."""
        for _ in range(count):
            self.step(1, "decode")

    def replay(self, width: int) -> None:
        """Run all known tokens that are not computed as answer rows, `width` a step; appends the token sampled at their end."""
        known = len(self.ids)
        while self.done < known:
            self.step(min(width, known - self.done), "decode")

    def resume(self, position: int, snapshot: int, slot: int | None = None) -> None:
        """Let the runner forget the request, which comes back with its next slice from a snapshot at `position`."""
        self.finish()
        self.done, self.restore = position, snapshot
        self.slot = self.slot if slot is None else slot

    def finish(self) -> None:
        """Let the runner forget the request."""
        self.runner.step(StepPlan(step=0, slices=(), forget=(self.number,)))
        self.known, self.blocks = False, 0


@torch.inference_mode()
def full_pass(runner: Runner, ids: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits f32[T, V] of every row of one prefill pass, and the streams f32[T, S·E] after each layer."""
    request = Request(runner, 0, ids)
    piece = request.slice(len(ids))
    runner.builder.admit(piece)
    batch = runner.builder.prefill([piece])
    states: list[Tensor] = []
    hidden = runner.model.forward(batch, runner.pools, lambda _i, h: states.append(h[: len(ids)].flatten(1).float().clone()))
    logits = runner.model.logits(hidden.mixed[: len(ids)])
    runner.builder.forget(0)
    return logits, states
