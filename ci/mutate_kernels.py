"""Would the tests notice? Runs every kernel with one PTX instruction dropped or altered, against its definition, in the emulator.

    python ci/mutate_kernels.py [--count 500] [--seed 1] [--op NAME ...] [--write]

The mutants are spread evenly over all ops with a kernel and their images. A mutant is killed when the emulator reports a fault or the
outputs leave the op's tolerance; the calls are like those its property test makes: the largest and the smallest test sizes and some
that are drawn, every other one in a random order of warps. Survivors are compared with ci/mutants.json, where each stands with the
reason why it changes nothing that anyone may rely on; --write adds the new ones there with an empty reason, to be filled in by hand.

Exit status 1 when an unmutated kernel reports anything, a survivor is not listed, a listed one has no reason, or fewer than 95% of the
mutants that are not equivalent by such a reason were killed.
"""

import argparse
import importlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import sm70kernels
from sm70kernels.cuda import Image, Kernel
from sm70kernels.dims import Spec
from sm70kernels.emulator import EmulatorError, UnknownInstruction
from sm70kernels.mutation import Mutant, mutants
from sm70kernels.op import Op
from sm70kernels.testing import choose_dims, poisoned_memory
from sm70kernels.yardstick import Expected, clone, expect, judge, outputs, rounds_to_nearest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "packages/sm70kernels/tests"
LISTED = ROOT / "ci/mutants.json"
NEEDED = 0.95
FORMS, DRAWN, OFTEN = 3, 36, 5
"""Specialisations of a kernel besides those of the largest and smallest sizes; calls of them; calls an image is used by at least."""


Key = tuple[str, str, tuple[tuple[str, int | str], ...]]


@dataclass
class Call:
    """One call of an op: its arguments, what its definition gives, the order of warps, and the images it asked for."""

    arguments: dict[str, Any]
    expected: Expected
    order: int | None
    images: set[Key]


@dataclass
class Images:
    """Stands in for the images of kernels: remembers which were asked for, and hands out a changed one in the place of one of them."""

    asked: dict[Key, Image]
    changed: dict[Key, Image]

    def install(self) -> None:
        original = Kernel.image

        def image(kernel: Kernel, defines: Any) -> Image:
            key = (kernel.op, kernel.entry, tuple(sorted(defines.items())))
            self.asked[key] = original(kernel, defines)
            return self.changed.get(key, self.asked[key])

        Kernel.image = image  # type: ignore[assignment, method-assign]


def test_module(op: str) -> Any:
    """Return the module of an op's test file: it holds the naive definition, and its property test the dims it tries besides."""
    if "kernel_tests" not in sys.modules:  # a package, because test files import their helpers relative to it
        package = ModuleType("kernel_tests")
        package.__path__ = [str(TESTS)]
        sys.modules["kernel_tests"] = package
    return importlib.import_module(f"kernel_tests.test_{op}")


def calls(op: Op[Any], seed: int) -> Iterator[Call]:
    """Yield the calls a mutant is tried with."""
    module, generator = test_module(op.name), random.Random(seed)
    dims = [choose_dims(op, {}, pick, kernel=True) for pick in (max, min)]
    dims += [choose_dims(op, fixed, max, kernel=True) for fixed in module.test_matches_naive.also]
    specialised = {name: dim.kernel for name, dim in op.dims.items() if isinstance(dim, Spec)}
    fixed = [{name: generator.choice(values) for name, values in specialised.items()} for _ in range(FORMS)]
    dims += [choose_dims(op, fixed[i % FORMS], generator.choice, kernel=True) for i in range(DRAWN)]
    for index, sizes in enumerate(dims):
        arguments = op.make(sizes, seed + index, torch.float16)
        yield Call(arguments, expect(op, module.naive, arguments, torch.float16), index if index % 2 else None, set())


