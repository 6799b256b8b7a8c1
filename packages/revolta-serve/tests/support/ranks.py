"""The same hand-driven requests on every rank of a group of processes, each with its own share of the model."""

import multiprocessing
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revolta_serve.config import ModelSource, ParallelConfig, ServeConfig
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.parallel.groups import close_groups
from revolta_serve.runner.runner import Runner
from revolta_serve.types import Slice
from support.drive import Request


@dataclass
class Ranked:
    """What one rank saw."""

    logits: list[Tensor]
    """One f32[V] per sampled position."""
    tokens: list[int]
    weight_bytes: int
    kv_bytes: int
    """Of K and V; index keys are on every rank."""
    collectives: dict[str, int]
    steps: int


def _one_rank(rank: int, config: ServeConfig, prompt: list[int], forced: list[int], out: Any) -> None:
    torch.set_num_threads(1)
    runner = Runner.load(config, rank)
    logits: list[Tensor] = []

    def tap(_piece: Slice, judged: Tensor) -> None:
        logits.append(judged[-1])

    runner.tap = tap
    runner.model.groups.tensor.calls.clear()
    runner.model.groups.context.calls.clear()
    request = Request(runner, 0, prompt)
    request.prefill(128)
    sampled = [request.ids.pop()]
    for token in forced:
        request.ids.append(token)
        request.decode(1)
        sampled.append(request.ids.pop())
    groups = runner.model.groups
    calls = {f"tensor.{kind}": n for kind, n in groups.tensor.calls.items()}
    calls |= {f"context.{kind}": n for kind, n in groups.context.calls.items()}
    steps = -(-len(prompt) // 128) + len(forced)
    kv_bytes = runner.pools.k.nbytes + runner.pools.v.nbytes
    torch.save(Ranked(logits, sampled, runner.report.weight_bytes, kv_bytes, calls, steps), f"{out}/{rank}")
    close_groups(groups)


def run_ranks(directory: Path, tensor: int, context: int, prompt: list[int], forced: list[int]) -> list[Ranked]:
    """Prefill `prompt`, then feed `forced` token by token, on `tensor` processes; what each rank saw, in rank order."""
    with tempfile.TemporaryDirectory() as scratch:
        parallel = ParallelConfig(tensor=tensor, decode_context=context, rendezvous=os.path.join(scratch, "meet"))
        config = ServeConfig(model=ModelSource(path=str(directory)), parallel=parallel)
        config = replace(config, schedule=replace(config.schedule, max_model_len=1024)).resolve(ModelConfig.load(directory))
        spawn = multiprocessing.get_context("spawn")
        processes = [spawn.Process(target=_one_rank, args=(rank, config, prompt, forced, scratch)) for rank in range(tensor)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
        return [torch.load(os.path.join(scratch, str(rank)), weights_only=False) for rank in range(tensor)]
