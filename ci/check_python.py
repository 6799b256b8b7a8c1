"""Can this interpreter make the virtual environment? Says what to install when it cannot.

    python3 ci/check_python.py ENV

ENV names a lock of requirements/; its last digits are the oldest Python the lock installs on (cpu-py311: 3.11).
Has to run on Pythons that are too old, so it uses nothing newer than 3.7. Exit status 1 and one sentence when something is missing.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path


def problem(env: str, version: tuple[int, int], has_ensurepip: bool, lock_exists: bool) -> str | None:
    """Return the sentence to print, or None when ENV can be made. version is (major, minor)."""
    match = re.search(r"-py(\d)(\d+)$", env)
    if match is None or not lock_exists:
        return f"ENV={env}: there is no requirements/{env}.lock; use ENV=cpu-py311 or ENV=v100-py312"
    needed = (int(match.group(1)), int(match.group(2)))
    found, wanted = "{}.{}".format(*version), "{}.{}".format(*needed)
    if version < needed:
        return f"PYTHON is Python {found}, {env} needs {wanted} or newer: install one and say make ... PYTHON=python{wanted}"
    if not has_ensurepip:
        return f"Python {found} cannot make virtual environments: apt-get install python3-venv (or python{found}-venv)"
    return None


def main() -> int:
    """Check the running interpreter against ENV."""
    env = sys.argv[1]
    lock = Path(__file__).resolve().parents[1] / "requirements" / f"{env}.lock"
    # Debian leaves ensurepip out of python3 and puts it into python3-venv.
    found = problem(env, sys.version_info[:2], importlib.util.find_spec("ensurepip") is not None, lock.is_file())
    if found:
        print(f"setup: {found}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
