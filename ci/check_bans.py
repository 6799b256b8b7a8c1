"""Runs the pygrep hooks of .pre-commit-config.yaml over the tree: one list of bans for the hook and for CI.

    python ci/check_bans.py [--root REPOSITORY]

A hook's `entry` is a regular expression, searched line by line, or over the whole file with `--multiline` (where `^` matches at
every line and `.` matches newlines). Exit status 1 and one line per match.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # PyYAML ships no types

CONFIG = ".pre-commit-config.yaml"
FOLDERS = ("packages", "bench", "ci", "docs", "requirements", ".ci")


@dataclass(frozen=True)
class Ban:
    """One pygrep hook: its pattern, the sentence that says why, the files it holds for."""

    id: str
    why: str
    pattern: re.Pattern[str]
    multiline: bool
    files: re.Pattern[str]
    exclude: re.Pattern[str]

    def matches(self, path: str, text: str) -> Iterator[int]:
        """Yield the line numbers of `text` where the ban is broken; none when `path` is not its business."""
        if not self.files.search(path) or self.exclude.search(path):
            return
        if self.multiline:
            yield from (text.count("\n", 0, match.end()) + 1 for match in self.pattern.finditer(text))
        else:
            yield from (number for number, line in enumerate(text.splitlines(), 1) if self.pattern.search(line))


def read_bans(text: str) -> list[Ban]:
    """Return the pygrep hooks of a pre-commit configuration."""
    bans = []
    for repository in yaml.safe_load(text)["repos"]:
        for hook in repository["hooks"]:
            if hook["language"] != "pygrep":
                continue
            multiline = "--multiline" in hook.get("args", [])
            pattern = re.compile(hook["entry"], re.MULTILINE | re.DOTALL if multiline else 0)
            bans.append(Ban(hook["id"], hook["name"], pattern, multiline, re.compile(hook["files"]), re.compile(hook.get("exclude", "^$"))))
    return bans


def violations(root: Path, bans: list[Ban]) -> Iterator[str]:
    """Yield one line per place where a ban is broken."""
    paths = [*root.glob("*"), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))]
    for path in sorted(paths):
        relative = path.relative_to(root).as_posix()
        wanted = [ban for ban in bans if ban.files.search(relative)]
        if not wanted or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        for ban in wanted:
            yield from (f"{relative}:{line}: {ban.id}: {ban.why}" for line in ban.matches(relative, text))


def main(argv: list[str] | None = None) -> int:
    """Check the repository at --root; return the exit status."""
    parser = argparse.ArgumentParser(description="Run the bans of .pre-commit-config.yaml.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args(argv).root.resolve()
    bans = read_bans((root / CONFIG).read_text(encoding="utf-8"))
    found = list(violations(root, bans))
    for line in found:
        print(line)
    print(f"check_bans: {len(bans)} bans: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
