"""Would the tests notice? Runs the tests of every kernel with one PTX instruction dropped or altered.

    python ci/mutate_kernels.py [--count 500] [--seed 1] [--of NAME ...] [--write]

Mutated is what the emulator is given: the images that an op's own tests launch, and the kernels Triton compiled, whose style is not ours.
Mutants are spread evenly over the test files and over the images that do most of each file's work: in the smallest ones, with a row of one
warp or a sum of one step, much of a kernel is idle. A mutant is killed when a test that launches its image fails; only those are run, the
quickest first. Survivors are compared with ci/mutants.json, where each stands with the reason why it changes nothing that anyone may rely
on; --write adds the new ones there with an empty reason, to be filled in by hand. A survivor is known there by file, line and instruction
without the numbers of its registers.

Exit status 1 when an unmutated kernel fails a test, a survivor is not listed or listed without a reason, or fewer than 95% of the
mutants that are not equivalent by such a reason were killed.
"""

import argparse
import contextlib
import io
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import sm70kernels
from sm70kernels.emulator import Counters, EmulatorError, UnknownInstruction, launch
from sm70kernels.emulator.program import program_of
from sm70kernels.mutation import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "packages/sm70kernels/tests"
LISTED = ROOT / "ci/mutants.json"
NEEDED = 0.95
SHARE = 0.8
"""Of a file's thread-instructions, what the images whose mutants are tried must come to."""

Key = tuple[str, str]
"""PTX text and entry: what the emulator translates."""


class Watch:
    """A plugin of pytest that swaps programs and sees which test launches what, how long it takes, and why it fails."""

    def __init__(self) -> None:
        self.changed: dict[Key, str] = {}
        self.work: dict[str, Counter[Key]] = {}
        self.seconds: dict[str, float] = {}
        self.failure: BaseException | None = None
        self.chosen: set[str] | None = None
        self._test, self._key = "", ("", "")
        self._run = launch.Launch.run
        launch.program_of = self._program  # type: ignore[attr-defined, assignment]
        launch.Launch.run = lambda launched: self._counted(launched)  # type: ignore[method-assign, assignment]

    def _program(self, ptx: str, entry: str) -> Any:
        self._key = ptx, entry
        return program_of(self.changed.get(self._key, ptx), entry)

    def _counted(self, launched: launch.Launch) -> Counters:
        counters = self._run(launched)
        self.work.setdefault(self._test, Counter())[self._key] += counters.thread_instructions
        return counters

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.chosen is not None:
            items[:] = sorted((item for item in items if item.nodeid in self.chosen), key=lambda item: self.seconds[item.nodeid])

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item.nodeid

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "call":
            self.seconds[item.nodeid] = call.duration
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            self.failure = call.excinfo.value

    def run(self, file: Path, chosen: set[str] | None = None) -> BaseException | None:
        """Run the tests of a file, all or the chosen ones up to the first that fails; return what failed it."""
        self.failure, self.chosen = None, chosen
        command = ["-q", "-x", "-m", "not gpu and not full", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(ROOT), str(file)]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = pytest.main(command, plugins=[self])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise SystemExit(f"mutate_kernels: {file.name}: pytest's exit status {int(code)}\n{said.getvalue()}")
        return self.failure


def kind(failure: BaseException) -> str:
    """What a mutant was killed by: the kind of a fault, or a wrong result."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if isinstance(failure, EmulatorError):
        return getattr(failure, "kind", type(failure).__name__)
    return "wrong result" if isinstance(failure, AssertionError) else type(failure).__name__


def known_as(name: str, mutant: Mutant) -> str:
    """How a survivor is known from one version of a kernel to the next."""
    change = re.sub(r"%([a-z]+)\d+", r"%\1", f"{mutant.before} -> {mutant.after}")
    return f"{name}: {mutant.line}: {' '.join(change.split())}"


def busiest(work: dict[str, Counter[Key]]) -> list[Key]:
    """Return the images that do most of the work, the busiest first."""
    total = sum(work.values(), Counter[Key]())
    left, found = SHARE * total.total(), list[Key]()
    for key, done in total.most_common():
        if left <= 0:
            break
        left -= done
        found.append(key)
    return found


def tried(name: str, watch: Watch, count: int, seed: int) -> Iterator[tuple[Mutant, BaseException | None]]:
    """Yield `count` mutants of what a test file launches with what killed each, None for a survivor."""
    file = TESTS / ("core/emulator/test_triton.py" if name == "triton" else f"test_{name}.py")
    watch.work.clear()
    if failure := watch.run(file):
        raise SystemExit(f"mutate_kernels: {file.name} fails without any mutant ({failure}); make it pass first")
    made = [(key, mutant) for i, key in enumerate(busiest(watch.work)) for mutant in mutants(*key, 2 * count, seed + i)]
    random.Random(seed).shuffle(made)
    left = count
    for key, mutant in made:
        if left == 0:
            return
        watch.changed = {key: mutant.ptx}
        failure = watch.run(file, {test for test, done in watch.work.items() if key in done})
        watch.changed = {}
        if isinstance(failure, UnknownInstruction):
            continue  # not PTX: another one takes its place
        left -= 1
        yield mutant, failure


def main(argv: list[str] | None = None) -> int:
    """Run the mutants; return the exit status."""
    names = [name for name in sm70kernels.OPS if getattr(sm70kernels, name).launch is not None] + ["triton"]
    parser = argparse.ArgumentParser(description="Measure what the tests of the kernels would notice.")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--of", action="append", choices=names, help="only mutants of this op, or of Triton's kernels")
    parser.add_argument("--write", action="store_true", help="add new survivors to ci/mutants.json, with an empty reason")
    options = parser.parse_args(argv)
    chosen = options.of or names
    reasons: dict[str, str] = json.loads(LISTED.read_text(encoding="utf-8")) if LISTED.is_file() else {}
    # A failing example says enough as it is: without this, half the time would go to making it smaller.
    hypothesis.settings.register_profile("mutants", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
    hypothesis.settings.load_profile("mutants")
    watch, kills, survivors, began = Watch(), Counter[str](), [], time.monotonic()
    for index, name in enumerate(chosen):
        share = options.count * (index + 1) // len(chosen) - options.count * index // len(chosen)
        results = list(tried(name, watch, share, options.seed))
        kills.update(kind(failure) for _, failure in results if failure)
        survivors += [known_as(name, mutant) for mutant, failure in results if not failure]
        print(f"{name}: {sum(1 for _, failure in results if failure)} of {len(results)} killed", flush=True)
    killed, equivalent = sum(kills.values()), sum(1 for key in survivors if reasons.get(key))
    total = killed + len(survivors)
    rate = killed / max(1, total - equivalent)
    for key in survivors:
        print(f"survived: {key}: {reasons.get(key) or 'NO REASON GIVEN'}")
    by = ", ".join(f"{what} {number}" for what, number in kills.most_common())
    print(f"{total} mutants of the kernels of {len(chosen)} test files in {time.monotonic() - began:.0f} s: {killed} killed ({by})")
    print(f"{len(survivors)} survived, {equivalent} of them equivalent: {rate:.1%} of the rest were killed, {NEEDED:.0%} are needed")
    if options.write:
        new = {key: reasons.get(key, "") for key in sorted({*reasons, *survivors})}
        LISTED.write_text(json.dumps(new, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if rate < NEEDED or equivalent < len(survivors) else 0


if __name__ == "__main__":
    sys.exit(main())
