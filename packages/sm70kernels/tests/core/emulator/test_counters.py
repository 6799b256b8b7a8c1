"""Counters: exact instruction, sector, wavefront and byte counts of kernels small enough to count by hand."""

import numpy as np
import pytest

from sm70kernels.emulator import Counters, Site, emulate

from .harness import entry
from .sources import compile_cuda, line_of

# %l0 is the address of x plus %r2 bytes; %r0 is the thread of the block.
ADDRESS = "mov.u32 %r0, %tid.x; OFFSET ld.param.u64 %l0, [x]; cvta.to.global.u64 %l0, %l0; cvt.u64.u32 %l1, %r2; add.u64 %l0, %l0, %l1;"


def site(counters: Counters, opcode: str) -> Site:
    (found,) = [one for one in counters.sites if one.text.lstrip().startswith(opcode)]
    return found


GLOBAL = [
    ("consecutive words", "shl.b32 %r2, %r0, 2;", "ld.global.u32 %r3, [%l0];", 128, 4, 4),
    ("consecutive words, one word off", "mad.lo.u32 %r2, %r0, 4, 4;", "ld.global.u32 %r3, [%l0];", 128, 5, 4),
    ("every second word", "shl.b32 %r2, %r0, 3;", "ld.global.u32 %r3, [%l0];", 128, 8, 4),
    ("every eighth word", "shl.b32 %r2, %r0, 5;", "ld.global.u32 %r3, [%l0];", 128, 32, 4),
    ("words in reverse", "mad.lo.s32 %r2, %r0, -4, 124;", "ld.global.u32 %r3, [%l0];", 128, 4, 4),
    ("consecutive halves", "shl.b32 %r2, %r0, 1;", "ld.global.u16 %h0, [%l0];", 64, 2, 2),
    ("consecutive bytes", "mov.u32 %r2, %r0;", "ld.global.u8 %h0, [%l0];", 32, 1, 1),
    ("halves a row of 1024 bytes apart", "shl.b32 %r2, %r0, 10;", "ld.global.u16 %h0, [%l0];", 64, 32, 2),
    ("consecutive double words", "shl.b32 %r2, %r0, 3;", "ld.global.v2.u32 {%r3, %r4}, [%l0];", 256, 8, 8),
    ("consecutive vectors of sixteen bytes", "shl.b32 %r2, %r0, 4;", "ld.global.nc.v4.u32 {%r3, %r4, %r5, %r6}, [%l0];", 512, 16, 16),
    ("vectors of sixteen bytes, 32 apart", "shl.b32 %r2, %r0, 5;", "ld.global.v4.f32 {%f3, %f4, %f5, %f6}, [%l0];", 512, 32, 16),
    ("stored words", "shl.b32 %r2, %r0, 2;", "st.global.u32 [%l0], %r0;", 128, 4, 4),
    ("stored words, every fourth", "shl.b32 %r2, %r0, 4;", "st.global.u32 [%l0], %r0;", 128, 16, 4),
]


@pytest.mark.parametrize(("name", "offset", "access", "size", "sectors", "least"), GLOBAL, ids=[case[0] for case in GLOBAL])
def test_sectors_of_global_accesses(name: str, offset: str, access: str, size: int, sectors: int, least: int) -> None:
    counters = emulate(entry("u64 x", ADDRESS.replace("OFFSET", offset) + access), "probe", 1, 32, np.zeros(1 << 15, np.uint8))
    one = site(counters, access.split()[0])
    assert one.space == "global"
    assert (one.requests, one.bytes, one.sectors, one.minimum_sectors) == (1, size, sectors, least)
    assert counters.sector_bytes == 32 * sectors


def test_lanes_that_read_one_word_share_a_sector() -> None:
    counters = emulate(
        entry("u64 x", ADDRESS.replace("OFFSET", "and.b32 %r2, %r0, 4;") + "ld.global.u32 %r3, [%l0];"),
        "probe",
        1,
        32,
        np.zeros(8, np.uint8),
    )
    one = site(counters, "ld.global")
    assert (one.requests, one.sectors) == (1, 1)


def test_only_active_lanes_count() -> None:
    """Of 40 threads, those below 36 load: a full warp and four lanes of the second."""
    body = ADDRESS.replace("OFFSET", "shl.b32 %r2, %r0, 2; setp.lt.u32 %p0, %r0, 36;") + "@%p0 ld.global.u32 %r3, [%l0];"
    counters = emulate(entry("u64 x", body), "probe", 1, 40, np.zeros(40, np.uint32))
    (one,) = [one for one in counters.sites if one.space == "global"]
    assert (one.requests, one.bytes, one.sectors, one.minimum_sectors) == (2, 144, 5, 5)