def verdict(op: Op[Any], call: Call) -> str | None:
    """Run one call; return why it is wrong, or None."""
    arguments = clone(call.arguments)
    try:
        with poisoned_memory():
            result, _ = op.emulate(**arguments, order=call.order)
        got = outputs(op, arguments, result)
        judge(op, call.expected, got)
        rounds_to_nearest(op, call.expected, got)
    except UnknownInstruction:
        raise
    except EmulatorError as error:
        return getattr(error, "kind", type(error).__name__)
    except AssertionError:
        return "wrong result"
    return None


def key_of(op: str, mutant: Mutant) -> str:
    """How a survivor is known from one version of a kernel to the next: by texts, not by line numbers of the PTX."""
    return f"{op}: {mutant.line}: {mutant.before} -> {mutant.after}"


def tried(op: Op[Any], images: Images, count: int, seed: int) -> Iterator[tuple[Mutant, str | None]]:
    """Yield `count` mutants of an op's kernels with the reason that killed each, None for a survivor."""
    every = []
    for call in calls(op, seed):
        images.asked.clear()
        fault = verdict(op, call)
        if fault is not None:
            raise SystemExit(f"mutate_kernels: {op.name} without any change: {fault}; make its tests pass first")
        call.images |= images.asked.keys()
        every.append((call, dict(images.asked)))
    # An image that few calls use says little of the tests, which draw more of them than this does.
    often = Counter(key for _, seen in every for key in seen)
    asked = {key: image for _, seen in every for key, image in seen.items() if often[key] >= OFTEN}
    made = [(key, mutant) for i, key in enumerate(asked) for mutant in mutants(asked[key].ptx, key[1], 2 * count, seed + i)]
    random.Random(seed).shuffle(made)
    left = count
    for key, mutant in made:
        if left == 0:
            return
        images.changed[key] = replace(asked[key], ptx=mutant.ptx)
        try:
            reason = next((found for call, _ in every if key in call.images and (found := verdict(op, call))), None)
        except UnknownInstruction:
            continue  # not PTX: another one takes its place
        finally:
            del images.changed[key]
        left -= 1
        yield mutant, reason


def main(argv: list[str] | None = None) -> int:
    """Run the mutants; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure what the tests of the kernels would notice.")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--op", action="append", choices=sm70kernels.OPS)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args(argv)
    ops = [op for name in chosen.op or sm70kernels.OPS if (op := getattr(sm70kernels, name)).launch is not None]
    reasons: dict[str, str] = json.loads(LISTED.read_text(encoding="utf-8")) if LISTED.is_file() else {}
    images, kills, survivors, began = Images({}, {}), Counter[str](), [], time.monotonic()
    images.install()
    for index, op in enumerate(ops):
        share = chosen.count * (index + 1) // len(ops) - chosen.count * index // len(ops)
        before = sum(kills.values())
        for mutant, reason in tried(op, images, share, chosen.seed):
            if reason is None:
                survivors.append(key_of(op.name, mutant))
            else:
                kills[reason] += 1
        print(f"{op.name}: {sum(kills.values()) - before} of {share} killed", flush=True)
    killed, equivalent = sum(kills.values()), sum(1 for key in survivors if reasons.get(key))
    total = killed + len(survivors)
    rate = killed / max(1, total - equivalent)
    for key in survivors:
        print(f"survived: {key}: {reasons.get(key) or 'NO REASON GIVEN'}")
    by = ", ".join(f"{kind} {number}" for kind, number in kills.most_common())
    print(f"{total} mutants of {len(ops)} kernels in {time.monotonic() - began:.0f} s: {killed} killed ({by})")
    print(f"{len(survivors)} survived, {equivalent} of them equivalent: {rate:.1%} of the rest were killed, {NEEDED:.0%} are needed")
    if chosen.write:
        new = {key: reasons.get(key, "") for key in sorted({*reasons, *survivors})}
        LISTED.write_text(json.dumps(new, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if rate < NEEDED or equivalent < len(survivors) else 0


if __name__ == "__main__":
    sys.exit(main())
