"""The same work on every rank of a group of processes, each with its own share of the model."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from revolta_serve.config import ModelSource, ParallelConfig, ServeConfig
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.runner.runner import Runner
from revolta_serve.types import Slice
from sm70kernels import moe_route, qsa_select
from sm70kernels.op import Op
from support.drive import BLOCK, Request, full_pass
from support.states import contents, differing, poison


@dataclass
class Ranked:
    """What one rank saw."""

    passes: list[Tensor]
    """f32[T, V] logits of a whole pass over each text."""
    experts: list[Tensor]
    """i64[rows, K] sorted choices of every router call of those passes, in order."""
    blocks: list[Tensor]
    """i64[rows, W] sorted tokens of every selection."""
    logits: list[Tensor]
    """f32[V] at each position of a prefill and its forced continuation."""
    tokens: list[int]
    weight_bytes: int
    kv_bytes: int
    """Of K and V; index keys are on every rank."""
    collectives: dict[str, int]
    """During the prefill and the continuation."""
    steps: int
    changed: list[str]
    """Planes, or "logits", that a snapshot, a return from it and several rows a step changed in a bit."""


@contextmanager
def _recorded(op: Op[Any], into: list[Tensor]) -> Iterator[None]:
    """Keep the sorted rows of the first output of every call."""
    original = op.reference

    def reference(*args: Any) -> Any:
        result = original(*args)
        chosen = result[0] if isinstance(result, tuple) else result
        into.append(chosen.long().sort(-1).values)
        return result

    op.reference = reference
    try:
        yield
    finally:
        op.reference = original


def _one_rank(rank: int, config: ServeConfig, texts: list[list[int]], prompt: list[int], forced: list[int], out: Any) -> None:
    torch.set_num_threads(1)
    runner = Runner.load(config, rank)
    experts: list[Tensor] = []
    blocks: list[Tensor] = []
    with _recorded(moe_route, experts), _recorded(qsa_select, blocks):
        passes = [full_pass(runner, text)[0] for text in texts]
    logits: list[Tensor] = []

    def tap(_piece: Slice, judged: Tensor) -> None:
        logits.append(judged)

    runner.tap = tap
    groups = runner.model.groups
    groups.tensor.calls.clear()
    groups.context.calls.clear()
    request = Request(runner, 0, prompt)
    request.prefill(128)
    sampled = [request.ids.pop()]
    for token in forced:
        request.ids.append(token)
        request.decode(1)
        sampled.append(request.ids.pop())
    calls = {f"tensor.{kind}": n for kind, n in groups.tensor.calls.items()}
    calls |= {f"context.{kind}": n for kind, n in groups.context.calls.items()}
    steps = -(-len(prompt) // 128) + len(forced)
    kv_bytes = runner.pools.k.nbytes + runner.pools.v.nbytes
    request.finish()
    changed = _changed_by_coming_back(runner, prompt, forced[:20])
    seen = Ranked(passes, experts, blocks, logits, sampled, runner.report.weight_bytes, kv_bytes, calls, steps, changed)
    torch.save(seen, f"{out}/{rank}")
    if dist.is_initialized():
        dist.destroy_process_group()


def _changed_by_coming_back(runner: Runner, prompt: list[int], answer: list[int]) -> list[str]:
    """Compare a request whose answer rows run one by one with one that comes back from a snapshot and runs them eight at a time."""
    found = []
    for coming_back in (False, True):
        poison(runner)
        judged: list[Tensor] = []
        runner.tap = lambda _piece, logits, into=judged: into.append(logits)  # type: ignore[misc]
        one = Request(runner, 0, prompt + answer)
        one.prompt, kept = len(prompt), len(prompt) // BLOCK * BLOCK
        one.step(one.prompt, keep=[(kept, 5)])
        if coming_back:
            one.step(8, "decode")
            runner.pools.ring.fill_(torch.nan)
            one.resume(kept, 5, slot=2)
            one.prefill()
        one.replay(8 if coming_back else 1)
        (logits,) = judged
        found.append(contents(one) | {"logits": logits})
        one.finish()
    runner.tap = None
    return differing(*found)


def run_ranks(
    directory: Path, tensor: int, context: int, prompt: list[int], forced: list[int], texts: list[list[int]] | None = None
) -> list[Ranked]:
    """On `tensor` processes: a whole pass over each of `texts`, then prefill `prompt` and feed `forced` token by token.

    Returns what each rank saw, in rank order.
    """
    with tempfile.TemporaryDirectory() as scratch:
        parallel = ParallelConfig(tensor=tensor, decode_context=context, rendezvous=os.path.join(scratch, "meet"))
        config = ServeConfig(model=ModelSource(path=str(directory)), parallel=parallel)
        config = replace(config, schedule=replace(config.schedule, max_model_len=1024)).resolve(ModelConfig.load(directory))
        spawn = multiprocessing.get_context("spawn")
        arguments = [(rank, config, texts or [], prompt, forced, scratch) for rank in range(tensor)]
        processes = [spawn.Process(target=_one_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
        return [torch.load(os.path.join(scratch, str(rank)), weights_only=False) for rank in range(tensor)]
