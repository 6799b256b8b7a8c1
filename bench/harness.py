"""What every benchmark shares: the machine line and the result file with the commit it came from."""

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def machine_line(threads: int) -> str:
    """One line that says where numbers come from."""
    model = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    isa = torch.backends.cpu.get_cpu_capability()
    return f"{model} | {isa} | {threads} thread{'s' * (threads != 1)} | torch {torch.__version__} | commit {commit()}"


def commit() -> str:
    """The commit of the working tree, marked when files differ from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "packages"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}{'+changes' if changed else ''}"


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result with its machine line, commit and date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"commit": commit(), "date": when, "machine": machine_line(result.get("threads", 1))}
    path.write_text(json.dumps({**record, **result}, indent=1) + "\n", encoding="utf-8")


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
