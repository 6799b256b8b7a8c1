"""Which images ship: found by calling every op on meta tensors, built by several processes at once, enough to run without a compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sm70kernels
from sm70kernels import build, cuda, gated_rms_norm, kv_store, rms_norm
from sm70kernels.__main__ import main
from sm70kernels.bench import read_only
from sm70kernels.contract import ContractError
from sm70kernels.cuda import Kernel
from sm70kernels.op import EXACT, Dim, Exact, Op, Spec

PROJECT = Path(sm70kernels.__file__).parents[2]


def reference(x: Tensor, kind: str, weight: Tensor | None) -> Tensor:
    return x


def make(launch: Any, **changes: Any) -> Op[Tensor]:
    declaration: dict[str, Any] = dict(
        reference=reference,
        launch=launch,
        determinism=EXACT,
        tolerance=Exact(),
        args=dict(
            x="act[M,K]",
            kind="enum decode|prefill",
            weight="act[K] optional",
            out="act[M,K] out",
            out2="f16|f32[M] out when=weight",
        ),
        dims=dict(M=Dim(0, 1 << 20), K=Spec(64, kernel=(8, 16))),
        configs=(1, 2),
        shapes=[dict(M=5)],
    )
    return Op("rms_norm", **(declaration | changes))


def fake(config: int, d: Mapping[str, int], x: Tensor, kind: str, weight: Any, out: Any, out2: Any) -> None:
    if kind == "prefill" and weight is not None:
        raise ContractError("rms_norm: kind: prefill has no weight")
    Kernel("rms_norm")(dict(E=d["K"] * config, THREADS=32, KIND=kind, WEIGHT=int(weight is not None)), d["M"], 32, x)


def test_every_variant_of_a_call_in_every_configuration_says_which_images_it_needs() -> None:
    calls = list(build.calls(make(fake), [dict(M=5)]))
    assert {call.variant for call in calls} == {
        "kind=decode weight=given out2=f16", "kind=decode weight=given out2=f32", "kind=decode weight=None out2=f16",
        "kind=decode weight=None out2=f32", "kind=prefill weight=None out2=f16", "kind=prefill weight=None out2=f32",
    }  # fmt: skip
    assert {call.config for call in calls} == {1, 2}
    assert {dict(need.defines)["E"] for call in calls for need in call.needs} == {64, 128}
    assert {(dict(need.defines)["KIND"], dict(need.defines)["WEIGHT"]) for call in calls for need in call.needs} == {
        ("decode", 0), ("decode", 1), ("prefill", 0),
    }  # fmt: skip


def test_a_shape_nobody_can_call_is_an_error() -> None:
    def refuse(config: int, d: Any, x: Any, kind: Any, weight: Any, out: Any, out2: Any) -> None:
        raise ContractError("rms_norm: x: too many columns")

    with pytest.raises(ContractError, match=r"nothing can be called at shape \{'M': 5\}: rms_norm: x: too many columns"):
        list(build.calls(make(refuse), [dict(M=5)]))


def test_a_launch_that_fails_otherwise_is_not_passed_over() -> None:
    def broken(config: int, d: Any, x: Any, kind: Any, weight: Any, out: Any, out2: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(build.calls(make(broken), [dict(M=5)]))


def test_the_chosen_configuration_is_built_even_where_it_is_not_among_the_declared() -> None:
    op = make(fake, choose=lambda d: 4)
    assert {call.config for call in build.calls(op, op.shapes)} == {1, 2, 4}


def test_cache_storages_are_variants() -> None:
    found = {call.variant: call.needs[0].entry for call in build.calls(kv_store, kv_store.shapes[:1])}
    assert set(found) == {"kv=f16", "kv=u8", "kv=i8"}
    assert len(set(found.values())) == 3


def test_shipped_shapes_have_every_number_of_rows_of_a_step() -> None:
    rows = [shape["M"] for shape in build.real(make(fake, shapes=[dict(M=1), dict(M=40), dict(M=4096)]))]
    assert sorted(rows) == [*range(1, 65), 4096]


def test_small_shapes_have_every_small_size_and_number_of_rows() -> None:
    shapes = build.small(make(fake, dims=dict(M=Dim(0, 99, test=(0, 3)), K=Spec(64, kernel=(8, 16)))))
    assert sorted((shape["K"], shape["M"]) for shape in shapes) == [(k, m) for k in (8, 16) for m in range(4)]


@pytest.mark.parametrize("op", build.launching(), ids=lambda op: op.name)
def test_small_calls_of_every_op_need_images_of_their_own(op: Op[Any]) -> None:
    assert build.wanted([op], tests=True).keys() > {cuda.file_name(*image) for image in needed(op, op.shapes)}


def needed(op: Op[Any], shapes: Any) -> set[tuple[str, build.Defines]]:
    return {(need.op, need.defines) for call in build.calls(op, shapes) for need in call.needs}


def test_images_are_stored_once_and_stale_ones_removed(tmp_path: Path) -> None:
    first = build.build([rms_norm], tmp_path, jobs=1)
    (row,) = first
    names = {path.name for path in tmp_path.iterdir()}
    assert row.images == len(names) == len(build.wanted([rms_norm], False)) > 0
    assert row.size == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert not row.errors
    (tmp_path / "rms_norm.000000000000000000000000.zip").write_bytes(b"old")
    (tmp_path / "other.000000000000000000000000.zip").write_bytes(b"of another op")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name in names}
    (again,) = build.build([rms_norm], tmp_path, jobs=1)
    assert again.seconds == 0.0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name in names} == before
    assert {path.name for path in tmp_path.iterdir()} == names | {"other.000000000000000000000000.zip"}
    build.build([rms_norm], tmp_path, jobs=1, every=True)
    assert {path.name for path in tmp_path.iterdir()} == names | {read_only.file_name()}


def test_half_a_file_is_written_again_and_remains_of_old_writes_go(tmp_path: Path) -> None:
    build.build([rms_norm], tmp_path, jobs=1)
    path = sorted(tmp_path.iterdir())[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    old, new = tmp_path / "a.part", tmp_path / "b.part"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (1, 1))
    build.build([rms_norm], tmp_path, jobs=1)
    assert path.read_bytes() == whole
    assert not old.exists()
    assert new.exists()


def test_a_source_that_does_not_compile_is_an_error_of_its_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def launch(config: int, d: Any, x: Any, kind: Any, weight: Any, out: Any, out2: Any) -> None:
        Kernel("rms_norm")(dict(E="nonsense", THREADS=32), 1, 32, x)

    (row,) = build.build([make(launch)], tmp_path, jobs=1)
    assert row.images == 0
    assert "rms_norm with E=nonsense THREADS=32" in row.errors[0]
    assert not list(tmp_path.glob("*.zip"))


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "write", lambda path, image: None)
    (row,) = build.build([rms_norm], tmp_path, jobs=1)
    assert "cannot be written" in row.errors[0]


def test_two_builds_at_once_fill_one_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sm70kernels", "build", "gated_rms_norm", "--out", str(tmp_path), "--jobs", "1"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    wanted = build.wanted([gated_rms_norm], False)
    assert {path.name for path in tmp_path.iterdir()} == wanted.keys()
    assert all(cuda.read(path) for path in tmp_path.iterdir())
    assert all(f"{len(wanted)}" in output for output in outputs)


def test_several_processes_compile_what_one_does(tmp_path: Path) -> None:
    build.build([rms_norm], tmp_path / "one", jobs=1)
    build.build([rms_norm], tmp_path / "two", jobs=2)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two


def test_build_of_an_op_without_a_kernel_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "linear_prefill"]) == 2
    assert "linear_prefill has no kernel" in capsys.readouterr().err


RUN = """
import sys
for name in ("cuda", "nvidia"):
    sys.modules[name] = None  # neither compiler nor driver
