"""Small enough to hold in the head: lines a file, counts of files, fields of the configuration, reads of the environment.

    python ci/check_size.py [--table] [--root REPOSITORY]

Enforced: no source or document is longer than 400 lines; the environment is read in `cli.py` of revolta_serve alone, and there
only REVOLTA_API_KEY. Counted, for review: files and lines by folder, leaves of the ServeConfig tree. `--table` prints all of it.
Exit status 1 and one line per violation.
"""

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LIMIT = 400
SUFFIXES = {".py", ".cu", ".cuh", ".md", ".toml", ".sh"}
FOLDERS = ("packages", "bench", "ci", "docs")
SKIPPED = {"__pycache__", "results", "build", "dist"}
CLI = "packages/revolta-serve/src/revolta_serve/cli.py"
VARIABLES = {"REVOLTA_API_KEY"}
CONFIG = "packages/revolta-serve/src/revolta_serve/config.py"
ROOT_CLASS = "ServeConfig"


@dataclass(frozen=True)
class Read:
    """One use of the environment: file (relative), line, variable name (`*` when it is not a literal), read or written."""

    path: str
    line: int
    variable: str
    write: bool


def source_files(root: Path) -> Iterator[Path]:
    """Yield every file whose length counts, in order."""
    for path in [*root.glob("*"), *(inner for folder in FOLDERS for inner in (root / folder).rglob("*"))]:
        parts = path.relative_to(root).parts
        hidden = any(part in SKIPPED or part.startswith(".") or part.endswith(".egg-info") for part in parts)
        if path.is_file() and not hidden and (path.suffix in SUFFIXES or path.name == "Makefile"):
            yield path


def lines_of(path: Path) -> int:
    """Number of lines, blank ones and comments included."""
    return len(path.read_text(encoding="utf-8").splitlines())


def too_long(root: Path) -> Iterator[str]:
    """Yield one line per file over the limit."""
    for path in sorted(source_files(root)):
        count = lines_of(path)
        if count > LIMIT:
            yield f"{path.relative_to(root)}: {count} > {LIMIT} lines: split it, one concept a file"


def _literal(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "*"


def environment(source: str, path: str) -> Iterator[Read]:
    """Yield the uses of the environment in a module: os.environ and os.getenv under any name, and typer's envvar=."""
    tree = ast.parse(source, path)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    modules, mappings, functions = {"os"}, set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.name == "os" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            mappings |= {alias.asname or alias.name for alias in node.names if alias.name in ("environ", "environb")}
            functions |= {alias.asname or alias.name for alias in node.names if alias.name in ("getenv", "getenvb", "putenv")}

    def of_os(node: ast.AST, names: tuple[str, ...], bare: set[str]) -> bool:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.value.id in modules and node.attr in names
        return isinstance(node, ast.Name) and node.id in bare

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and of_os(node, ("environ", "environb"), mappings):
            above = parents[node]
            name, write = "*", False
            if isinstance(above, ast.Subscript):
                name, write = _literal(above.slice), isinstance(above.ctx, ast.Store | ast.Del)
            elif isinstance(above, ast.Attribute) and isinstance(call := parents[above], ast.Call) and call.args:
                name, write = _literal(call.args[0]), above.attr in ("setdefault", "update")
            elif isinstance(above, ast.Compare):
                name = _literal(above.left)
            yield Read(path, node.lineno, name, write)
        elif isinstance(node, ast.Call):
            if of_os(node.func, ("getenv", "getenvb", "putenv"), functions):
                yield Read(path, node.lineno, _literal(node.args[0] if node.args else None), "putenv" in ast.dump(node.func))
            for keyword in node.keywords:
                if keyword.arg == "envvar" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None):
                    yield Read(path, node.lineno, _literal(keyword.value), False)


def reads(root: Path) -> list[Read]:
    """Return every use of the environment in the source of both packages."""
    found: list[Read] = []
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        found += environment(path.read_text(encoding="utf-8"), str(path.relative_to(root)))
    return found


def forbidden(found: Iterable[Read]) -> Iterator[str]:
    """Yield one line per use of the environment outside the one file, or of another variable."""
    allowed = ", ".join(sorted(VARIABLES))
    for use in found:
        verb = "writes" if use.write else "reads"
        if use.path != CLI:
            yield f"{use.path}:{use.line}: {verb} environment variable {use.variable}: make it a field of {ROOT_CLASS}; only cli.py may"
        elif not use.write and use.variable not in VARIABLES:
            yield f"{use.path}:{use.line}: reads environment variable {use.variable}, not {allowed}: make it a flag or a config field"


def config_fields(root: Path) -> list[str]:
    """Return the leaves of the ServeConfig tree as dotted names; empty while config.py does not exist."""
    path = root / CONFIG
    if not path.is_file():
        return []
    classes = {node.name: node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)}

    def leaves(name: str, prefix: str) -> Iterator[str]:
        for statement in classes[name].body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if "ClassVar" in ast.dump(statement.annotation):
                continue
            inner = [node.id for node in ast.walk(statement.annotation) if isinstance(node, ast.Name) and node.id in classes]
            dotted = f"{prefix}{statement.target.id}"
            if inner:
                yield from leaves(inner[0], f"{dotted}.")
            else:
                yield dotted

    return list(leaves(ROOT_CLASS, "")) if ROOT_CLASS in classes else []


def table(root: Path, found: list[Read]) -> Iterator[str]:
    """Yield the lines of the report: folders, the longest files, configuration, environment."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for path in source_files(root):
        parts = path.relative_to(root).parts
        depth = 2 if parts[0] != "packages" else 6 if parts[2] == "src" else 5
        folder = "/".join(parts[: min(depth, len(parts)) - 1]) or "."
        groups.setdefault(folder, []).append((lines_of(path), str(path.relative_to(root))))
    yield f"{'folder':<52}{'files':>6}{'lines':>8}{'longest':>9}"
    for folder, sizes in sorted(groups.items()):
        yield f"{folder:<52}{len(sizes):>6}{sum(size for size, _ in sizes):>8}{max(sizes)[0]:>9}"
    everything = sorted((size for sizes in groups.values() for size in sizes), reverse=True)
    yield f"{'total':<52}{len(everything):>6}{sum(size for size, _ in everything):>8}{everything[0][0]:>9}"
    yield ""
    yield "longest: " + "  ".join(f"{name} {size}" for size, name in everything[:5])
    fields = config_fields(root)
    sections: dict[str, int] = {}
    for field in fields:
        section = field.partition(".")[0]
        sections[section] = sections.get(section, 0) + 1
    yield f"config fields: {len(fields)}" + "".join(f"  {name} {count}" for name, count in sections.items())
    yield f"environment: {sum(not use.write for use in found)} reads, {sum(use.write for use in found)} writes" + "".join(
        f"  {use.path}:{use.line} {use.variable}" for use in found
    )


def main(argv: list[str] | None = None) -> int:
    """Check the repository at --root; return the exit status."""
    parser = argparse.ArgumentParser(description="Check lengths of files and uses of the environment.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--table", action="store_true", help="print counts by folder")
    arguments = parser.parse_args(argv)
    root = arguments.root.resolve()
    found = reads(root)
    problems = [*too_long(root), *forbidden(found)]
    if arguments.table:
        print("\n".join(table(root, found)))
    for line in problems:
        print(line)
    files, fields = sum(1 for _ in source_files(root)), len(config_fields(root))
    print(f"check_size: {files} files, {fields} config fields, {len(found)} uses of the environment: {len(problems)} violations")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
