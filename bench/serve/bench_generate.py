"""How much faster is a decode step than transformers' own on the same checkpoint, threads and machine?

First the three must give the same tokens to the same prompts; if they do not, nothing is timed and the exit status is 2.
Then it measures milliseconds per step of greedy decoding, alternating the three in one run so that drift of the machine hits all:

    transformers   `generate` with its cache, one sequence and a batch of eight
    engine         scheduler and runner in one process, one request and eight
    server         the whole service over HTTP with streaming, one client and eight

A step is one token of every sequence; prompt time is taken out. Prints absolute times and ratios, writes JSON and a plot.

    python bench/serve/bench_generate.py [--tokens 64] [--repeats 5] [--threads 1] [--out results/serve_generate]

A relative --out is taken from bench/.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import torch

from harness import ROOT, DifferentAnswersError, machine_line, must_agree, save
from revolta_serve.cache.capacity import capacity
from revolta_serve.config import ModelSource, ParallelConfig, ServeConfig
from revolta_serve.engine.core import EngineCore, limits
from revolta_serve.engine.worker import local
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


@dataclass(frozen=True)
class Run:
    """What a system said, by prompt, and how long a step took it, in milliseconds."""

    tokens: list[list[int]]
    milliseconds: float


def transformers_run(model: Any, ids: list[list[int]], tokens: int) -> Run:
    """`generate`: a run of `tokens` steps less a run of one."""

    def run(count: int) -> tuple[list[list[int]], float]:
        begin = time.perf_counter()
        x = torch.tensor(ids)
        mask = torch.ones_like(x)
        y = model.generate(x, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        return y[:, x.shape[1] :].tolist(), time.perf_counter() - begin

    said, long = run(tokens + 1)
    _, short = run(1)
    return Run(said, (long - short) / tokens * 1e3)


def engine_run(core: EngineCore, ids: list[list[int]], tokens: int) -> Run:
    """Scheduler and runner in this process: the mean of the steps in which every request decodes."""
    greedy = SamplingParams(temperature=0.0)
    for n, prompt in enumerate(ids):
        core.submit(GenerateRequest(id=str(n), prompt=tuple(prompt), max_tokens=tokens + 1, sampling=greedy))
    said: list[list[int]] = [[] for _ in ids]
    times = []
    while core.has_work:
        begin = time.perf_counter()
        outputs = core.step()
        spent = time.perf_counter() - begin
        decoded = sum(1 for output in outputs if said[int(output.id)])
        for output in outputs:
            said[int(output.id)] += output.tokens
        if decoded == len(ids):
            times.append(spent)
    return Run(said, statistics.mean(times) * 1e3)


async def server_run(url: str, ids: list[list[int]], tokens: int) -> Run:
    """Streaming HTTP clients, one a prompt: from the last one's first token to the first one's last."""

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> tuple[list[int], list[float]]:
        body = {"prompt": prompt, "max_tokens": tokens + 1, "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True}
        said: list[int] = []
        seen: list[float] = []
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    new = event["choices"][0].get("token_ids") or ()
                    said += new
                    seen += [time.perf_counter()] * len(new)
        return said, seen

    async with httpx.AsyncClient(timeout=120) as client:
        answers = await asyncio.gather(*(one(client, prompt) for prompt in ids))
    arrivals = [seen for _, seen in answers]
    begin, end = max(seen[0] for seen in arrivals), min(seen[-1] for seen in arrivals)
    steps = statistics.mean(sum(begin < t <= end for t in seen) for seen in arrivals)
    return Run([said for said, _ in answers], (end - begin) / steps * 1e3)


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, dict[str, list[float]]]:
    """All times in milliseconds by system and number of sequences, `repeats` each, the systems in turn.

    Raises DifferentAnswersError in the first round, before anything is kept, if they do not say the same, and in any later one.
    """
    from transformers import Qwen4ExpForConditionalGeneration

    torch.set_num_threads(arguments.threads)
    oracle = Qwen4ExpForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    model = ModelConfig.load(directory)
    config = ServeConfig(model=ModelSource(path=str(directory)), parallel=ParallelConfig(threads=arguments.threads))
    config = replace(config, schedule=replace(config.schedule, max_model_len=1024)).resolve(model)
    # One scheduler for the runner's life: the requests it numbers are those the runner has been told to forget.
    core = EngineCore(Scheduler(limits(config, model, capacity(config, model))), [local(Runner.load(config, 0))])
    times: dict[str, dict[str, list[float]]] = {name: {str(w): [] for w in WIDTHS} for name in ("transformers", "engine", "server")}
    with running_server(directory, {"parallel.threads": arguments.threads}) as server:
        for repeat in range(arguments.repeats + 1):
            for width in WIDTHS:
                ids = prompts(width, model.vocab)
                runs = {
                    "transformers": transformers_run(oracle, ids, arguments.tokens),
                    "engine": engine_run(core, ids, arguments.tokens),
                    "server": asyncio.run(server_run(server.url, ids, arguments.tokens)),
                }
                must_agree({name: run.tokens for name, run in runs.items()})
                if repeat:  # the first round warms everything up
                    for name, run in runs.items():
                        times[name][str(width)].append(run.milliseconds)
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
    """Run, print, save. Exit status 1 if the server misses a goal, 2 if the systems do not say the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/serve_generate"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        make_tiny(scratch)
        try:
            times = measure(arguments, Path(scratch))
        except DifferentAnswersError as error:
            print(f"bench_generate: nothing is timed: {error}", file=sys.stderr)
            return 2
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
    out = ROOT / "bench" / arguments.out
    save(out.with_suffix(".json"), result)
    plot(out.with_suffix(".png"), medians)
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
