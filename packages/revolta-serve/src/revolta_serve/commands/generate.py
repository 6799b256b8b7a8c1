"""generate: one prompt through the same scheduler and runner as the server's, in this process."""

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from revolta_serve.api.options import INT64, choice_seed
from revolta_serve.api.sampling import usable_temperature
from revolta_serve.cache.capacity import capacity
from revolta_serve.commands.serve import Checked, check
from revolta_serve.config import ServeConfig
from revolta_serve.engine.channel import Channel
from revolta_serve.engine.core import EngineCore, limits
from revolta_serve.engine.worker import local
from revolta_serve.errors import ConfigError, EngineError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.scheduler.scheduler import Scheduler
from revolta_serve.text.detokenizer import Detokenizer
from revolta_serve.types import GenerateRequest, SamplingParams, Slice

if TYPE_CHECKING:
    from torch import Tensor


HOTTEST = 1e6
"""Largest temperature, as in the API."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate. Exactly one of prompt and token_ids is given."""

    prompt: str
    token_ids: str
    """Comma-separated."""
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool
    logits: Path | None
    """Receives `logits` f32[T, V] (before sampling), `tokens` i64[T] and `prompt` i64[N]."""


def generate(config: ServeConfig, job: Job) -> int:
    """Generate and print; returns the exit code. Raises ConfigError, CheckpointError, RequestError, EngineError.

    Whatever can be refused is refused before the weights are loaded.
    """
    if config.parallel.tensor > 1:
        raise ConfigError(f"generate runs in one process, parallel.tensor={config.parallel.tensor} needs a server; use tensor=1")
    alone = replace(config, schedule=replace(config.schedule, max_num_seqs=1))
    sampling = _sampling(job)
    if job.logits is not None:
        _check_writable(job.logits)
    checked = check(alone)
    model = ModelConfig.load(alone.model.path)
    prompt = _prompt(job, checked, model.vocab)
    longest = checked.config.schedule.max_model_len
    if len(prompt) + job.max_tokens > longest:
        left = f"ask for at most {longest - len(prompt)} tokens" if len(prompt) < longest else "shorten the prompt"
        raise ConfigError(f"{len(prompt)} prompt tokens and --max-tokens {job.max_tokens} are more than max_model_len={longest}; {left}")
    ranks: list[Channel] = []
    core = EngineCore(Scheduler(limits(checked.config, model, capacity(checked.config, model))), ranks)
    stops = () if job.ignore_eos else checked.defaults.stop_ids
    core.submit(GenerateRequest(id="offline", prompt=prompt, max_tokens=job.max_tokens, sampling=sampling, stop_token_ids=stops))

    from revolta_serve.runner.progress import LoadProgress
    from revolta_serve.runner.runner import Runner

    began = time.perf_counter()
    with LoadProgress() as progress:
        runner = Runner.load(checked.config, 0, progress)
    loaded = time.perf_counter()
    rows: list[Tensor] = []

    def tap(piece: Slice, judged: "Tensor") -> None:
        rows.append(judged)

    if job.logits is not None:
        runner.tap = tap
    ranks.append(local(runner))
    tokens, first = _run(core, None if job.token_ids else Detokenizer(checked.tokenizer))
    ended = time.perf_counter()
    if job.logits is not None:
        _save(job.logits, rows, tokens, prompt)
    rate = f"{1000 * (ended - first) / (len(tokens) - 1):.1f} ms a token" if len(tokens) > 1 else "one token"
    times = f"loaded in {loaded - began:.2f} s, first token after {first - loaded:.3f} s, then {rate}"
    print(f"{len(prompt)} prompt tokens, {len(tokens)} generated; {times}", file=sys.stderr)
    return 0


def _run(core: EngineCore, text: Detokenizer | None) -> tuple[list[int], float]:
    """Step to the end, printing what comes; returns the tokens and the time of the first one."""
    tokens: list[int] = []
    first = 0.0
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise EngineError(output.error)
            if output.tokens and not tokens:
                first = time.perf_counter()
            for token in output.tokens:
                comma = "," if tokens else ""
                tokens.append(token)
                print(f"{comma}{token}" if text is None else text.push(token), end="", flush=True)
    print("" if text is None else text.flush())
    return tokens, first


def _sampling(job: Job) -> SamplingParams:
    """As the API reads the same fields: almost zero is greedy, and no temperature is so low that logits overflow."""
    if not 0 <= job.temperature <= HOTTEST:
        raise ConfigError(f"--temperature {job.temperature:g} must be a number in [0, {HOTTEST:g}]; 0 is greedy")
    low, high = INT64
    if not low <= job.seed <= high:
        raise ConfigError(f"--seed {job.seed} must be an integer of 64 bits, in [{low}, {high}]")
    return SamplingParams(temperature=usable_temperature(job.temperature), seed=choice_seed(job.seed, 0))


def _check_writable(path: Path) -> None:
    """Raise ConfigError for a file that could not be written after all the work.

    What is no plain file is refused, /dev/null too: the library moves a finished file into its place.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"--logits {path} exists and is no plain file; name another")
    if not path.parent.is_dir():
        raise ConfigError(f"--logits {path}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--logits {path} may not be written; choose another place")


def _prompt(job: Job, checked: Checked, vocab: int) -> tuple[int, ...]:
    if bool(job.prompt) == bool(job.token_ids):
        raise ConfigError("generate needs one of --prompt and --token-ids")
    if job.prompt:
        return tuple(checked.tokenizer.encode(job.prompt))
    try:
        ids = tuple(int(item) for item in job.token_ids.split(","))
    except ValueError:
        raise ConfigError(f"--token-ids {job.token_ids!r} is not a list of numbers such as 1,2,3") from None
    if bad := [token for token in ids if not 0 <= token < vocab]:
        raise ConfigError(f"--token-ids: {bad[0]} is no token of this model; ids go from 0 to {vocab - 1}")
    return ids


def _save(path: Path, rows: "list[Tensor]", tokens: list[int], prompt: tuple[int, ...]) -> None:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({"logits": torch.stack(rows), "tokens": torch.tensor(tokens), "prompt": torch.tensor(prompt)}, path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--logits {path} could not be written ({error}); choose another place") from None
