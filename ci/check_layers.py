"""Arrows point down: every import of both packages is allowed by the table of docs/00-map.md, which is read here.

    python ci/check_layers.py [--root REPOSITORY]

The table has one row per part: its modules, what it may import, whether torch may be loaded with it. Rules:

* a module belongs to the part with the longest matching name; `engine.core` is a part of its own inside `engine`;
* a part may import itself, the parts its row names, and the last row (the floor); "all below" names every lower row, "nothing" none;
* a row may name lower rows only, so the table cannot contain a cycle;
* a part marked `never` loads no torch, neither itself nor through any module of ours that it imports;
* transformers is imported nowhere.

Imports are read from the syntax tree, inside functions and under TYPE_CHECKING too, and `import_module("literal")` counts.
Exit status 1 and one line per violation (file, line, what, the way out); 2 when the table itself is wrong.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAP = "docs/00-map.md"
HEADER = "| part | may import | torch |"
SOURCES = {"revolta_serve": "packages/revolta-serve/src", "sm70kernels": "packages/sm70kernels/src"}
BANNED = {"transformers": "a test oracle only: port what is needed, or move the import to tests"}
FLOOR = "the floor"


class TableError(Exception):
    """The table cannot be enforced as it is written."""


@dataclass(frozen=True)
class Row:
    """One row of the table: modules (without `revolta_serve.`), what they may import, whether torch is forbidden."""

    parts: tuple[str, ...]
    may: frozenset[str]
    torch_free: bool


@dataclass(frozen=True)
class Import:
    """`importer` (a module of ours) names `target` (any dotted name) at `line`."""

    importer: str
    target: str
    line: int


def _names(cell: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("`") for part in cell.split(",") if part.strip())


def read_table(text: str) -> tuple[Row, ...]:
    """Return the rows of the table under HEADER, top first. Raises TableError when a name is unknown, twice there, or points up."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(HEADER)), None)
    if start is None:
        raise TableError(f"{MAP}: no table that starts with {HEADER!r}")
    cells: list[list[str]] = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    if len(cells) < 2:
        raise TableError(f"{MAP}: the table of parts has {len(cells)} rows; it needs the parts and the floor")
    parts = [_names(row[0]) for row in cells]
    every = [name for names in parts for name in names]
    for name in every:
        if every.count(name) > 1:
            raise TableError(f"{MAP}: part {name!r} is in the table {every.count(name)} times; keep one")
    rows = []
    for index, row in enumerate(cells):
        below = {name for names in parts[index + 1 :] for name in names}
        may = set(parts[-1])
        for name in _names(row[1]):
            if name == "nothing":
                may = set()
            elif name == "all below":
                may |= below
            elif name in below:
                may.add(name)
            elif name != FLOOR:
                where = "above or beside" if name in every else "not in the table"
                raise TableError(f"{MAP}: {', '.join(parts[index])} may import {name!r}, which is {where}: arrows point down")
        if row[2] not in ("", "never"):
            raise TableError(f"{MAP}: column torch of {', '.join(parts[index])} is {row[2]!r}; write never or leave it empty")
        rows.append(Row(parts[index], frozenset(may), row[2] == "never"))
    return tuple(rows)


