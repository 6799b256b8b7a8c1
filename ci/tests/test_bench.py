"""What every benchmark shares: nothing is timed unless the answers are equal, and the commit is the repository's wherever it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import harness  # noqa: E402

ENGINES = ("torch", "transformers", "revolta_serve.engine.client", "revolta_serve.engine.core", "revolta_serve.testing.server")
"""What a benchmark imports in order to get a model's answers."""


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"a": [[1, 2, 3]], "b": [[1, 2, 3]], "c": [[1, 2, 4]]}, r"prompt 0: from token 2 on a says \[3\], c \[4\]"),
        ({"a": [[1], [5, 6]], "b": [[1], [5]]}, r"prompt 1: from token 1 on a says \[6\], b \[\]"),
        ({"a": [[1]], "b": [[1, 2]]}, "prompt 0: from token 1"),
        ({"a": [[1]], "b": []}, "b answered 0 prompts, a 1"),
        ({"a": [], "b": []}, "every prompt needs an answer"),
        ({"a": [[]], "b": [[]]}, "every prompt needs an answer"),
    ],
)
def test_systems_that_say_different_things_are_not_timed(answers: dict[str, list[list[int]]], message: str) -> None:
    with pytest.raises(harness.DifferentAnswersError, match=message):
        harness.must_agree(answers)


def test_systems_that_say_the_same_may_be_timed() -> None:
    harness.must_agree({"a": [[1, 2], [3]], "b": [(1, 2), (3,)], "c": [[1, 2], [3]]})


def test_the_commit_is_the_repositorys_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode:
        pytest.skip("not a clone")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    assert harness.commit().removesuffix("+changes") == git.stdout.strip()


@pytest.mark.parametrize("path", sorted((ROOT / "bench/serve").glob("bench_*.py")), ids=lambda path: path.name)
def test_every_comparison_of_systems_demands_equal_answers(path: Path) -> None:
    """A benchmark that runs a model compares what says the same; one that runs none gets no answers to compare."""
    text = path.read_text()
    assert ("must_agree(" in text) == any(f"{engine} import" in text or f"import {engine}" in text for engine in ENGINES)
