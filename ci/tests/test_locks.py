"""The locks agree with each other and with what the packages declare, so that `pip check` has nothing to find."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import check_python

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ("cpu-py311", "v100-py312")
OURS = {"sm70kernels", "revolta-serve"}
EXTRAS = {"test": ENVIRONMENTS, "cuda": ("v100-py312",)}
"""Environments that install an extra of the packages."""

MODULES = {"pyyaml": "yaml", "pyzmq": "zmq", "prometheus-client": "prometheus_client"}
"""Where an import has another name than what is installed."""
PROGRAMS = {"ruff", "mypy", "pytest-benchmark", "pytest-timeout", "pytest-xdist", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"}
"""Used without being imported: by make, or by pytest itself."""
ELSEWHERE = {"cuda", "triton"}
"""Imported only on a machine with a GPU, or by a script that makes test data."""
DRIVERS = {"httptools": "uvicorn"}
"""Imported by another requirement, which we tell to."""


def pins(name: str) -> dict[str, str]:
    """Return the pins of a lock, by canonical name."""
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().split()
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_serving_installs_a_subset_of_the_full_lock(environment: str) -> None:
    assert pins(f"{environment}-serve").items() <= pins(environment).items()


@pytest.mark.parametrize("name", [*ENVIRONMENTS, *(f"{environment}-serve" for environment in ENVIRONMENTS)])
def test_a_lock_is_sorted_canonical_and_exact(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(canonicalize_name(entry) for entry in names)
    assert len(set(names)) == len(names)
    assert all("+" not in line and line.count("==") == 1 for line in lines), "no local versions: they exist on one machine only"


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("package", sorted(OURS))
def test_the_locks_satisfy_what_the_packages_declare(environment: str, package: str) -> None:
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    wanted = [(text, f"{environment}-serve") for text in project["dependencies"]]
    for extra, texts in project.get("optional-dependencies", {}).items():
        wanted += [(text, environment) for text in texts if environment in EXTRAS[extra]]
    for text, lock in wanted:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in OURS:
            continue
        assert name in pins(lock), f"{package} declares {text}, which {lock}.lock does not pin"
        assert requirement.specifier.contains(pins(lock)[name]), f"{package} declares {text}, {lock}.lock pins {pins(lock)[name]}"


@pytest.mark.parametrize(("source", "environment"), [("cpu.in", "cpu-py311"), ("v100.in", "v100-py312")])
def test_a_lock_satisfies_the_ranges_it_was_made_from(source: str, environment: str) -> None:
    locked = pins(environment)
    for line in (ROOT / "requirements" / source).read_text().splitlines():
        requirement = Requirement(line)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), line


def imported() -> set[str]:
    """Top-level names that the code, its tests, the checks and the benchmarks import anywhere."""
    names: set[str] = set()
    for path in (path for folder in ("packages", "ci", "bench") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names


def declared() -> dict[str, set[str]]:
    """Where each distribution is asked for: cpu.in, and what the packages need to run."""
    places = {"cpu.in": (ROOT / "requirements/cpu.in").read_text().splitlines()}
    for package in sorted(OURS):
        places[package] = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]["dependencies"]
    return {place: {canonicalize_name(Requirement(line).name) for line in lines} - OURS for place, lines in places.items()}


def test_what_is_asked_for_is_used_and_what_is_used_is_asked_for() -> None:
    used = imported()
    for place, names in declared().items():
        idle = {name for name in names - PROGRAMS - DRIVERS.keys() if MODULES.get(name, name) not in used}
        assert not idle, f"{place} asks for {idle}, which nothing imports"
    known = {MODULES.get(name, name) for name in declared()["cpu.in"]}
    ours = {"sm70kernels", "revolta_serve", "support"} | {path.stem for path in [*ROOT.glob("ci/*.py"), *ROOT.glob("bench/*.py")]}
    assert used - known - ours - ELSEWHERE - sys.stdlib_module_names == set()


@pytest.mark.parametrize("lock", ["cpu-py311", "cpu-py311-serve"])
def test_the_cpu_locks_leave_it_to_torch_which_build_it_is(lock: str) -> None:
    """Its CUDA build brings a triton and libraries of its own: another pin of them would make the lock impossible to install.

    The compiler of the kernels and CUDA's headers are packages of another name than those of any build for CUDA 13.
    """
    builds = ("triton", "cuda-", "nvidia-", "cupy")
    compiler = {"nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"}
    assert {name for name in pins(lock) if name.startswith(builds)} == compiler


def test_serving_needs_no_test_tools() -> None:
    assert not pins("cpu-py311-serve").keys() & {"transformers", "pytest", "hypothesis", "openai", "mypy", "ruff", "matplotlib"}


@pytest.mark.parametrize(
    ("env", "version", "ensurepip", "lock", "says"),
    [
        ("cpu-py311", (3, 11), True, True, None),
        ("cpu-py311", (3, 13), True, True, None),
        ("cpu-py311", (3, 9), True, True, "PYTHON is Python 3.9, cpu-py311 needs 3.11 or newer"),
        ("v100-py312", (3, 11), True, True, "v100-py312 needs 3.12 or newer"),
        ("cpu-py311", (3, 11), False, True, "apt-get install python3-venv (or python3.11-venv)"),
        ("cpu", (3, 11), True, False, "there is no requirements/cpu.lock"),
    ],
)
def test_a_machine_that_cannot_be_set_up_is_told_why(
    env: str, version: tuple[int, int], ensurepip: bool, lock: bool, says: str | None
) -> None:
    found = check_python.problem(env, version, ensurepip, lock)
    assert found is None if says is None else says in (found or "")
