"""Races: what is reported, and the neighbouring programs that are not.

Lines marked `// here` are the accesses in conflict; which of them comes second, and is reported, depends on the order of the warps.
Shared memory starts written, so that no order of the warps turns a race into a read of unwritten memory.
"""

from typing import NamedTuple

import numpy as np
import pytest

from sm70kernels.emulator import Fault, emulate

from .sources import compile_cuda, lines_of


class Case(NamedTuple):
    """A body of `probe(int* x, int* y)` with `t`, `b` and `w` (thread, block, warp); MARK is replaced by one of two texts."""

    kind: str
    body: str
    bad: str
    good: str
    grid: int = 1
    block: int = 128


TILE = "__shared__ int tile[256]; tile[t] = tile[t + 128] = 0; __syncthreads();\n"
CASES = {
    "a missing block barrier": Case(
        "race between warps",
        TILE + "tile[t] = x[t]; // here\nMARK\ny[t] = tile[(t + 32) % 128]; // here",
        "__syncwarp();",
        "__syncthreads();",
    ),
    "a missing warp barrier": Case(
        "race between lanes",
        TILE + "tile[t] = x[t]; // here\nMARK\ny[t] = tile[t ^ 1]; // here",
        "",
        "__syncwarp();",
    ),
    "lanes that overwrite what others read": Case(
        "race between lanes",
        TILE + "tile[t] = x[t]; __syncwarp();\nint v = tile[t ^ 1]; // here\nMARK\ntile[t] = v; // here\ny[t] = tile[t];",
        "",
        "__syncwarp();",
    ),
    "a warp barrier that leaves out the lane read": Case(
        "race between lanes",
        TILE + "tile[t] = x[t]; // here\n__syncwarp(MARK);\ny[t] = tile[t ^ 16]; // here",
        "t & 16 ? 0xffff0000u : 0xffffu",
        "~0u",
    ),
    "a warp one step ahead in a double buffer": Case(
        "race between warps",
        TILE + """int v = t;
        for (int i = 0; i < 6; ++i) {
            tile[(i & 1) * 128 + t] = v; // here
            if (MARK) __syncthreads(); else __syncwarp();
            v += tile[(i & 1) * 128 + (i == 3 ? t : (t + 40) % 128)]; // here
        }
        y[t] = v;""",
        "i != 3",
        "true",
    ),
    "a buffer used again without a second barrier": Case(
        "race between warps",
        TILE
        + """tile[t] = x[t]; __syncthreads();
        int v = tile[127 - t]; // here
        MARK
        tile[t] = v + t; // here
        __syncthreads(); y[t] = tile[127 - t];""",
        "",
        "__syncthreads();",
    ),
    "a barrier of two other warps": Case(
        "race between warps",
        TILE
        + """if (w == 0) tile[t] = x[t]; // here
        if (w < 2) asm volatile("bar.sync 1, 64;" ::: "memory");
        if (w == MARK) y[t] = tile[t % 32]; // here""",
        "2",
        "1",
    ),
    "consumers that do not wait for the producers": Case(
        "race between warps",
        TILE + """if (w < 2) {
        tile[t] = x[t]; // here
        asm volatile("bar.arrive 2, 128;" ::: "memory"); } else { MARK
        y[t] = tile[t - 64]; // here
        }""",
        'y[t] = 0; if (t < 0) asm volatile("bar.sync 2, 128;" ::: "memory");',
        'asm volatile("bar.sync 2, 128;" ::: "memory");',
    ),
    "different values from the lanes of one store": Case(
        "race between lanes",
        TILE + "tile[w] = MARK; // here\n__syncthreads(); y[t] = tile[w];",
        "x[t]",
        "x[32 * w]",
    ),
    "an update that is not atomic": Case(
        "race between warps",
        TILE + "if (t == 0) tile[0] = 0;\n__syncthreads();\nif (t % 32 == 0) MARK // here\n__syncthreads(); y[t] = tile[0];",
        "*(volatile int*)tile += 1;",
        "atomicAdd(tile, 1);",
    ),
    "global memory inside a block": Case(
        "race between warps",
        "x[t] = t; // here\nMARK\ny[t] = x[(t + 64) % 128]; // here",
        "__syncwarp();",
        "__syncthreads();",
    ),
    "global memory inside a warp": Case("race between lanes", "x[t] = t; // here\nMARK\ny[t] = x[t ^ 3]; // here", "", "__syncwarp();"),
    "one output for all blocks": Case("race between blocks", "y[MARK] = b; // here", "t", "b * 128 + t", grid=2),
    "one output for two blocks far apart": Case(
        "race between blocks",
        "if (t == 0 && MARK) y[5] = b; // here",
        "b % 700 == 0",
        "b == 700",
        grid=701,
        block=32,
    ),
    "reading another block's output": Case(
        "race between blocks",
        "y[b * 128 + t] = b; // here\nx[b * 128 + t] = y[(MARK) * 128 + t]; // here",
        "b ^ 1",
        "b",
        grid=2,
    ),
    "an atomic and a plain store of two blocks": Case(
        "race between blocks", "if (t == 0) { if (b == 0) atomicAdd(y, 1); else MARK } // here", "*y = 3;", "atomicExch(y, 3);", grid=2
    ),
}  # fmt: skip


def source_of(body: str) -> str:
    return f"""extern "C" __global__ void probe(int* x, int* y) {{
        int t = threadIdx.x, b = blockIdx.x, w = t / 32;
        {body}
    }}"""


