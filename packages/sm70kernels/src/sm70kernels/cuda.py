"""Kernels from ops/<op>.cu to a launch: specialise, compile or find the compiled image, load, launch.

    RMS_NORM = Kernel("rms_norm")                     # extern "C" __global__ void rms_norm(...) in ops/rms_norm.cu

    def launch(config, d, x, weight, eps, unit_offset, out):
        RMS_NORM(dict(E=d["E"]), d["M"], 256, x, weight, eps, unit_offset, out)

A kernel is specialised by its `defines`: sizes and configuration become -D macros, and every set of them is an image of its own. Images
are looked up by the hash of everything that goes into them: first among those shipped with the package (`python -m sm70kernels build`
writes them), then in the user's cache, and are compiled when neither has it. Both stores are folders of immutable files, written under
another name first and renamed, so processes never see half of one.

The same launch function serves three purposes. CUDA tensors are launched on torch's current stream. Inside :func:`emulated`, CPU
tensors run the same PTX in the emulator. Inside :func:`collected`, meta tensors record which images a call would need.
"""

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sm70kernels.nvrtc import VERSION, CompileError, Image, compile_source

if TYPE_CHECKING:
    from sm70kernels.driver import Function
    from sm70kernels.emulator import Counters

__all__ = ["CompileError", "Image", "Kernel", "Need", "collected", "compile_source", "emulated"]

_PACKAGE = Path(__file__).parent
SHIPPED = _PACKAGE / "built"
"""Images that came with the package."""

CACHE = Path.home() / ".cache" / "sm70kernels"
"""Images compiled on this machine."""

Shape = int | tuple[int, ...]


@dataclass(frozen=True)
class Need:
    """One image a call needs: the op whose .cu it is, the entry, the defines, and how it would be launched."""

    op: str
    entry: str
    defines: tuple[tuple[str, int | str], ...]
    grid: Shape
    block: Shape
    shared: int


@dataclass(eq=False)
class _Emulation:
    order: int | None
    check: bool
    counters: "list[Counters]"


_emulations: list[_Emulation] = []
_collections: list[list[Need]] = []


@contextmanager
def emulated(*, order: int | None = None, check: bool = True) -> "Iterator[list[Counters]]":
    """Run kernels that are launched with CPU tensors in the emulator; yields the list that receives each launch's counters.

    `order` seeds a random order of warps; check=False leaves faults and counters out. Raises sm70kernels.emulator.Fault from the launch.
    """
    emulation = _Emulation(order, check, [])
    _emulations.append(emulation)
    try:
        yield emulation.counters
    finally:
        _emulations.remove(emulation)


@contextmanager
def collected() -> Iterator[list[Need]]:
    """Record, in the list it yields, what launches with meta tensors need, in order and without running anything."""
    needs: list[Need] = []
    _collections.append(needs)
    try:
        yield needs
    finally:
        _collections[:] = [other for other in _collections if other is not needs]


