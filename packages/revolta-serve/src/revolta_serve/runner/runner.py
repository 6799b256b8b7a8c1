"""One rank: its weights, its pools, and a step from plan to result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from revolta_serve.cache.capacity import capacity
from revolta_serve.cache.layout import BLOCK
from revolta_serve.config import ServeConfig
from revolta_serve.model.flash_next import FlashNext
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.pools import Pools, allocate
from revolta_serve.model.rope import Rotary
from revolta_serve.parallel.groups import create_groups
from revolta_serve.runner.batch import BatchBuilder, Rows
from revolta_serve.runner.sampler import Sampler
from revolta_serve.types import SamplingParams, Slice, SliceResult, StartupReport, StepPlan, StepResult
from revolta_serve.weights.checkpoint import Progress
from revolta_serve.weights.checkpoint import load as load_weights
from revolta_serve.weights.index import CheckpointIndex

LogitsTap = Callable[[Slice, Tensor], None]
"""Receives a slice and the float32 logits [V] its token is drawn from, before sampling changes them."""


REHEARSAL = -1
"""Request and step number of the run before the first request; the engine counts from 0."""


class Runner:
    """Executes step plans. Holds no policy: what runs, where it is stored and when it is freed comes with the plan."""

    def __init__(self, model: FlashNext, pools: Pools, builder: BatchBuilder, report: StartupReport) -> None:
        self.model, self.pools, self.builder, self.report = model, pools, builder, report
        self.sampler = Sampler()
        self.tap: LogitsTap | None = None

    @classmethod
    def load(cls, config: ServeConfig, rank: int, progress: Progress | None = None) -> Runner:
        """Join the groups, load this rank's weights, allocate its pools.

        `config` must be resolved. Raises CheckpointError for a checkpoint that is not what its config says, ConfigError for sizes
        that do not fit it, rows.RowDependenceError for a shape no product computes row by row.
        """
        begin = time.perf_counter()
        torch.set_num_threads(config.parallel.threads)
        model_config = ModelConfig.load(config.model.path)
        groups = create_groups(rank, config.parallel.tensor, config.parallel.decode_context, config.parallel.rendezvous or None)
        dtype = torch.float16 if config.model.dtype == "float16" else torch.float32
        size = groups.tensor.size
        weights = load_weights(model_config, config.model.path, groups.tensor.rank, size, dtype, progress=progress)
        planned = capacity(config, model_config)
        pools = allocate(
            model_config, blocks=planned.num_blocks, slots=planned.num_slots, tensor=size, context=groups.context.size, dtype=dtype
        )
        rotary = Rotary(model_config, dtype)
        longest = -(-config.schedule.max_model_len // BLOCK)
        builder = BatchBuilder(model_config, rotary, groups.context, config.schedule.max_num_seqs, longest)
        report = StartupReport(
            rank=rank,
            weight_bytes=sum(t.numel() * t.element_size() for t in weights.values()),
            kv_bytes=pools.kv_bytes,
            state_bytes=pools.state_bytes,
            num_blocks=planned.num_blocks,
            num_slots=planned.num_slots,
            load_seconds=time.perf_counter() - begin,
            fingerprint=CheckpointIndex.open(config.model.path).fingerprint(),
        )
        runner = cls(FlashNext(model_config, weights, groups), pools, builder, report)
        runner.rehearse(min(model_config.dense_positions + 2, config.schedule.max_model_len - 1))
        return runner

    def rehearse(self, length: int) -> None:
        """Run a prompt of `length` tokens and one decode step in empty pools, and forget them.

        Every product is probed for row independence where it is first used; a shape that has none then fails here, with its name,
        and not in the middle of an answer. `length` should reach beyond dense attention, so that selection is rehearsed too.
        """
        mark = self.model.config.eos
        before = (mark,) * (self.model.config.ngram - 1)
        count = -(-(length + 1) // BLOCK)
        prompt = Slice(
            request=REHEARSAL, kind="prefill", slot=0, start=0, tokens=(mark,) * length, before=before, blocks=tuple(range(count)),
            fresh=True, sampling=SamplingParams(temperature=0.0),
        )  # fmt: skip
        row = Slice(request=REHEARSAL, kind="decode", slot=0, start=length, tokens=(mark,), before=before)
        self.step(StepPlan(step=REHEARSAL, slices=(prompt,)))
        self.step(StepPlan(step=REHEARSAL, slices=(row,)))
        self.step(StepPlan(step=REHEARSAL, slices=(), forget=(REHEARSAL,)))

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Run the slices of a plan, decode rows first, and sample where a slice reaches the end of what is known."""
        begin = time.perf_counter()
        for request in plan.forget:
            self.builder.forget(request)
            self.sampler.forget(request)
        for piece in plan.slices:
            self.builder.admit(piece)
            self.sampler.admit(piece)
        decode = [piece for piece in plan.slices if piece.kind == "decode"]
        prefill = [piece for piece in plan.slices if piece.kind == "prefill"]
        results = (self._decode(decode) if decode else []) + (self._prefill(prefill) if prefill else [])
        return StepResult(
            step=plan.step,
            slices=tuple(results),
            decode_rows=len(decode),
            prefill_rows=sum(len(piece.tokens) for piece in prefill),
            seconds=time.perf_counter() - begin,
        )

    def _decode(self, slices: Sequence[Slice]) -> list[SliceResult]:
        batch = self.builder.decode(slices)
        return self._sample(self.model.logits(self.model.forward(batch, self.pools).mixed), slices)

    def _prefill(self, slices: Sequence[Slice]) -> list[SliceResult]:
        batch, rows = self.builder.prefill(slices)
        hidden = self.model.forward(batch, self.pools).mixed
        ends = [n for n, piece in enumerate(slices) if piece.sample]
        results = [SliceResult(piece.request) for piece in slices]
        if ends:
            logits = self.model.logits(hidden[self._last_rows(rows, ends)])
            for n, result in zip(ends, self._sample(logits, [slices[n] for n in ends]), strict=True):
                results[n] = result
        return results

    @staticmethod
    def _last_rows(rows: Rows, which: Sequence[int]) -> Tensor:
        """i64[len(which)] the last valid row of each of these slices."""
        return torch.tensor([rows.first[n] + rows.counts[n] - 1 for n in which])

    def _sample(self, logits: Tensor, slices: Sequence[Slice]) -> list[SliceResult]:
        """The token of each slice from logits f32[N, V]. A row that is not finite fails its own request only."""
        if self.tap is not None:
            for piece, judged in zip(slices, logits, strict=True):
                self.tap(piece, judged.clone())
        finite = torch.isfinite(logits).all(1).tolist()
        tokens = self.sampler(logits, slices)
        return [
            SliceResult(piece.request, (token,) if ok else (), corrupt=not ok)
            for piece, token, ok in zip(slices, tokens, finite, strict=True)
        ]