SHARED = [
    ("consecutive words", "shl.b32 %r2, %r0, 2;", "u32 %r3", 1, 1),
    ("every second word", "shl.b32 %r2, %r0, 3;", "u32 %r3", 2, 1),
    ("every fourth word", "shl.b32 %r2, %r0, 4;", "u32 %r3", 4, 1),
    ("a column of 32 words", "shl.b32 %r2, %r0, 7;", "u32 %r3", 32, 1),
    ("a padded column of 33 words", "mul.lo.u32 %r2, %r0, 132;", "u32 %r3", 1, 1),
    ("one word for all lanes", "mov.u32 %r2, 64;", "u32 %r3", 1, 1),
    ("two words of one bank", "and.b32 %r2, %r0, 1; shl.b32 %r2, %r2, 7;", "u32 %r3", 2, 1),
    ("consecutive halves", "shl.b32 %r2, %r0, 1;", "u16 %h0", 1, 1),
    ("consecutive double words", "shl.b32 %r2, %r0, 3;", "v2.u32 {%r3, %r4}", 2, 2),
    ("double words, every second", "shl.b32 %r2, %r0, 4;", "v2.u32 {%r3, %r4}", 4, 2),
    ("consecutive quadruple words", "shl.b32 %r2, %r0, 4;", "v4.u32 {%r3, %r4, %r5, %r6}", 4, 4),
    ("quadruple words, every second", "shl.b32 %r2, %r0, 5;", "v4.u32 {%r3, %r4, %r5, %r6}", 8, 4),
    ("a column of quadruple words", "shl.b32 %r2, %r0, 7;", "v4.u32 {%r3, %r4, %r5, %r6}", 32, 4),
]


@pytest.mark.parametrize(("name", "offset", "access", "waves", "least"), SHARED, ids=[case[0] for case in SHARED])
def test_wavefronts_of_shared_accesses(name: str, offset: str, access: str, waves: int, least: int) -> None:
    """32 banks of four bytes; 64-bit accesses go by half warps, 128-bit ones by quarters."""
    kind, registers = access.split(" ", 1)
    body = f""".shared .align 16 .b8 tile[8192]; mov.u32 %r0, %tid.x; {offset} mov.u32 %r7, tile; add.u32 %r2, %r2, %r7; mov.u32 %r3, 0;
        mov.u32 %r4, 0; mov.u32 %r5, 0; mov.u32 %r6, 0;
        mov.u16 %h0, 0; FILL: st.shared.u32 [%r7], %r3; add.u32 %r7, %r7, 4; add.u32 %r4, %r4, 1; setp.lt.u32 %p0, %r4, 2048;
        @%p0 bra FILL; bar.sync 0; ld.shared.{kind} {registers}, [%r2];"""
    counters = emulate(entry("", body), "probe", 2, 32)
    one = site(counters, "ld.shared")
    assert one.space == "shared"
    assert (one.requests, one.wavefronts, one.minimum_wavefronts) == (2, 2 * waves, 2 * least)
    fill = site(counters, "st.shared")
    assert (fill.requests, fill.wavefronts) == (2 * 2048, 2 * 2048)


LOOP = """mov.u32 %r0, %tid.x; cvt.rn.f32.u32 %f0, %r0; mov.f32 %f1, 0f3F800000; mov.u32 %r1, 0;
L: fma.rn.f32 %f1, %f1, %f0, %f0; fma.rn.f32 %f1, %f1, %f0, %f0; mul.f32 %f2, %f1, %f0; add.f32 %f1, %f1, %f2; ex2.approx.f32 %f3, %f1;
        add.u32 %r1, %r1, 1; setp.lt.u32 %p0, %r1, 10; @%p0 bra L;
shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; mov.b32 %r3, 0x3c003c00; fma.rn.f16x2 %r3, %r3, %r3, %r3; add.f16 %h0, %h0, %h0;
        cvt.f64.f32 %fd0, %f1; add.f64 %fd0, %fd0, %fd0; bar.sync 0;
lop3.b32 %r4, %r1, %r2, %r3, 0x96; ld.param.u64 %l0, [y]; cvta.to.global.u64 %l0, %l0; mov.u32 %r5, %ctaid.x; mad.lo.u32 %r0, %r5, 96, %r0;
mul.wide.u32 %l1, %r0, 4; add.u64 %l0, %l0, %l1; st.global.u32 [%l0], %r4; atom.global.add.u32 %r5, [%l0], 1;"""
COUNTED = {
    "ffma": 20,
    "fmul": 10,
    "fadd": 10,
    "mufu": 10,
    "shuffle": 1,
    "half": 2,
    "fp64": 1,
    "cvt": 2,
    "sync": 1,
    "ld.param": 1,
    "st.global": 1,
    "atom.global": 1,
}
TOTAL = 4 + 8 * 10 + 7 + 9 + 1  # start, loop, up to the barrier, the rest, ret