def run(source: str, grid: int = 1, block: int = 128, order: int | None = None, check: bool = True) -> list[int]:
    y = np.zeros(grid * block, np.int32)
    emulate(compile_cuda(source), "probe", grid, block, np.arange(grid * block, dtype=np.int32), y, order=order, check=check)
    return [int(v) for v in y]


@pytest.mark.parametrize("name", CASES)
def test_a_race_is_reported_where_it_is(name: str) -> None:
    case = CASES[name]
    source = source_of(case.body.replace("MARK", case.bad))
    with pytest.raises(Fault) as error:
        run(source, case.grid, case.block)
    fault = error.value
    assert fault.kind == case.kind
    assert fault.kernel == "probe"
    assert fault.line in lines_of(source)
    assert fault.kind in str(fault)
    assert fault.line in str(fault)
    assert fault.block is not None
    assert f"block ({fault.block[0]},0,0)" in str(fault)


@pytest.mark.parametrize("name", CASES)
def test_the_correct_twin_is_not_reported(name: str) -> None:
    case = CASES[name]
    source = source_of(case.body.replace("MARK", case.good))
    for order in (None, 1):
        run(source, case.grid, case.block, order)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("order", [1, 2])
def test_a_race_is_reported_in_any_order_of_the_warps(name: str, order: int) -> None:
    case = CASES[name]
    with pytest.raises(Fault, match="race between"):
        run(source_of(case.body.replace("MARK", case.bad)), case.grid, case.block, order)


def test_without_checks_a_race_is_not_looked_for() -> None:
    case = CASES["a missing warp barrier"]
    assert run(source_of(case.body.replace("MARK", case.bad)), check=False) == [t ^ 1 for t in range(128)]


ACCEPTED = {
    "warps that write neighbouring bytes of one word": """__shared__ unsigned char tile[128];
        tile[t % 32 * 4 + w] = t; __syncthreads(); y[t] = tile[(t + 1) % 128];""",
    "lanes that write neighbouring bytes in turn": """__shared__ unsigned char tile[128];
        for (int i = 0; i < 4; ++i) if (t % 4 == i) tile[t] = t;
        __syncthreads(); y[t] = tile[127 - t];""",
    "a shuffle between the store and the load of a warp": TILE
    + """tile[t] = t; int v; asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 31, -1;" : "=r"(v) : "r"(t) : "memory");
        y[t] = tile[t ^ 1] + v;""",
    "lanes that read their own stores": TILE + "for (int i = 0; i < 5; ++i) { tile[t] = t + i; y[t] = tile[t]; }",
    "atomics of all warps on one word": TILE
    + "if (t == 0) tile[0] = 0; __syncthreads(); atomicAdd(tile, t); atomicMax(tile, 3); __syncthreads(); y[t] = tile[0];",
    "many readers": TILE + "if (t < 32) tile[t] = t; __syncthreads(); y[t] = tile[t % 32] + tile[0] + tile[31 - t % 32];",
    "a warp that works alone between barriers": TILE
    + """tile[t] = t; __syncthreads();
        if (w == 1) for (int i = 0; i < 3; ++i) { int v = tile[(t + 1) % 32 + 32]; __syncwarp(); tile[t] = v; __syncwarp(); }
        __syncthreads(); y[t] = tile[(t + 32) % 128];""",
    "a flag set to one value by the lanes of a warp": TILE
    + "if (t < 2) tile[t] = 0; __syncthreads(); if (t < 32 && t % 3 == 0) tile[1] = 1; __syncthreads(); y[t] = tile[1];",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_ordered_programs_are_not_reported(name: str) -> None:
    for order in (None, 1, 2):
        run(source_of(ACCEPTED[name]), order=order)


LAST = """extern "C" __global__ void probe(const int* x, int* partial, unsigned* arrived, int* y) {
    __shared__ int tile[64];
    __shared__ bool last;
    int t = threadIdx.x, sum = 0;
    tile[t] = x[blockIdx.x * 64 + t];
    __syncthreads();
    if (t == 0) {
        for (int i = 0; i < 64; ++i) sum += tile[i];
        partial[blockIdx.x] = sum;
        FENCE
        last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last) {
        if (t == 0) {
            AGAIN
            for (int i = 0; i < gridDim.x; ++i) sum += i == blockIdx.x ? 0 : ((volatile int*)partial)[i]; // here
            *y = sum;
        }
    }
}"""


def sum_by_last_block(fence: str, grid: int, order: int | None = None) -> tuple[int, int]:
    x = np.arange(grid * 64, dtype=np.int32)
    y, arrived = np.zeros(1, np.int32), np.zeros(1, np.uint32)
    source = LAST.replace("FENCE", fence).replace("AGAIN", fence)
    emulate(compile_cuda(source), "probe", grid, 64, x, np.zeros(grid, np.int32), arrived, y, order=order)
    assert arrived[0] == 0
    return int(y[0]), int(x.sum())


@pytest.mark.parametrize("grid", [2, 9, 300])
def test_the_last_block_may_read_what_the_others_published_before_their_atomic(grid: int) -> None:
    for order in (None, 1):
        got, wanted = sum_by_last_block("__threadfence();", grid, order)
        assert got == wanted


def test_the_last_block_may_not_read_what_was_not_fenced() -> None:
    with pytest.raises(Fault) as error:
        sum_by_last_block("", 9)
    assert error.value.kind == "race between blocks"
