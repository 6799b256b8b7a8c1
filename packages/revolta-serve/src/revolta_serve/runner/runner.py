"""One rank: its weights, its pools, and a step from plan to result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from revolta_serve.cache.capacity import capacity
from revolta_serve.cache.layout import BLOCK, WIDEST
from revolta_serve.config import ServeConfig
from revolta_serve.model.batch import Batch
from revolta_serve.model.flash_next import FlashNext
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.pools import Pools, allocate
from revolta_serve.model.rope import Rotary
from revolta_serve.parallel.groups import create_groups
from revolta_serve.runner.batch import BatchBuilder
from revolta_serve.runner.logprobs import of_prompt
from revolta_serve.runner.passes import MOST_REQUESTS, prompts, several, singles
from revolta_serve.runner.sampler import Sampler
from revolta_serve.types import SamplingParams, Slice, SliceResult, StartupReport, StepPlan, StepResult
from revolta_serve.weights.checkpoint import Progress
from revolta_serve.weights.checkpoint import load as load_weights
from revolta_serve.weights.index import CheckpointIndex
from sm70kernels import state_copy

LogitsTap = Callable[[Slice, Tensor], None]
"""Receives a slice and the float32 logits [V] its token is drawn from, before sampling changes them."""


REHEARSAL = -1
"""Request and step number of the run before the first request; the engine counts from 0."""


class Runner:
    """Executes step plans. Holds no policy: what runs, where it is stored and when it is freed comes with the plan."""

    def __init__(self, model: FlashNext, pools: Pools, builder: BatchBuilder, report: StartupReport) -> None:
        self.model, self.pools, self.builder, self.report = model, pools, builder, report
        self.sampler = Sampler(model.config.vocab)
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
        # Beyond dense attention, and beyond the first place for a snapshot, where a request may be as long as that.
        runner.rehearse(min(max(model_config.dense_positions + 2, BLOCK + 1), longest * BLOCK - 1 - WIDEST))
        return runner

    def rehearse(self, length: int) -> None:
        """Run a prompt of `length` tokens, a decode step and a verify step in empty pools, resume from a snapshot, and forget it all.

        Every product is probed for row independence where it is first used; a shape that has none then fails here, with its name,
        and not in the middle of an answer. `length` should reach beyond dense attention, so that selection is rehearsed too; a prompt
        shorter than a block leaves no snapshot to resume from.
        """
        mark, spare = self.model.config.eos, self.report.num_slots - 1
        before = (mark,) * (self.model.config.ngram - 1)
        blocks = tuple(range(-(-(length + 1 + WIDEST) // BLOCK)))
        greedy = SamplingParams(temperature=0.0)
        kept = length // BLOCK * BLOCK
        prompt = Slice(
            request=REHEARSAL, kind="prefill", slot=0, start=0, tokens=(mark,) * length, before=before, blocks=blocks, fresh=True,
            snapshots=((kept, spare),) if kept else (), sampling=greedy,
        )  # fmt: skip
        row = Slice(request=REHEARSAL, kind="decode", slot=0, start=length, tokens=(mark,), before=before)
        verify = replace(row, start=length + 1, tokens=(mark,) * WIDEST)
        resumed = replace(verify, start=kept, blocks=blocks, restore=spare, sampling=greedy)
        for plan in ((prompt,), (row,), (verify,)):
            self.step(StepPlan(step=REHEARSAL, slices=plan))
        if kept:
            self.step(StepPlan(step=REHEARSAL, slices=(resumed,), forget=(REHEARSAL,)))
        self.step(StepPlan(step=REHEARSAL, slices=(), forget=(REHEARSAL,)))

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Run the slices of a plan, decode rows first, and sample where a slice reaches the end of what is known.

        Restores come before everything else. Raises EngineError for a plan that cannot be carried out.
        """
        for request in plan.forget:
            self.builder.forget(request)
            self.sampler.forget(request)
        for piece in plan.slices:
            self.builder.admit(piece)
            self.sampler.admit(piece)
        self._copy_states([(piece.restore, piece.slot) for piece in plan.slices if piece.restore >= 0])
        decode = [piece for piece in plan.slices if piece.kind == "decode"]
        prefill = [piece for piece in plan.slices if piece.kind == "prefill"]
        single = [piece for piece in decode if len(piece.tokens) == 1]
        wider = [piece for piece in decode if len(piece.tokens) > 1] if len(single) < len(decode) else []
        results: dict[int, SliceResult] = {}
        for run, groups in ((self._decode, singles(single)), (self._verify, several(wider)), (self._prefill, prompts(prefill))):
            for slices in groups:
                results |= {result.request: result for result in run(slices)}
        return StepResult(
            step=plan.step,
            slices=tuple([results[piece.request] for piece in plan.slices]),
            decode_rows=sum(len(piece.tokens) for piece in decode),
            prefill_rows=sum(len(piece.tokens) for piece in prefill),
        )

    def _decode(self, slices: Sequence[Slice]) -> list[SliceResult]:
        """One row a request; its snapshot is the running state after it."""
        batch = self.builder.decode(slices)
        hidden = self.model.forward(batch, self.pools).mixed
        self._copy_states([(piece.slot, slot) for piece in slices for _, slot in piece.snapshots])
        return self._results(hidden, batch, slices)

    def _verify(self, slices: Sequence[Slice]) -> list[SliceResult]:
        """Several rows a request. Their tokens are all known, so all rows stand."""
        batch = self.builder.verify(slices)
        hidden = self.model.forward(batch, self.pools).mixed
        self.model.commit(batch, batch.rows, self.pools)
        return self._results(hidden, batch, slices)

    def _prefill(self, slices: Sequence[Slice]) -> list[SliceResult]:
        """Prompt rows, with the logprobs that they are asked for."""
        batch = self.builder.prefill(slices)
        hidden = self.model.forward(batch, self.pools).mixed
        results = self._results(hidden, batch, slices)
        for n, (piece, first) in enumerate(zip(slices, batch.start.tolist(), strict=True)):
            if piece.logprobs_from >= 0:
                rows, top = hidden[first : first + len(piece.tokens)], self.sampler.params[piece.request].prompt_logprobs
                told, finite = of_prompt(piece, rows, self.model.logits, top)
                if not finite:
                    results[n] = SliceResult(piece.request, corrupt=True)
                elif not results[n].corrupt:
                    results[n] = replace(results[n], prompt_logprobs=told)
        return results

    def _copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole states from slot to slot, in order."""
        for at in range(0, len(pairs), MOST_REQUESTS):
            source, target = torch.tensor(pairs[at : at + MOST_REQUESTS], dtype=torch.int32).T.contiguous()
            for plane in self.pools.states:
                state_copy(plane, source, target)

    def _results(self, hidden: Tensor, batch: Batch, slices: Sequence[Slice]) -> list[SliceResult]:
        """What the slices of a pass produced: a token from the last row of each that samples. Other rows need no logits."""
        ends = [n for n, piece in enumerate(slices) if piece.sample]
        results = [SliceResult(piece.request) for piece in slices]
        if not ends:
            return results
        if len(ends) < hidden.shape[0]:
            hidden = hidden[(batch.start + batch.rows - 1)[ends]]
        sampling = [slices[n] for n in ends]
        logits = self.model.logits(hidden)
        if self.tap is not None:
            for piece, judged in zip(sampling, logits, strict=True):
                self.tap(piece, judged.clone())
        for n, result in zip(ends, self.sampler(logits, sampling), strict=True):
            results[n] = result
        return results