def test_classes_of_a_loop() -> None:
    """Three warps of full lanes in each of two blocks: every count is six times that of one warp."""
    counters = emulate(entry("u64 y", LOOP), "probe", 2, 96, np.zeros(192, np.uint32))
    assert {name: counters.classes[name] for name in COUNTED} == {name: 6 * count for name, count in COUNTED.items()}
    assert counters.classes["control"] == 6 * 11
    assert counters.warp_instructions == 6 * TOTAL
    assert sum(counters.classes.values()) == 6 * TOTAL
    assert counters.thread_instructions == 32 * 6 * TOTAL
    assert counters.threads == 192
    assert counters.ffma == 6 * 20
    assert counters.mma == counters.classes.get("mma", 0) == 0


def test_instructions_of_diverged_lanes() -> None:
    """Ten lanes take a branch of five instructions and a jump, the other 22 one of two: a warp issues both, a thread counts its own."""
    body = """mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 10; @%p0 bra LOW; add.u32 %r1, %r0, 1; add.u32 %r1, %r1, 1; bra JOIN;
        LOW: add.u32 %r1, %r0, 1; add.u32 %r1, %r1, 1; add.u32 %r1, %r1, 1; add.u32 %r1, %r1, 1; add.u32 %r1, %r1, 1; JOIN:
        add.u32 %r2, %r1, %r1;"""
    counters = emulate(entry("", body), "probe", 1, 32)
    assert counters.warp_instructions == 3 + 3 + 5 + 2
    assert counters.thread_instructions == 32 * 3 + 22 * 3 + 10 * 5 + 32 * 2


def test_unique_bytes_are_counted_once_however_often_they_are_touched() -> None:
    """Every block reads the same 64 floats twice and one word of its own, and writes a byte to each word of a row of its own."""
    source = """extern "C" __global__ void probe(const float* x, const int* own, unsigned char* y) {
        int t = threadIdx.x;
        float v = x[t] + ((volatile const float*)x)[t ^ 1];
        y[(blockIdx.x * 64 + t) * 4] = v + own[blockIdx.x];
    }"""
    grid = 40
    counters = emulate(
        compile_cuda(source), "probe", grid, 64, np.zeros(100, np.float32), np.zeros(grid, np.int32), np.zeros(grid * 256, np.uint8)
    )
    assert counters.global_bytes_read == 64 * 4 + grid * 4
    assert counters.global_bytes_written == grid * 64


def test_a_byte_of_two_overlapping_arguments_is_one_byte() -> None:
    body = (
        ADDRESS.replace("OFFSET", "shl.b32 %r2, %r0, 2;")
        + "ld.global.u32 %r3, [%l0]; ld.param.u64 %l2, [y]; add.u64 %l2, %l2, %l1; ld.global.u32 %r4, [%l2];"
    )
    storage = np.zeros(48, np.uint32)
    counters = emulate(entry("u64 x, u64 y", body), "probe", 1, 32, storage[:32], storage[16:])
    assert counters.global_bytes_read == 48 * 4
    assert counters.global_bytes_written == 0


def test_matrix_instructions_are_counted() -> None:
    fragment = "{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}"
    step = f"mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {fragment}, {{%r0, %r1}}, {{%r2, %r3}}, {fragment};"
    zero = " ".join(f"mov.f32 %f{i}, 0f00000000; mov.u32 %r{i}, 0;" for i in range(8))
    counters = emulate(entry("", zero + step * 3), "probe", 5, 64)
    assert counters.mma == counters.classes["mma"] == 3 * 5 * 2


def test_counters_add_up_over_launches() -> None:
    y = np.zeros(192, np.uint32)
    one = emulate(entry("u64 y", LOOP), "probe", 2, 96, y)
    two = emulate(entry("u64 y", LOOP), "probe", 1, 96, y)
    both = one + two
    assert both.warp_instructions == 9 * TOTAL
    assert both.thread_instructions == one.thread_instructions + two.thread_instructions
    assert both.threads == 288
    assert {name: both.classes[name] for name in COUNTED} == {name: 9 * count for name, count in COUNTED.items()}
    assert both.sector_bytes == one.sector_bytes + two.sector_bytes
    assert site(both, "st.global").requests == site(one, "st.global").requests + site(two, "st.global").requests
    assert (one.warp_instructions, two.warp_instructions) == (6 * TOTAL, 3 * TOTAL)


def test_sites_carry_source_lines_and_the_table_shows_them() -> None:
    source = """extern "C" __global__ void probe(const float* x, float* y) {
        int t = threadIdx.x;
        float v = x[2 * t]; // here
        y[t] = v * v;
    }"""
    ptx = compile_cuda(source)
    counters = emulate(ptx, "probe", 1, 32, np.zeros(64, np.float32), np.zeros(32, np.float32))
    load = site(counters, "ld.global")
    assert load.line == line_of(source)
    assert load.text.rstrip(";").split() == ptx.split("\n")[load.ptx_line - 1].rstrip(";").split()
    assert (load.sectors, load.minimum_sectors) == (8, 4)
    assert counters.kernel == "probe"
    table = counters.table()
    for part in ("probe", "ld.global", "st.global", line_of(source), "fmul"):
        assert part in table
