"""Builds the images that ship with the package: every kernel of every op, at the model's shapes and in every configuration.

    python -m sm70kernels build [OP ...] [--tests] [--out DIR] [--jobs 2]

What to compile is not listed anywhere: each op's launch is called with meta tensors, for all shapes of `op.shapes` with any number of
rows, all `op.configs` and all variants of a call (enums, optional arguments, storage of the cache), and says which images it would use.
`--tests` adds the small sizes tests draw, for machines without a compiler. Images that are there already are kept, those no op needs are
removed, and builds that run at the same time write the same files.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, field, is_dataclass
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sm70kernels
from sm70kernels import cuda
from sm70kernels.bench import arguments, read_only
from sm70kernels.contract import ContractError
from sm70kernels.cuda import CompileError, Image, Kernel, Need
from sm70kernels.dims import Derived, Dim, Spec, evaluate
from sm70kernels.op import Op
from sm70kernels.spec import DTYPE_NAMES, DTYPES, KV_CODES, Arg

Defines = tuple[tuple[str, int | str], ...]

STEP_ROWS = 64
"""Most rows of a decode step."""

_STALE_PART = 3600.0
"""Seconds after which the rest of an interrupted write belongs to nobody."""


@dataclass(frozen=True)
class Call:
    """One way to call an op: its configuration, dims and variant ("activation=silu weight=None"), and the launches it makes."""

    config: Any
    dims: Mapping[str, int]
    variant: str
    needs: tuple[Need, ...]


@dataclass
class Row:
    """What building one op took: images it needs, their bytes, seconds spent compiling, errors."""

    op: str
    images: int = 0
    size: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


def launching() -> list[Op[Any]]:
    """Return every op that has a kernel, by name."""
    ops = [getattr(sm70kernels, name) for name in sm70kernels.OPS]
    return [op for op in ops if op.launch is not None]


def describe(defines: Iterable[tuple[str, int | str]]) -> str:
    """Return defines as one word a define: "E=2560 THREADS=256"."""
    return " ".join(f"{name}={value}" for name, value in defines)


def brief(config: Any) -> str:
    """Return a configuration as one word: 8, 8x1."""
    values = astuple(config) if is_dataclass(config) and not isinstance(config, type) else config
    return "x".join(map(str, values)) if isinstance(values, tuple) else str(values)


def configurations(op: Op[Any], dims: Mapping[str, int]) -> tuple[Any, ...]:
    """Return every configuration a call with these dims may run in: all that are declared, and the chosen one."""
    chosen = op.config(dims)
    return op.configs if chosen in op.configs else (*op.configs, chosen)


def calls(op: Op[Any], shapes: Iterable[Mapping[str, int]], *, drawn: bool = False) -> Iterator[Call]:
    """Yield every variant of a call in every configuration at each of `shapes`.

    With `drawn`, arguments are made as for a real call, which small sizes can afford and arguments that depend on each other need.
    Raises ContractError for a shape with which no variant can be called, and whatever else the launch raises.
    """
    made: dict[Any, tuple[dict[str, Any], Mapping[str, int]]] = {}
    for shape in shapes:
        sizes = op.sizes(shape)
        specialised = tuple(sizes[name] for name, dim in op.dims.items() if isinstance(dim, Spec))
        refused: ContractError | None = None
        found = False
        for variant, chosen, storage in variants(op):
            values = _meta(op, sizes, chosen, storage)
            if drawn:  # once for each set of specialised sizes: packed banks take a while
                key = (specialised, variant)
                made[key] = made.get(key) or (_drawn(op, sizes, chosen, storage), sizes)
                values = _resized(op, *made[key], values)
            try:
                bound = op.contract.bind(values, kernel=True)
                for config in configurations(op, bound.dims):
                    yield Call(config, bound.dims, variant, launches(op, config, bound.dims, values))
                    found = True
            except ContractError as error:  # choices that go with other choices or sizes
                refused = error
        if not found:
            raise ContractError(f"{op.name}: nothing can be called at shape {dict(shape)}: {refused}")


def launches(op: Op[Any], config: Any, dims: Mapping[str, int], values: Sequence[Any]) -> tuple[Need, ...]:
    """Return the launches of one call with meta tensors."""
    assert op.launch is not None
    with cuda.collected() as needs:
        op.launch(config, dims, *values)
    return tuple(needs)


def variants(op: Op[Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield every combination of choices a call has: as words, by argument (True: an optional tensor is given), and the cache's storage.

    Choices are enums, bools, optional tensors given or not, the storage of the K/V cache, and the dtype where several are allowed.
    """
    options = {arg.name: choices for arg in op.args if len(choices := _choices(arg)) > 1}
    storages = ["f16", *(DTYPE_NAMES[dtype] for dtype in KV_CODES)] if any("kv" in arg.dtypes for arg in op.args) else ["f16"]
    for storage, *picks in product(storages, *options.values()):
        chosen = dict(zip(options, picks, strict=True))
        words = [f"{name}={_word(op, name, pick)}" for name, pick in chosen.items()]
        yield " ".join([*words, f"kv={storage}"] if len(storages) > 1 else words), chosen, storage


