"""What every benchmark shares: equal answers first, then the machine line and the result file with the commit it came from."""

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
"""The repository, whatever directory a benchmark is run from."""


class DifferentAnswersError(RuntimeError):
    """Two systems that should do the same work do not; timing them would compare nothing."""


def must_agree(answers: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Raise DifferentAnswersError unless every system gave the same, non-empty token ids to every prompt; `answers` by system."""
    (first, wanted), *others = answers.items()
    if not wanted or not all(wanted):
        raise DifferentAnswersError(f"{first} answered {[list(tokens) for tokens in wanted]}; every prompt needs an answer")
    for name, given in others:
        if len(given) != len(wanted):
            raise DifferentAnswersError(f"{name} answered {len(given)} prompts, {first} {len(wanted)}")
        for number, (a, b) in enumerate(zip(wanted, given, strict=True)):
            if list(a) != list(b):
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
                raise DifferentAnswersError(
                    f"prompt {number}: from token {at} on {first} says {list(a[at : at + 4])}, {name} {list(b[at : at + 4])}; "
                    "find out why before timing either"
                )


def machine_line(threads: int) -> str:
    """One line that says where numbers come from."""
    import torch

    model = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{model} | {isa} | {threads} thread{'s' * (threads != 1)} | torch {torch.__version__} | commit {commit()}"


def commit() -> str:
    """The commit of the working tree, marked when files differ from it."""
    try:
        head = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "packages", "bench")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}{'+changes' if changed else ''}"


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result with its machine line, commit and date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"commit": commit(), "date": when, "machine": machine_line(result.get("threads", 1))}
    path.write_text(json.dumps({**record, **result}, indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
