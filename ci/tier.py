"""Runs one tier of the tests under its time budget.

    python ci/tier.py {pure,cpu,http,kernels,full} [--slow FACTOR] [pytest arguments]

A tier is named for what it needs. Budgets are wall seconds on two cores; a tier fails when it takes longer than FACTOR times its
budget (default 2, so that a slow or busy machine does not turn a good change red; `make test SLOW=5` on a really slow one) and
says so when it is over the budget itself. A tier that collects no test fails: it would prove nothing.
The pure tier runs with torch made unimportable, which is what its name promises.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVE = "packages/revolta-serve/tests"
KERNELS = "packages/sm70kernels/tests"
RUN = "import sys; {before}import pytest; sys.exit(pytest.main(sys.argv[1:]))"
NO_TESTS = 5


@dataclass(frozen=True)
class Tier:
    """Where the tests of a tier are, how long they may take, which marker expression selects them."""

    seconds: float
    paths: tuple[str, ...]
    select: str = "not full"
    torch: bool = True


TIERS = {
    "pure": Tier(60, (f"{SERVE}/pure", "ci/tests"), torch=False),
    "cpu": Tier(300, (f"{SERVE}/cpu",)),
    "http": Tier(240, (f"{SERVE}/http",)),
    "kernels": Tier(240, (KERNELS,)),
    "full": Tier(1500, (SERVE, KERNELS, "ci/tests"), select="full"),
}


def verdict(name: str, code: int, seconds: float, slow: float) -> tuple[int, str]:
    """Return the exit status and the closing line of a tier that pytest left with `code` after `seconds`."""
    budget = TIERS[name].seconds
    line = f"tier {name}: {seconds:.1f} s of {budget:.0f} s"
    if code == NO_TESTS:
        return code, f"{line}: FAILED: no test was collected in {', '.join(TIERS[name].paths)}"
    if code:
        return code, f"{line}: FAILED (pytest's exit status {code})"
    if seconds > budget * slow:
        return 1, f"{line}: FAILED: over {slow:g} times its budget; make the slowest tests above faster or mark them full"
    if seconds > budget:
        return 0, f"{line}: passed, but OVER BUDGET (fails above {budget * slow:.0f} s)"
    return 0, f"{line}: passed"


def main() -> int:
    """Run the tier; return its exit status."""
    parser = argparse.ArgumentParser(description="Run one tier of the tests under its time budget.")
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--slow", type=float, default=2.0, help="factor on the budget before the tier fails")
    arguments, rest = parser.parse_known_args()
    tier = TIERS[arguments.tier]
    before = "" if tier.torch else "sys.modules['torch'] = None; "
    command = [sys.executable, "-c", RUN.format(before=before), "-q", "-m", tier.select, "--durations=5", *tier.paths, *rest]
    start = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    code, line = verdict(arguments.tier, code, time.monotonic() - start, arguments.slow)
    print(line, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
