"""python -m sm70kernels bench: tests an op, then times it; without a GPU it estimates.

An op whose test is red is refused, and there is no way around that. The ops' tests run first and side by side, on the emulator; the
timings follow one by one.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import sm70kernels
from sm70kernels import manual, roofline
from sm70kernels.bench import cases, machine, overhead, report
from sm70kernels.bench.cases import FOLDER, Cases
from sm70kernels.bench.timing import Cuda, Stopwatch
from sm70kernels.build import configurations

ROOT = FOLDER.parents[1]
RESULTS = ROOT / "bench" / "results"
TESTS = ROOT / "packages" / "sm70kernels" / "tests"
Say = Callable[[str], None]


class RedTest(RuntimeError):
    """The test of an op does not pass, or cannot be run; the text is its end."""


def verify(op: str, folder: Path = TESTS) -> None:
    """Run the test of an op without a GPU. Raises RedTest."""
    path = folder / f"test_{op}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not full", str(path)]
    done = subprocess.run(command, cwd=folder.parents[2], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RedTest(f"{op}: {path} is red, so it is not timed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-12:]))


def verified(ops: Sequence[str], workers: int | None = None, check: Callable[[str], None] = verify) -> dict[str, str]:
    """Run the tests of several ops side by side; returns why an op is refused, by its name."""
    refused: dict[str, str] = {}

    def one(op: str) -> None:
        try:
            check(op)
        except RedTest as error:
            refused[op] = str(error)

    with ThreadPoolExecutor(workers or max(1, min(8, (os.cpu_count() or 2) // 2))) as pool:
        list(pool.map(one, ops))
    return refused


def declared(ops: Iterable[str], folder: Path = FOLDER) -> list[Cases]:
    """Return the cases of the given ops. Raises NoCases."""
    return [found for op in ops for found in cases.load(op, folder)]


def timed(
    stopwatch: Stopwatch, declarations: Iterable[Cases], rows: Sequence[int], every_config: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the record of every case in its chosen configuration, or in each that is declared."""
    for declaration in declarations:
        for case in declaration.each(rows):
            dims = case.op.sizes(case.dims)
            for config in configurations(case.op, dims) if every_config else (case.op.config(dims),):
                yield stopwatch.measure(case, config).record()


def on_gpu(
    names: Sequence[str], rows: Sequence[int], path: Path | None, every_config: bool, commit: str | None, say: Say = print
) -> int:
    """Test and time ops on the current device, write record and plot; returns the exit status."""
    declarations = declared(names)
    say(f"testing {len(names)} ops in the emulator first")
    refused = verified(names)
    for text in refused.values():
        say(text)
    device = Cuda()
    found = machine.describe()
    record: dict[str, Any] = {
        "commit": commit or machine.commit(ROOT),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": found,
        "ceilings": machine.ceilings(device),
        "refused": refused,
        "results": [],
    }
    say(machine.line(found, record["commit"]))
    for text in report.ceiling_lines(record["ceilings"]):
        say(text)
    say(report.head())
    stopwatch = Stopwatch(device)
    for result in timed(stopwatch, [each for each in declarations if each.op.name not in refused], rows, every_config):
        record["results"].append(result)
        say(report.row(result, record["ceilings"]))
    if "rms_norm" not in refused:  # one kernel, few arguments: the op with the least to check
        spent = asdict(overhead.measure(sm70kernels.rms_norm, dict(M=1)))
        record["overhead"] = spent
        say(report.overhead_line(spent, overhead.TARGET))
    record["machine_after"] = machine.describe()
    target = path or RESULTS / f"ops_{re.sub('[^a-z0-9]+', '_', found['device'].lower())}.json"
    report.save(target, record)
    plotted = report.draw(target.with_suffix(".png"), record)
    say(f"{target}" + (f", {target.with_suffix('.png')}" if plotted else "; no plot: pip install matplotlib, then --draw this file"))
    slow = record["ceilings"]["read_only_of_copy"] < machine.ENOUGH
    if slow:
        say(f"the read-only kernel is below {machine.ENOUGH:.0%} of a copy's bandwidth: shares of it flatter")
    return 1 if refused or slow else 0


def without_gpu(names: Sequence[str], rows: Sequence[int], say: Say = print) -> int:
    """Print what the emulator counts and what a V100 would need; returns the exit status."""
    say("no CUDA device: nothing is timed")
    say(report.estimate_head())
    for declaration in declared(names):
        for case in declaration.each(rows):
            found = roofline.estimate(case)
            say(report.estimate_row(case.op.name, case.name, found))
            for work in found.works:
                say(f"    {manual.counts(work)}")
    return 0


def main(names: Sequence[str], rows: Sequence[int], path: Path | None, every_config: bool = False, commit: str | None = None) -> int:
    """Run the benchmark of the given ops; returns the exit status."""
    if torch.cuda.is_available():
        return on_gpu(names, rows, path, every_config, commit)
    return without_gpu(names, rows)
