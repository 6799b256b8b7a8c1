"""How much faster is a decode step than transformers' own on the same checkpoint, threads and machine?

Measures milliseconds per step of greedy decoding, alternating the two in one run so that drift of the machine hits both:

    transformers   `generate` with its cache, one sequence and a batch of eight
    engine         scheduler and runner in one process, one request and eight
    server         the whole service over HTTP with streaming, one client and eight

A step is one token of every sequence; prompt time is taken out. Prints absolute times and ratios, writes JSON and a plot.

    python bench/serve/bench_generate.py [--tokens 64] [--repeats 5] [--threads 1] [--out bench/results/serve_generate]
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import torch

from harness import machine_line, save
from revolta_serve.cache.capacity import capacity
from revolta_serve.config import ModelSource, ParallelConfig, ServeConfig
from revolta_serve.engine.core import limits
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.runner.runner import Runner
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.testing import running_server
from revolta_serve.types import GenerateRequest, SamplingParams
from revolta_serve.weights.tiny import make_tiny

PROMPT = 64
WIDTHS = (1, 8)
GOALS = {1: 5.0, 8: 6.0}
"""Times faster than transformers that the server must be, by number of concurrent requests."""


def prompts(count: int, vocab: int) -> list[list[int]]:
    """`count` different prompts of PROMPT ids, none of them special."""
    return [[(7 * i + 13 * n) % (vocab - 64) for i in range(PROMPT)] for n in range(count)]


def transformers_step(model: Any, ids: list[list[int]], tokens: int) -> float:
    """Milliseconds per step of `generate`: a run of `tokens` steps less a run of one."""

    def run(count: int) -> float:
        begin = time.perf_counter()
        x = torch.tensor(ids)
        model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        return time.perf_counter() - begin

    return (run(tokens + 1) - run(1)) / tokens * 1e3


def engine_step(runner: Runner, config: ServeConfig, ids: list[list[int]], tokens: int) -> float:
    """Milliseconds per decode step of scheduler and runner."""
    scheduler = Scheduler(limits(config, runner.model.config, capacity(config, runner.model.config)))
    for n, prompt in enumerate(ids):
        sampling = SamplingParams(temperature=0.0)
        scheduler.add(GenerateRequest(id=str(n), prompt=tuple(prompt), max_tokens=tokens + 1, sampling=sampling))
    times = []
    while scheduler.has_work:
        begin = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(runner.step(plan))
        if all(piece.kind == "decode" for piece in plan.slices) and len(plan.slices) == len(ids):
            times.append(time.perf_counter() - begin)
    return statistics.mean(times) * 1e3


async def server_step(url: str, ids: list[list[int]], tokens: int) -> float:
    """Milliseconds per step seen by streaming HTTP clients, from the last client's first token to the first client's last."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> list[float]:
        body = {"prompt": prompt, "max_tokens": tokens + 1, "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True}
        seen: list[float] = []
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    count = len(json.loads(line[6:])["choices"][0].get("token_ids") or ())
                    seen += [time.perf_counter()] * count
        assert len(seen) == tokens + 1, f"{len(seen)} tokens arrived, expected {tokens + 1}"
        return seen

    async with httpx.AsyncClient(timeout=120) as client:
        arrivals = await asyncio.gather(*(one(client, prompt) for prompt in ids))
    begin, end = max(seen[0] for seen in arrivals), min(seen[-1] for seen in arrivals)
    steps = statistics.mean(sum(begin < t <= end for t in seen) for seen in arrivals)
    return (end - begin) / steps * 1e3


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, dict[str, list[float]]]:
    """All times in milliseconds by system and number of sequences, `repeats` each, the systems in turn."""
    from transformers import Qwen4ExpForConditionalGeneration

    torch.set_num_threads(arguments.threads)
    oracle = Qwen4ExpForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    model = ModelConfig.load(directory)
    config = ServeConfig(model=ModelSource(path=str(directory)), parallel=ParallelConfig(threads=arguments.threads))
    config = replace(config, schedule=replace(config.schedule, max_model_len=1024)).resolve(model)
    runner = Runner.load(config, 0)
    times: dict[str, dict[str, list[float]]] = {name: {str(w): [] for w in WIDTHS} for name in ("transformers", "engine", "server")}
    with running_server(directory, {"parallel.threads": arguments.threads}) as server:
        for repeat in range(arguments.repeats + 1):
            for width in WIDTHS:
                ids = prompts(width, model.vocab)
                systems: dict[str, Callable[[], float]] = {
                    "transformers": lambda ids=ids: transformers_step(oracle, ids, arguments.tokens),
                    "engine": lambda ids=ids: engine_step(runner, config, ids, arguments.tokens),
                    "server": lambda ids=ids: asyncio.run(server_step(server.url, ids, arguments.tokens)),
                }
                for name, run in systems.items():
                    milliseconds = run()
                    if repeat:  # the first round warms everything up
                        times[name][str(width)].append(milliseconds)
    return times


def plot(path: Path, medians: dict[str, dict[str, float]]) -> None:
    """A bar per system and number of sequences."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.5))
    for i, (name, by_width) in enumerate(medians.items()):
        places = [n + 0.25 * (i - 1) for n in range(len(WIDTHS))]
        bars = axis.bar(places, [by_width[str(w)] for w in WIDTHS], 0.24, label=name)
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.set_xticks(range(len(WIDTHS)), [f"{w} at once" for w in WIDTHS])
    axis.set_ylabel("ms per decode step (CPU)")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run, print, save. Exit status 1 if the server misses a goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/serve_generate"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        make_tiny(scratch)
        times = measure(arguments, Path(scratch))
    medians = {name: {w: statistics.median(v) for w, v in by_width.items()} for name, by_width in times.items()}
    print(machine_line(arguments.threads))
    missed = False
    for width in WIDTHS:
        w = str(width)
        row = "   ".join(f"{name} {medians[name][w]:6.2f} ms" for name in medians)
        ratios = {name: medians["transformers"][w] / medians[name][w] for name in ("engine", "server")}
        missed |= ratios["server"] < GOALS[width]
        print(f"{width} at once: {row}   engine {ratios['engine']:.1f}x, server {ratios['server']:.1f}x (goal {GOALS[width]:.0f}x)")
    result = {"threads": arguments.threads, "tokens": arguments.tokens, "ms_per_step": times, "median_ms": medians}
    save(arguments.out.with_suffix(".json"), result)
    plot(arguments.out.with_suffix(".png"), medians)
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