class Kernel:
    """One `extern "C" __global__` function of ops/<op>.cu, under any set of defines.

    Calling it launches: `kernel(defines, grid, block, *arguments, shared=0)`. Arguments are those of the function in order: tensors, None
    (a null pointer), or Python numbers, which take the type of the parameter. A grid with a zero launches nothing. Raises CompileError
    when the image has to be compiled and cannot be, and driver.LaunchError when the device cannot run it.
    """

    def __init__(self, op: str, entry: str | None = None) -> None:
        self.op = op
        self.entry = entry or op
        self._functions: dict[tuple[Any, ...], Function] = {}

    def __repr__(self) -> str:
        return f"Kernel({self.op}, {self.entry})"

    def image(self, defines: Mapping[str, int | str]) -> Image:
        """Return the compiled image for these defines: shipped, cached or compiled now."""
        return _image(self.op, tuple(sorted(defines.items())))

    def __call__(self, defines: Mapping[str, int | str], grid: Shape, block: Shape, *arguments: Any, shared: int = 0) -> None:
        first = next(argument for argument in arguments if type(argument) is Tensor)
        if first.is_cuda:
            if (grid if type(grid) is int else 0 not in grid):  # type: ignore[operator]
                self.function(defines, first.device.index).launch(grid, block, arguments, shared)
        elif first.is_meta:
            self._collect(defines, grid, block, shared)
        else:
            self._emulate(defines, grid, block, arguments, shared)

    def function(self, defines: Mapping[str, int | str], device: int) -> "Function":
        """Return the loaded function for these defines on a CUDA device, ready to be launched again and again."""
        key = (device, *defines.values())  # an op passes its defines in one order
        function = self._functions.get(key)
        if function is None:
            from sm70kernels.driver import load

            function = self._functions[key] = load(self.image(defines), self.entry, device)
        return function

    def _collect(self, defines: Mapping[str, int | str], grid: Shape, block: Shape, shared: int) -> None:
        if not _collections:
            raise RuntimeError(f"{self.op}: meta tensors hold no data; launch with them inside sm70kernels.cuda.collected() only")
        _collections[-1].append(Need(self.op, self.entry, tuple(sorted(defines.items())), grid, block, shared))

    def _emulate(self, defines: Mapping[str, int | str], grid: Shape, block: Shape, arguments: tuple[Any, ...], shared: int) -> None:
        if not _emulations:
            raise RuntimeError(f"{self.op}: the tensors are on the CPU; launch with them inside sm70kernels.cuda.emulated() only")
        from sm70kernels.emulator import emulate

        if 0 in ((grid,) if isinstance(grid, int) else grid):
            return
        emulation = _emulations[-1]
        counters = emulate(
            self.image(defines).ptx, self.entry, grid, block, *arguments, shared=shared, check=emulation.check, order=emulation.order
        )
        emulation.counters.append(counters)


@cache
def _headers() -> dict[str, str]:
    """The shared headers of kernels, by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted((_PACKAGE / "include").glob("*.cuh"))}


@cache
def _source(op: str) -> str:
    return (_PACKAGE / "ops" / f"{op}.cu").read_text(encoding="utf-8")


def file_name(op: str, defines: tuple[tuple[str, int | str], ...]) -> str:
    """Return the name an image is stored under: the op and the hash of source, headers, defines and compiler."""
    digest = hashlib.blake2b(digest_size=12)
    for part in (_source(op), *(text for item in _headers().items() for text in item), repr(defines), repr(VERSION), _compiler()):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return f"{op}.{digest.hexdigest()}.zip"


@cache
def _compiler() -> str:
    """What besides NVRTC's release decides an image: how it is called, and CUDA's headers, which are pinned with it."""
    return hashlib.blake2b((_PACKAGE / "nvrtc.py").read_bytes(), digest_size=12).hexdigest()


@cache
def _image(op: str, defines: tuple[tuple[str, int | str], ...]) -> Image:
    name = file_name(op, defines)
    for folder in (SHIPPED, CACHE):
        image = read(folder / name)
        if image is not None:
            return image
    image = compile_source(_source(op), dict(defines), name=f"{op}.cu", headers=_headers())
    if image.warnings:
        raise CompileError(f"{op}.cu with {dict(defines)}: the compiler warns, and kernels compile without warnings:\n{image.warnings}")
    write(CACHE / name, image)
    return image


def read(path: Path) -> Image | None:
    """Return the stored image, or None when there is none or the file is not a whole one."""
    try:
        with zipfile.ZipFile(path) as stored:
            return Image(stored.read("ptx").decode(), stored.read("cubin"), stored.read("report").decode(), "")
    except (FileNotFoundError, NotADirectoryError, zipfile.BadZipFile, KeyError):
        return None


def write(path: Path, image: Image) -> None:
    """Store an image at path, whole or not at all, whoever else writes it at the same time; a folder nobody may write is let be."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as stored:
        for member, data in (("ptx", image.ptx.encode()), ("cubin", image.cubin), ("report", image.report.encode())):
            stored.writestr(zipfile.ZipInfo(member), data, zipfile.ZIP_DEFLATED)  # a fixed date: equal images are equal files
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
            part.write(whole.getvalue())
        Path(part.name).replace(path)
    except PermissionError:
        return