def _word(op: Op[Any], name: str, pick: Any) -> str:
    given = pick is True and any(arg.name == name and "optional" in arg.flags for arg in op.args)
    return "given" if given else DTYPE_NAMES[pick] if isinstance(pick, torch.dtype) else str(pick)


def _choices(arg: Arg) -> tuple[Any, ...]:
    if arg.kind == "enum":
        return arg.choices
    if arg.kind == "bool":
        return (False, True)
    if "optional" in arg.flags and arg.is_tensor:
        return (True, None)
    if len(arg.dtypes) > 1:
        return tuple(dict.fromkeys(DTYPES.get(word, torch.float16) for word in arg.dtypes))
    return ()


def _meta(op: Op[Any], sizes: Mapping[str, int], chosen: Mapping[str, Any], storage: str) -> tuple[Any, ...]:
    """Return one value an argument, in declared order: meta tensors of the declared shape, and numbers that decide no image."""
    values: dict[str, Any] = {}
    for arg in op.args:
        pick = chosen.get(arg.name)
        if arg.is_tensor:
            wanted = arg.when == f"kv:{storage}" or values.get(str(arg.when)) is not None
            absent = (arg.when is not None and not wanted) or ("optional" in arg.flags and pick is None)
            word = storage if "kv" in arg.dtypes else arg.dtypes[0]
            dtype = pick if isinstance(pick, torch.dtype) else DTYPES.get(word, torch.float16)
            values[arg.name] = None if absent else torch.empty(op.contract.shape(arg, sizes), dtype=dtype, device="meta")
        elif arg.kind == "dim":
            values[arg.name] = sizes[arg.choices[0]]
        elif arg.name in chosen:
            values[arg.name] = pick
        else:
            values[arg.name] = arg.choices[0] if arg.kind == "enum" else 1
    return tuple(values.values())


def _drawn(op: Op[Any], sizes: Mapping[str, int], chosen: Mapping[str, Any], storage: str) -> dict[str, Any]:
    """Return the arguments of a real call by name, as meta tensors."""
    # An optional argument that is there (True) is made as ever.
    present = {arg.name for arg in op.args if "optional" in arg.flags and chosen.get(arg.name) is True}
    given = {name: pick for name, pick in chosen.items() if name not in present and not isinstance(pick, torch.dtype)}
    values = arguments.make(op, sizes, given, storage=storage)
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in values.items()}


