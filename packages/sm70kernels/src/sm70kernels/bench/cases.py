"""What is timed of an op: named sizes times row counts, declared in the repository's bench/ops/bench_<op>.py.

    CASES = Cases(linear_skinny, rows=(1, 5, 40, 64), sizes=dict(gdn_in=dict(N=4120, K=2560), ...))

Every module-level Cases, and every list of them, is one declaration.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from sm70kernels.op import Op

FOLDER = Path(__file__).resolve().parents[5] / "bench" / "ops"
"""Where the cases are, in a clone of the repository."""


class NoCases(RuntimeError):
    """An op has no benchmark here; the text says where it should be."""


@dataclass(frozen=True)
class Cases:
    """The cases of one op: every size of `sizes` (dims by name of the place in the model) with every number of `rows`.

    `rows_dim` names the dim that counts rows. `given` fixes arguments, by value or by a maker of sm70kernels.inputs; `storage` is that of
    the K/V cache, f16, u8 or i8. `follows` computes dims from the others, where the op does not. `bytes` replaces the op's own count of the
    bytes a call moves at least.
    """

    op: Op[Any]
    rows: Sequence[int]
    sizes: Mapping[str, Mapping[str, int]]
    rows_dim: str = "M"
    given: Mapping[str, Any] = field(default_factory=dict)
    storage: str = "f16"
    follows: Mapping[str, Callable[[Mapping[str, int]], int]] = field(default_factory=dict)
    bytes: Callable[[Mapping[str, int]], int] | None = None

    def each(self, rows: Sequence[int] = ()) -> "Iterator[Case]":
        """Yield every case, or those of every size at other numbers of rows."""
        for name, dims in self.sizes.items():
            for count in rows or self.rows:
                yield Case(self, name, {}).at({**dims, self.rows_dim: count})


@dataclass(frozen=True)
class Case:
    """One call that is timed."""

    of: Cases
    size: str
    dims: Mapping[str, int]

    def at(self, dims: Mapping[str, int]) -> "Case":
        """Return the same call with some dims changed, and with them those that follow."""
        changed = {**self.dims, **dims}
        return replace(self, dims={**changed, **{name: rule(changed) for name, rule in self.of.follows.items()}})

    @property
    def op(self) -> Op[Any]:
        return self.of.op

    @property
    def rows(self) -> int:
        return self.dims[self.of.rows_dim]

    @property
    def name(self) -> str:
        return f"{self.size}-{self.of.rows_dim}{self.rows}"

    @property
    def bytes(self) -> int:
        """Bytes the call moves at least."""
        sizes = self.op.sizes(self.dims)
        return int(self.of.bytes(sizes)) if self.of.bytes is not None else self.op.bytes(sizes)

    @property
    def flops(self) -> int:
        """Floating point operations of the call; 0 where the op does not count them."""
        return self.op.flops(self.op.sizes(self.dims)) if self.op.flops is not None else 0


def load(op: str, folder: Path = FOLDER) -> list[Cases]:
    """Return what bench_<op>.py of `folder` declares, in order. Raises NoCases when there is none of this op."""
    path = folder / f"bench_{op}.py"
    if not path.is_file():
        raise NoCases(f"{op}: there is no {path}; benchmarks are run from a clone of the repository, where every op with a kernel has one")
    listed = [each for item in vars(_module(path)).values() for each in (item if isinstance(item, list) else [item])]
    found = [each for each in listed if isinstance(each, Cases) and each.op.name == op]
    if not found:
        raise NoCases(f"{path}: declares no Cases of {op}; it should say CASES = Cases({op}, ...)")
    return found


def standing(op: Op[Any], folder: Path = FOLDER) -> list[Cases]:
    """Return the declared cases of an op in a clone of the repository, elsewhere cases made of the op's own shapes."""
    try:
        return load(op.name, folder)
    except NoCases:
        rest = [{name: size for name, size in shape.items() if name != "M"} for shape in op.shapes]
        sizes = {" ".join(f"{name}{size}" for name, size in dims.items()) or "model": dims for dims in rest}
        return [Cases(op, sorted({shape.get("M", 1) for shape in op.shapes}), sizes)]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
