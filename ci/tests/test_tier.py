"""A tier fails when its tests fail, when it has none, and when it takes too long."""

import subprocess
import sys

import pytest

import tier


@pytest.mark.parametrize(
    ("code", "seconds", "status", "says"),
    [
        (0, 10, 0, "tier pure: 10.0 s of 60 s: passed"),
        (0, 61, 0, "OVER BUDGET (fails above 120 s)"),
        (0, 121, 1, "over 2 times its budget"),
        (1, 10, 1, "FAILED (pytest's exit status 1)"),
        (5, 1, 5, "no test was collected"),
    ],
)
def test_verdict(code: int, seconds: float, status: int, says: str) -> None:
    got, line = tier.verdict("pure", code, seconds, 2.0)
    assert got == status
    assert says in line


def test_the_budgets_leave_half_of_ninety_minutes() -> None:
    assert sum(entry.seconds for entry in tier.TIERS.values()) <= 45 * 60


def test_the_pure_tier_cannot_import_torch() -> None:
    code = tier.RUN.format(before="sys.modules['torch'] = None; ").partition("import pytest")[0] + "import torch"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "import of torch halted" in run.stderr


def test_every_folder_of_tests_belongs_to_a_tier() -> None:
    folders = {path.relative_to(tier.ROOT).as_posix() for path in (tier.ROOT / tier.SERVE).iterdir() if any(path.glob("**/test_*.py"))}
    covered = {path for name, entry in tier.TIERS.items() if name != "full" for path in entry.paths}
    assert folders <= covered | {f"{tier.SERVE}/gpu"}
