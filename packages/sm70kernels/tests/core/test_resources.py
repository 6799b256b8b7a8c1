"""Resources of an image: the assembler's report, CUDA's occupancy rules for a V100, the instructions of the machine code."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm70kernels import resources
from sm70kernels.nvrtc import Image, compile_source
from sm70kernels.resources import Mix, NoDisassembler, Resources

SOURCE = """
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(128) streams(const uint4* a, const float2* b, __half* out, float* sum) {
    __shared__ float tile[128];
    const uint4 wide = __ldg(a + threadIdx.x);
    const float2 pair = __ldg(b + threadIdx.x);
    tile[threadIdx.x] = pair.x * pair.y;
    __syncthreads();
    float c[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
                 : "r"(wide.x), "r"(wide.y), "r"(wide.z), "r"(wide.w));
    sum[threadIdx.x] = fmaf(c[0], c[1], fmaf(c[2], c[3], fmaf(c[4], c[5], c[6] * c[7]))) + tile[127 - threadIdx.x];
    out[threadIdx.x] = __float2half_rn(pair.x);
}
extern "C" __global__ void indexed(const int* where, float* out) {
    float kept[32];
    for (int i = 0; i < 32; ++i) kept[i] = out[i];
    for (int i = 0; i < 32; ++i) kept[where[i] & 31] += 1.0f;
    for (int i = 0; i < 32; ++i) out[i] = kept[where[i + 32] & 31];
}
"""
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) many(const float* in, float* out) {
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = in[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i * 1024 + threadIdx.x] = v[i] * v[63 - i] + v[(i * 7) % 64];
}
"""


@pytest.fixture(scope="module")
def image() -> Image:
    return compile_source(SOURCE)


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [
        (32, 256, 0, 8),  # threads
        (64, 256, 0, 4),  # registers, exactly
        (65, 256, 0, 3),  # 72 a thread as they are given: 7 warps a sub-core
        (255, 256, 0, 1),
        (128, 512, 0, 1),
        (129, 512, 0, 0),  # the launch fails
        (33, 1024, 0, 1),
        (16, 32, 0, 32),  # blocks
        (16, 1024, 0, 2),
        (16, 64, 48 << 10, 2),  # shared memory
        (16, 64, (48 << 10) + 1, 1),
        (16, 64, 96 << 10, 1),
        (16, 64, (96 << 10) + 1, 0),
        (16, 64, 3073, 29),  # 3328 bytes as they are given
        (40, 33, 0, 24),  # two warps a block, 48 of them fit
    ],
)
def test_blocks_on_a_multiprocessor_follow_cudas_rules(registers: int, threads: int, shared: int, blocks: int) -> None:
    assert resources.blocks_per_multiprocessor(registers, threads, shared) == blocks
    assert Resources(registers, 0, 0, 0, shared - shared // 2, 0).blocks(threads, shared // 2) == blocks


def test_the_report_is_read_for_each_entry(image: Image) -> None:
    streams, indexed = (resources.read_report(image.report, entry) for entry in ("streams", "indexed"))
    assert (streams.shared, streams.barriers, streams.stack, streams.spill_stores, streams.spill_loads) == (512, 1, 0, 0, 0)
    assert 16 <= streams.registers <= 48
    assert indexed.stack == 128
    assert indexed.shared == 0


def test_spills_are_read() -> None:
    many = resources.read_report(compile_source(SPILLS).report, "many")
    assert many.registers <= 32
    assert many.spill_stores > 0
    assert many.spill_loads > 0


def test_a_report_without_the_entry_says_what_it_has(image: Image) -> None:
    with pytest.raises(ValueError, match=r"other: not in the assembler's report, which has (streams, indexed|indexed, streams)"):
        resources.read_report(image.report, "other")


def test_machine_instructions_are_counted_with_their_widths(image: Image) -> None:
    mix = resources.mix(image, "streams")
    assert mix.count("HMMA") == 4
    assert {kind: number for kind, number in mix.kinds.items() if kind.startswith(("LDG", "STG", "LDS", "STS"))} == {
        "LDG.128": 1, "LDG.64": 1, "STG.32": 1, "STG.16": 1, "STS.32": 1, "LDS.32": 1,
    }  # fmt: skip
    assert mix.wide_loads == 0.5
    assert mix.local == 0
    assert mix.count("BAR") == 1
    assert mix.total == sum(mix.kinds.values()) > 20
    assert "NOP" not in mix.kinds
    assert mix.summary().startswith("HMMA 4, ")


def test_local_memory_is_seen(image: Image) -> None:
    assert resources.mix(image, "indexed").local > 32
    assert resources.mix(compile_source(SPILLS), "many").local > 0


def test_a_kernel_without_loads_has_no_narrow_ones() -> None:
    assert Mix(3, {"EXIT": 1, "MOV": 2}).wide_loads == 1.0


def test_machine_code_without_the_entry_says_what_it_has(image: Image) -> None:
    with pytest.raises(ValueError, match="other: not in the machine code, which has"):
        resources.mix(image, "other")


@pytest.fixture
def _without_disassembler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(resources, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    resources.disassembler.cache_clear()
    yield
    resources.disassembler.cache_clear()


@pytest.mark.usefixtures("_without_disassembler")
def test_without_a_disassembler_the_error_says_how_to_get_one() -> None:
    with pytest.raises(NoDisassembler, match=r"ci/fetch_nvdisasm\.py gets it, elsewhere pip install --no-deps triton==3\.6\.0"):
        resources.disassemble(b"")


@pytest.mark.usefixtures("_without_disassembler")
def test_the_disassembler_beside_python_comes_first(tmp_path: Path) -> None:
    (tmp_path / "nvdisasm").write_text("#!/bin/sh\ncat $2\n")
    (tmp_path / "nvdisasm").chmod(0o755)
    assert resources.disassemble(b"what it was given") == "what it was given"


def test_what_the_disassembler_refuses_is_an_error() -> None:
    with pytest.raises(NoDisassembler, match=r"nvdisasm: .*the one of triton 3\.6\.0 reads sm_70"):
        resources.disassemble(b"not machine code")


def test_a_mix_is_read_once(image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "CACHE", tmp_path)
    first = resources.mixes(image)
    monkeypatch.setattr(resources, "disassemble", lambda cubin: pytest.fail("disassembled again"))
    assert resources.mixes(image) == first
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_threads_of_a_block() -> None:
    assert resources.threads(256) == 256
    assert resources.threads((32, 4)) == 128