import torch
import sm70kernels
from sm70kernels import cuda, rms_norm
assert sm70kernels.__file__.startswith(sys.argv[1]), sm70kernels.__file__
x, weight = torch.randn(3, 2560).half(), torch.randn(2560).half()
got, counters = rms_norm.emulate(x=x, weight=weight, eps=1e-6, unit_offset=True)
assert torch.equal(got, rms_norm(x, weight, 1e-6, True)) or (got - rms_norm(x, weight, 1e-6, True)).abs().max() < 0.02
assert counters[0].threads > 0
assert not cuda.CACHE.exists(), "an image came from elsewhere"
"""


def test_an_installed_wheel_launches_without_a_compiler(tmp_path: Path) -> None:
    project, site, home = tmp_path / "project", tmp_path / "site", tmp_path / "home"
    ignored = shutil.ignore_patterns("tests", "__pycache__", "*.egg-info", "build", "built")
    shutil.copytree(PROJECT, project, ignore=ignored)
    home.mkdir()
    command = [sys.executable, "-m", "sm70kernels", "build", "rms_norm", "--jobs", "1"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(project / "src")}, check=True, capture_output=True)
    images = {path.name for path in (project / "src" / "sm70kernels" / "built").iterdir()}
    made = subprocess.run(
        [sys.executable, "-c", "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))", str(tmp_path)],
        cwd=project, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(tmp_path / made.stdout.splitlines()[-1]) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(site)
    assert images
    assert {f"sm70kernels/built/{name}" for name in images} <= names
    assert {"sm70kernels/bench/read_only.cu", "sm70kernels/ops/rms_norm.cu", "sm70kernels/include/reduce.cuh"} <= names
    assert not [name for name in names if "test_" in name]
    environment = {**os.environ, "PYTHONPATH": str(site), "HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", RUN, str(site)], env=environment, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_read_only_kernel_is_found_again_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SHIPPED", tmp_path / "built")
    monkeypatch.setattr(cuda, "CACHE", tmp_path / "cache")
    read_only.image.cache_clear()
    made = read_only.image()
    assert cuda.read(tmp_path / "cache" / read_only.file_name()) == made
    read_only.image.cache_clear()
    monkeypatch.setattr(read_only, "compile_source", lambda *a, **k: pytest.fail("compiled again"))
    assert read_only.image() == made
    read_only.image.cache_clear()


def test_tensors_of_meta_calls_hold_no_data() -> None:
    (variant, chosen, storage), *_ = build.variants(rms_norm)
    values = build._meta(rms_norm, rms_norm.sizes(dict(M=5, E=2560)), chosen, storage)
    assert [value.device for value in values if isinstance(value, Tensor)] == [torch.device("meta")] * 3
    assert variant == "unit_offset=False"