def _resized(op: Op[Any], drawn: Mapping[str, Any], sizes: Mapping[str, int], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `values` with those of the arguments `drawn` at `sizes` whose shape no dim says: they depend on other arguments."""
    others = []
    for arg, value in zip(op.args, values, strict=True):
        item = drawn[arg.name]
        own = isinstance(item, Tensor) and (not isinstance(value, Tensor) or item.shape != op.contract.shape(arg, sizes))
        others.append(item if own else value)
    return tuple(others)


def real(op: Op[Any]) -> list[dict[str, int]]:
    """Return the model's shapes, with every number of rows up to the most of a decode step: tiles may depend on it."""
    shapes: list[dict[str, int]] = []
    for shape in op.shapes:
        few = shape.get("M", STEP_ROWS + 1) <= STEP_ROWS
        shapes += [{**shape, "M": rows} for rows in range(1, STEP_ROWS + 1)] if few else [dict(shape)]
    return _unique(shapes)


def small(op: Op[Any]) -> list[dict[str, int]]:
    """Return the shapes tests of the kernel may draw: all small specialised sizes, every number of rows M, the other runtime dims at
    either end of their range."""
    specialised = {name: dict.fromkeys(dim.kernel) for name, dim in op.dims.items() if isinstance(dim, Spec)}
    shapes = []
    for picked in product(*specialised.values()):
        for end in (0, 1):
            dims = dict(zip(specialised, picked, strict=True))
            for name in op.contract.order:
                dim = op.dims[name]
                if name not in dims:
                    dims[name] = evaluate(dim.expression if isinstance(dim, Derived) else _drawn_range(dim)[end], dims)
            shapes.append(dims)
            rows = op.dims.get("M")
            if isinstance(rows, Dim) and end == 1:
                lo, hi = (evaluate(bound, dims) for bound in rows.drawn)
                shapes += [{name: size for name, size in dims.items() if not isinstance(op.dims[name], Derived)} | {"M": m}
                           for m in range(lo, hi)]  # fmt: skip
    return _unique(shapes)


def _drawn_range(dim: Any) -> tuple[int | str, int | str]:
    drawn: tuple[int | str, int | str] = dim.drawn
    return drawn


def _unique(shapes: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    return [dict(items) for items in dict.fromkeys(tuple(sorted(shape.items())) for shape in shapes)]


def wanted(ops: Iterable[Op[Any]], tests: bool) -> dict[str, tuple[str, Defines]]:
    """Return the images the given ops need: op and defines by file name."""
    found: dict[str, tuple[str, Defines]] = {}
    for op in ops:
        for call in chain(calls(op, real(op)), calls(op, small(op), drawn=True) if tests else ()):
            for need in call.needs:
                found.setdefault(cuda.file_name(need.op, need.defines), (need.op, need.defines))
    return found


def build(ops: Sequence[Op[Any]], out: Path, *, tests: bool = False, jobs: int = 2, every: bool = False) -> list[Row]:
    """Fill the folder `out` with the images of `ops`; returns a row for each op.

    Removes the images of these ops that they no longer need, and with `every`, which says that these are all ops, any other image too.
    Whatever an op's launch raises is raised; sources that do not compile are errors of their row.
    """
    files = wanted(ops, tests)
    if every:
        files[read_only.file_name()] = (read_only.NAME, ())
    rows = {name: Row(name) for name in sorted({op for op, _ in files.values()} | {op.name for op in ops})}
    missing = [(name, *files[name]) for name in sorted(files) if cuda.read(out / name) is None]
    for op, seconds, error in _compile_all(missing, out, jobs):
        rows[op].seconds += seconds
        rows[op].errors += [error] if error else []
    for path in [*out.glob("*.zip"), *out.glob("*.part")]:
        unused = path.suffix == ".zip" and path.name not in files and (every or path.name.partition(".")[0] in rows)
        if unused or (path.suffix == ".part" and time.time() - path.stat().st_mtime > _STALE_PART):
            path.unlink(missing_ok=True)
    for name, (op, _) in files.items():
        if (out / name).is_file():
            rows[op].images += 1
            rows[op].size += (out / name).stat().st_size
    return list(rows.values())


def prepare(images: Iterable[tuple[str, Defines]], jobs: int = 2) -> dict[tuple[str, Defines], str]:
    """Compile the images that were neither shipped nor compiled on this machine before; returns the errors of those that cannot be."""
    names = {cuda.file_name(op, defines): (op, defines) for op, defines in images}
    missing = [(name, *image) for name, image in names.items() if not any(cuda.read(at / name) for at in (cuda.SHIPPED, cuda.CACHE))]
    answers = _compile_all(missing, cuda.CACHE, jobs)
    return {(op, defines): error for (_, op, defines), (_, _, error) in zip(missing, answers, strict=True) if error}


def _compile_all(missing: Sequence[tuple[str, str, Defines]], out: Path, jobs: int) -> Iterator[tuple[str, float, str]]:
    """Compile and store images, in several processes when there is work for them; yields op, seconds and error of each."""
    if jobs < 2 or len(missing) < 2:
        yield from (_compile(*item, out) for item in missing)
        return
    # Fresh interpreters: torch's threads do not survive a fork.
    with ProcessPoolExecutor(min(jobs, len(missing)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(_compile, *zip(*missing, strict=True), [out] * len(missing), chunksize=4)


def _compile(name: str, op: str, defines: Defines, out: Path) -> tuple[str, float, str]:
    start = time.perf_counter()
    error = ""
    try:
        image = fetch(op, defines)
        cuda.write(out / name, image)
        if cuda.read(out / name) is None:
            error = f"{op}: {out / name} cannot be written; give a folder with --out that this user may write"
    except CompileError as failed:
        error = f"{op} with {describe(defines) or 'no defines'}: {failed}"
    return op, time.perf_counter() - start, error


def fetch(op: str, defines: Defines) -> Image:
    """Return an image: shipped, cached or compiled now. Raises CompileError."""
    return read_only.image() if op == read_only.NAME else Kernel(op).image(dict(defines))


def table(rows: Sequence[Row], seconds: float) -> str:
    """Return the rows as text, with their sum and the wall time."""
    lines = [f"{'op':24s} {'images':>6s} {'bytes':>10s} {'seconds':>8s}"]
    lines += [f"{row.op:24s} {row.images:6d} {row.size:10d} {row.seconds:8.1f}" for row in rows]
    total = (sum(row.images for row in rows), sum(row.size for row in rows))
    lines.append(f"{'sum':24s} {total[0]:6d} {total[1]:10d} {seconds:8.1f} wall")
    return "\n".join(lines)