class Tree:
    """Every module of both packages and what each imports."""

    def __init__(self, root: Path) -> None:
        self.files: dict[str, Path] = {}
        for package, source in SOURCES.items():
            for path in sorted((root / source / package).rglob("*.py")):
                names = list(path.relative_to(root / source).with_suffix("").parts)
                self.files[".".join(names[:-1] if names[-1] == "__init__" else names)] = path

    def _found(self, module: str) -> Iterator[tuple[str, int]]:
        path = self.files[module]
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")
                    base = ".".join([*above[: len(above) - node.level + 1], *([base] if base else [])])
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    yield (inner if inner in self.files else base), node.lineno
            elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                name = node.args[0].value
                if called in ("import_module", "__import__") and isinstance(name, str):
                    yield (package + name if name.startswith(".") else name), node.lineno

    @cached_property
    def imports(self) -> dict[str, tuple[Import, ...]]:
        """Imports by importing module; importing a.b.c also runs a and a.b, so those count as imported by it too."""
        found: dict[str, tuple[Import, ...]] = {}
        for module in self.files:
            found[module] = tuple(Import(module, target, line) for target, line in self._found(module))
        return found

    def closure(self, module: str) -> Iterator[tuple[Import, ...]]:
        """Yield, for every import that happens when `module` is imported, the chain of imports that leads to it."""
        seen: set[str] = set()
        todo: list[tuple[str, tuple[Import, ...]]] = [(module, ())]
        while todo:
            here, chain = todo.pop(0)
            packages = [here]
            while "." in packages[-1]:
                packages.append(packages[-1].rpartition(".")[0])
            for name in packages:
                if name in seen or name not in self.files:
                    continue
                seen.add(name)
                for found in self.imports[name]:
                    yield (*chain, found)
                    todo.append((found.target, (*chain, found)))


def part_of(module: str, rows: tuple[Row, ...]) -> tuple[str, Row] | None:
    """Return the part with the longest name that covers `module`, and its row; the package revolta_serve itself is on the floor."""
    if module == "revolta_serve":
        return rows[-1].parts[0], rows[-1]
    name = module.removeprefix("revolta_serve.")
    covering = [(part, row) for row in rows for part in row.parts if name == part or name.startswith(part + ".")]
    return max(covering, key=lambda found: len(found[0]), default=None)


def violations(tree: Tree, rows: tuple[Row, ...], root: Path) -> Iterator[str]:
    """Yield one line per broken rule."""

    def place(found: Import) -> str:
        return f"{tree.files[found.importer].relative_to(root)}:{found.line}"

    for module, imports in tree.imports.items():
        here = part_of(module, rows)
        if here is None:
            yield f"{tree.files[module].relative_to(root)}: {module} is in no row of {MAP}; add it to one"
            continue
        part, row = here
        for found in imports:
            top = found.target.partition(".")[0]
            if top in BANNED:
                yield f"{place(found)}: imports {found.target}: {BANNED[top]}"
            if top not in SOURCES:
                continue
            there = part_of(found.target, rows)
            if there is None:
                yield f"{place(found)}: imports {found.target}, which is in no row of {MAP}"
            elif there[0] not in row.may and there[0] not in row.parts:
                allowed = ", ".join(sorted(row.may)) or "nothing"
                yield f"{place(found)}: {part} imports {there[0]} ({found.target}); {MAP} lets it import {allowed}"
        if row.torch_free:
            for chain in tree.closure(module):
                if chain[-1].target.partition(".")[0] == "torch":
                    path = " -> ".join([module, *(step.target for step in chain)])
                    yield f"{place(chain[-1])}: {part} must never load torch: {path}"


def unused(tree: Tree, rows: tuple[Row, ...]) -> list[str]:
    """Return the parts of the table that no module belongs to: not an error while the tree grows, but worth seeing."""
    present = {found[0] for module in tree.files if (found := part_of(module, rows))}
    return [part for row in rows for part in row.parts if part not in present]


def main(argv: list[str] | None = None) -> int:
    """Check the repository at --root; return the exit status."""
    parser = argparse.ArgumentParser(description="Check the import arrows of docs/00-map.md.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args(argv).root.resolve()
    try:
        rows = read_table((root / MAP).read_text(encoding="utf-8"))
    except TableError as error:
        print(f"check_layers: {error}", file=sys.stderr)
        return 2
    tree = Tree(root)
    found = sorted(set(violations(tree, rows, root)))
    for line in found:
        print(line)
    count = sum(map(len, tree.imports.values()))
    print(f"check_layers: {len(tree.files)} modules, {count} imports, {len(rows)} rows: {len(found)} violations")
    if empty := unused(tree, rows):
        print(f"check_layers: no module yet: {', '.join(empty)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
