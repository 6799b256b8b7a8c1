"""The compiler is the pinned one, says what is wrong, and gives the same text everywhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sm70kernels import nvrtc
from sm70kernels.nvrtc import CompileError, compile_source

SOURCE = """
#include <cuda_fp16.h>
#include "twice.cuh"
extern "C" __global__ void scale(const __half* x, float* y) { y[threadIdx.x] = twice(__half2float(x[threadIdx.x])) * FACTOR; }
"""
HEADERS = {"twice.cuh": "__device__ float twice(float x) { return 2.0f * x; }"}


def test_one_source_gives_ptx_with_lines_machine_code_and_a_report() -> None:
    image = compile_source(SOURCE, {"FACTOR": 3}, name="scale.cu", headers=HEADERS)
    assert ".target sm_70" in image.ptx
    assert re.search(r"^\s*\.loc\s+1 4", image.ptx, re.MULTILINE)
    assert image.cubin.startswith(b"\x7fELF")
    assert "Used" in image.report
    assert "0 bytes spill stores" in image.report
    assert image.warnings == ""
    assert image == compile_source(SOURCE, {"FACTOR": 3}, name="scale.cu", headers=HEADERS)


def test_names_in_the_ptx_have_no_folders() -> None:
    files = re.findall(r'\.file\s+\d+\s+"([^"]*)"', compile_source(SOURCE, {"FACTOR": 3}, name="scale.cu", headers=HEADERS).ptx)
    assert {"scale.cu", "twice.cuh"} <= set(files)
    assert not any("/" in name for name in files)


def test_an_error_holds_the_place_and_the_compilers_words() -> None:
    with pytest.raises(CompileError, match=r'(?s)bad\.cu.*bad\.cu\(1\): error: identifier "missing" is undefined'):
        compile_source('extern "C" __global__ void f() { missing(); }', name="bad.cu")


def test_a_warning_is_told_and_the_expected_one_is_not() -> None:
    image = compile_source('extern "C" __global__ void f() { int unused; }')
    assert 'variable "unused" was declared but never referenced' in image.warnings


def test_a_toolkit_on_the_path_is_not_picked_up(tmp_path: Path) -> None:
    """Beside a library of the same name that cannot be loaded, and programs that fail, the pinned one is used."""
    for name in ("libnvrtc.so.12", "libnvrtc.so", "libnvrtc-builtins.so.12.8", "nvcc", "ptxas"):
        (tmp_path / name).write_text("#!/bin/false\n")
        (tmp_path / name).chmod(0o755)
    places = dict.fromkeys(("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH"), str(tmp_path)) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    code = "from sm70kernels.nvrtc import compile_source; print(compile_source('extern \"C\" __global__ void f() {}').ptx)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | places, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "release 12.8" in done.stdout


def test_another_version_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "VERSION", (12, 6))
    nvrtc.library.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"compiled with NVRTC 12\.6; .* has 12\.8; pip install nvidia-cuda-nvrtc-cu12==12\.8\.93"):
            nvrtc.library()
    finally:
        monkeypatch.undo()
        nvrtc.library.cache_clear()


def test_a_missing_library_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_spec", lambda name: None)
    nvrtc.library.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"package nvidia\.cuda_nvrtc is not installed; pip install"):
            nvrtc.library()
    finally:
        nvrtc.library.cache_clear()
