"""Images are found by what goes into them, stored whole, and launched only where the tensors are."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sm70kernels import cuda, rms_norm
from sm70kernels.cuda import CompileError, Image, Kernel, collected, compile_source, emulated

DEFINES = (("E", 64), ("THREADS", 32))


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Empty stores, and nothing remembered."""
    shipped, cache = tmp_path / "built", tmp_path / "cache"
    monkeypatch.setattr(cuda, "SHIPPED", shipped)
    monkeypatch.setattr(cuda, "CACHE", cache)
    cuda._image.cache_clear()
    return shipped, cache


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sources that were really compiled."""
    names: list[str] = []

    def compile_and_tell(source: str, defines: dict[str, int | str], *, name: str, headers: dict[str, str]) -> Image:
        names.append(name)
        return compile_source(source, defines, name=name, headers=headers)

    monkeypatch.setattr(cuda, "compile_source", compile_and_tell)
    return names


def image() -> Image:
    cuda._image.cache_clear()
    return Kernel("rms_norm").image(dict(DEFINES))


def test_an_image_is_compiled_once_and_then_found(stores: tuple[Path, Path], compiled: list[str]) -> None:
    _, cache = stores
    first = image()
    assert [path.name for path in cache.iterdir()] == [cuda.file_name("rms_norm", DEFINES)]
    assert image() == first
    assert compiled == ["rms_norm.cu"]


def test_a_shipped_image_comes_first(stores: tuple[Path, Path], compiled: list[str]) -> None:
    shipped, cache = stores
    cuda.write(shipped / cuda.file_name("rms_norm", DEFINES), Image("ptx", b"cubin", "report", ""))
    assert image().ptx == "ptx"
    assert compiled == []
    assert not cache.exists()


@pytest.mark.parametrize("keep", [0, 10, 300], ids=str)
def test_half_a_file_is_no_image(stores: tuple[Path, Path], compiled: list[str], keep: int) -> None:
    _, cache = stores
    whole = image()
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:keep])
    assert image() == whole
    assert len(compiled) == 2
    assert cuda.read(path) == whole


def test_the_name_follows_everything_that_goes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {cuda.file_name(op, defines) for op, defines in (("rms_norm", DEFINES), ("rms_norm", DEFINES[:1]), ("hyper_norm", DEFINES))}
    headers = cuda._headers()
    monkeypatch.setattr(cuda, "_headers", lambda: headers | {"reduce.cuh": headers["reduce.cuh"] + "\n"})
    names.add(cuda.file_name("rms_norm", DEFINES))
    monkeypatch.undo()
    source = cuda._source("rms_norm")
    monkeypatch.setattr(cuda, "_source", lambda op: source + "\n")
    names.add(cuda.file_name("rms_norm", DEFINES))
    monkeypatch.undo()
    monkeypatch.setattr(cuda, "_compiler", lambda: "another")
    names.add(cuda.file_name("rms_norm", DEFINES))
    assert len(names) == 6


def test_processes_that_compile_the_same_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom sm70kernels import cuda\n"
        "cuda.SHIPPED, cuda.CACHE = pathlib.Path('/nonexistent'), pathlib.Path(sys.argv[1])\n"
        "for _ in range(5):\n    cuda._image.cache_clear()\n    [path.unlink(missing_ok=True) for path in cuda.CACHE.glob('*.zip')]\n"
        "    print(len(cuda.Kernel('rms_norm').image(dict(E=64, THREADS=32)).ptx))"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lengths = {line for process in started for line in process.communicate()[0].split()}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(lengths) == 1
    (left,) = tmp_path.iterdir()
    assert cuda.read(left) is not None


def test_a_warning_of_the_compiler_is_an_error(stores: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source = cuda._source("rms_norm")
    monkeypatch.setattr(cuda, "_source", lambda op: source + "\n__global__ void idle() { int unused; }\n")
    with pytest.raises(CompileError, match=r"(?s)rms_norm\.cu with \{'E': 64, 'THREADS': 32\}: the compiler warns.*unused"):
        image()


def test_cpu_tensors_run_in_the_emulator_only_when_asked() -> None:
    x, out = torch.ones(1, 64).half(), torch.empty(1, 64).half()
    arguments = (None, dict(M=1, E=64), x, x[0], 1e-6, False, out)
    launch = rms_norm.launch
    assert launch is not None
    with pytest.raises(RuntimeError, match=r"rms_norm: the tensors are on the CPU; launch with them inside sm70kernels\.cuda\.emulated"):
        launch(*arguments)
    with emulated() as counters:
        launch(*arguments)
    assert len(counters) == 1
    assert torch.equal(out, x)


def test_meta_tensors_tell_what_a_call_needs() -> None:
    x = torch.empty(3, 64, dtype=torch.float16, device="meta")
    arguments = (None, dict(M=3, E=64), x, x[0], 1e-6, False, x)
    launch = rms_norm.launch
    assert launch is not None
    with pytest.raises(RuntimeError, match=r"rms_norm: meta tensors hold no data"):
        launch(*arguments)
    with collected() as needs:
        launch(*arguments)
    assert [(need.op, need.entry, dict(need.defines)["E"], need.grid) for need in needs] == [("rms_norm", "rms_norm", 64, 3)]


def test_no_rows_launch_nothing() -> None:
    result, counters = rms_norm.emulate(x=torch.ones(0, 64).half(), weight=torch.ones(64).half(), eps=1e-6, unit_offset=False)
    assert result.shape == (0, 64)
    assert counters == []


def test_emulations_nest() -> None:
    x = torch.ones(1, 64).half()
    arguments = (None, dict(M=1, E=64), x, x[0], 1e-6, False, torch.empty(1, 64).half())
    launch = rms_norm.launch
    assert launch is not None
    with emulated() as outer, emulated() as inner:
        launch(*arguments)
    assert (len(outer), len(inner)) == (0, 1)
