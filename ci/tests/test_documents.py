"""What the documents and the Makefile say about the tree is true of the tree."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("*.md", "docs/**/*.md", "packages/*/README.md", "bench/README.md", "requirements/README.md")
DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))
BASES = (
    ".",
    "packages",
    "packages/sm70kernels/src",
    "packages/sm70kernels/src/sm70kernels",
    "packages/revolta-serve/src/revolta_serve",
    "bench",
    "packages/revolta-serve/src/revolta_serve/model",
    "packages/revolta-serve/src/revolta_serve/engine",
    "packages/revolta-serve/src",
)
PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|cu|md|lock|yaml)|(?:[\w.-]+/)+)`")
LINK = re.compile(r"\]\(([^)#:]+)\)")
CODE = re.compile(r"`([^`\n]+)`|^(make .*)$", re.MULTILINE)
TARGET = re.compile(r"^make ([a-z][a-z-]+)")


def identifier(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=identifier)
def test_every_file_a_document_names_exists(document: Path) -> None:
    named = [name for name in PATH.findall(document.read_text()) if "<" not in name]
    missing = [name for name in named if not any((ROOT / base / name).exists() for base in BASES) and not (document.parent / name).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=identifier)
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    assert not [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=identifier)
def test_every_target_a_document_names_exists(document: Path) -> None:
    code = [inline or line for inline, line in CODE.findall(document.read_text())]
    assert {name for text in code for name in TARGET.findall(text)} <= targets()


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [path.name.partition("-")[0] for path in sorted((ROOT / "docs/decisions").glob("*.md"))]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]
    for path in (ROOT / "docs/decisions").glob("*.md"):
        assert path.read_text().startswith(f"# {path.name[:4]} "), path.name


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run make in the repository as if from a terminal, not from the make that runs these tests."""
    ours = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ENV", "VENV", "PYTHON", "TORCH_INDEX", "OP", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = ["make", "--no-print-directory", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def dry_run(target: str, tmp_path: Path) -> str:
    """The commands that a target would run on a machine where nothing is installed."""
    run = make("-n", f"VENV={tmp_path / 'venv'}", target)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_every_target_has_a_sentence_and_help_lists_it() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(phony.group(1).split()) == targets()
    shown = make().stdout
    assert all(re.search(rf"^  {name} +[A-Z]", shown, re.MULTILINE) for name in targets())


def test_the_demo_installs_only_what_serving_needs(tmp_path: Path) -> None:
    commands = dry_run("demo", tmp_path)
    assert "-r requirements/cpu-py311-serve.lock" in commands
    assert "-r requirements/cpu-py311.lock" not in commands
    assert commands.index("-m venv") < commands.index("-r requirements") < commands.rindex("revolta-serve demo")


@pytest.mark.parametrize("target", sorted(targets() - {"help", "demo", "size", "where", "clean"}))
def test_every_other_target_sets_itself_up(target: str, tmp_path: Path) -> None:
    commands = dry_run(target, tmp_path)
    assert commands.count("-r requirements/cpu-py311-serve.lock") == commands.count("-r requirements/cpu-py311.lock") == 1


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    run = make(f"VENV={tmp_path / 'venv'}", "PYTHON=python-that-is-not-there", "setup")
    assert run.returncode != 0
    assert "there is no python-that-is-not-there: apt-get install python3 python3-venv" in run.stdout


def test_where_names_the_files_of_an_op() -> None:
    assert "packages/sm70kernels/src/sm70kernels/ops/rms_norm.py" in make("where", "OP=rms_norm").stdout.split()
    run = make("where", "OP=rms_nrom")
    assert run.returncode != 0
    assert "no op rms_nrom; there are:" in run.stdout
    assert "rms_norm" in run.stdout
