"""What race checks must remember: every reader, every byte, every barrier since, in shared memory and across blocks far apart."""

import numpy as np
import pytest

from sm70kernels.emulator import Fault, emulate

from .sources import compile_cuda

CLEAR = "__shared__ __align__(16) int tile[256]; tile[t] = tile[t + 128] = 0; __syncthreads();"
PAIR = 'asm volatile("bar.sync 1, 64;" ::: "memory");'


def run(body: str, grid: int = 1, order: int | None = None) -> None:
    """`probe(int* x, int* y)` in blocks of four warps; x and y have 128 words a block."""
    source = f"""extern "C" __global__ void probe(int* x, int* y) {{
        int t = threadIdx.x, b = blockIdx.x, w = t / 32;
        {body}
    }}"""
    x, y = np.zeros(128 * grid, np.int32), np.zeros(128 * grid, np.int32)
    emulate(compile_cuda(source), "probe", grid, 128, x, y, order=order)


def kind_of(body: str, grid: int = 1, order: int | None = None) -> str:
    with pytest.raises(Fault) as error:
        run(body, grid, order)
    return error.value.kind


@pytest.mark.parametrize("writer", range(4))
def test_a_write_races_with_every_warp_that_has_read(writer: int) -> None:
    """All four warps read a word, then one of them overwrites it: the other three are readers it did not wait for."""
    body = f"{CLEAR} int v = tile[7]; if (t == {32 * writer}) tile[7] = v + 1; y[t] = v;"
    assert kind_of(body) == "race between warps"
    run(body.replace("int v = tile[7];", "int v = tile[7]; __syncthreads();"))


@pytest.mark.parametrize("writer", [0, 1, 17, 31])
def test_a_write_races_with_every_lane_that_has_read(writer: int) -> None:
    body = f"{CLEAR} if (w == 0) {{ int v = tile[7]; if (t == {writer}) tile[7] = v + 1; y[t] = v; }}"
    assert kind_of(body) == "race between lanes"
    run(body.replace("int v = tile[7];", "int v = tile[7]; __syncwarp();"))


@pytest.mark.parametrize("reader", [1, 2, 3])
def test_a_barrier_of_a_pair_forgives_only_the_pair(reader: int) -> None:
    """Warp 0 writes, warps 0 and 1 meet, then a warp reads."""
    body = f"{CLEAR} if (w == 0) tile[t] = t; if (w < 2) {PAIR} if (w == {reader}) y[t] = tile[t % 32];"
    if reader == 1:
        run(body)
    else:
        assert kind_of(body) == "race between warps"


def test_a_reader_outside_the_pair_is_remembered_across_the_barrier_of_the_pair() -> None:
    body = f"{CLEAR} int v = 0; if (w == WHO) v = *(volatile int*)(tile + 5); if (w < 2) {PAIR} if (t == 0) tile[5] = 1; y[t] = v;"
    assert kind_of(body.replace("WHO", "3")) == "race between warps"
    run(body.replace("WHO", "1"))


def test_an_old_reader_is_remembered_behind_a_newer_one_that_was_waited_for() -> None:
    """Warps 3 and 1 read, warps 1 and 0 meet, warp 0 writes: nothing orders warp 3's read before the write."""
    body = f"""{CLEAR} volatile int* cell = tile + 9; int v = 0;
        if (w > 0) asm volatile("bar.sync 2, 96;" ::: "memory");
        if (w == 3) v = *WHAT;
        if (w == 1) v = *cell;
        if (w < 2) {PAIR}
        if (t == 0) *cell = 1;
        y[t] = v;"""
    assert kind_of(body.replace("WHAT", "cell")) == "race between warps"
    run(body.replace("WHAT", "(cell + 1)"))


def test_an_old_lane_is_remembered_behind_a_newer_one_that_was_waited_for() -> None:
    """Lanes 5 and 1 read, lanes 1 and 0 meet, lane 0 writes."""
    body = f"""{CLEAR} volatile int* cell = tile + 9; int v = 0;
        if (t == 5) v = *WHAT;
        if (t == 1) v = *cell;
        if (t < 2) __syncwarp(3);
        if (t == 0) *cell = 1;
        y[t] = v;"""
    assert kind_of(body.replace("WHAT", "cell")) == "race between lanes"
    run(body.replace("WHAT", "(cell + 1)"))


def test_a_warp_whose_lanes_all_read_races_as_a_warp() -> None:
    """The lanes of warp 3 are not in order with each other either, but the write that conflicts is another warp's."""
    body = f"{CLEAR} volatile int* cell = tile + 9; int v = 0; if (w == 3) v = *cell; MARK if (t == 0) *cell = 1; y[t] = v;"
    assert kind_of(body.replace("MARK", "")) == "race between warps"
    run(body.replace("MARK", "__syncthreads();"))


def test_barriers_in_a_chain_order_the_first_warp_before_the_last() -> None:
    """Warp 0 writes and meets warp 1, which meets warp 2, which reads."""
    chain = f'if (t == 0) *cell = 1; if (w < 2) {PAIR} if (w == 1 || w == 2) asm volatile("bar.sync 2, 64;" ::: "memory");'
    run(f"{CLEAR} volatile int* cell = tile + 9; int v = 0; {chain} if (w == 2) v = *cell; y[t] = v;")


@pytest.mark.parametrize("order", [None, 1, 2])
def test_bytes_of_one_word_are_told_apart(order: int | None) -> None:
    """Warps write interleaved bytes and read back their own; reading a neighbour's byte is a race."""
    body = f"{CLEAR} char* bytes = (char*)tile; bytes[t % 32 * 4 + w] = t; y[t] = ((volatile char*)bytes)[t % 32 * 4 + WHICH];"
    run(body.replace("WHICH", "w"), order=order)
    assert kind_of(body.replace("WHICH", "(w ^ 1)"), order=order) == "race between warps"


def test_a_vector_access_touches_all_its_bytes() -> None:
    body = f"{CLEAR} if (t == 0) *(int4*)(tile + 8) = make_int4(1, 2, 3, 4); if (t == 64) y[0] = ((volatile char*)tile)[4 * 8 + AT];"
    assert kind_of(body.replace("AT", "15")) == "race between warps"
    assert kind_of(body.replace("AT", "0")) == "race between warps"
    run(body.replace("AT", "16"))
    run(body.replace("AT", "-1"))


def test_a_generic_address_is_the_shared_word_it_points_to() -> None:
    body = f"{CLEAR} int* p = x[0] ? x : tile; p[t] = t; BARRIER y[t] = tile[(t + 32) % 128];"
    assert kind_of(body.replace("BARRIER", "")) == "race between warps"
    run(body.replace("BARRIER", "__syncthreads();"))


FAR = 900


@pytest.mark.parametrize(
    ("first", "second"), [("y[5] = 1;", "x[b * 128] = y[5];"), ("x[b * 128] = y[5];", "y[5] = 1;"), ("y[5] = 1;", "y[5] = 1;")]
)
def test_blocks_far_apart_in_the_grid_race(first: str, second: str) -> None:
    """The two blocks do not run side by side in the emulator; their accesses conflict all the same."""
    body = f"if (t == 0 && b == 0) {{ {first} }} if (t == 0 && b == {FAR}) {{ {second} }}"
    assert kind_of(body, FAR + 1) == "race between blocks"
    run(body.replace("y[5]", "y[b * 128 + 5]"), FAR + 1)


def test_blocks_that_write_interleaved_bytes_do_not_race() -> None:
    body = "((char*)y)[t * 4 + b % 4] = b; if (b == BAD) ((char*)y)[1] = 0;"
    run(body.replace("BAD", "9"), 4)
    assert kind_of(body.replace("BAD", "3"), 4) == "race between blocks"


def test_many_blocks_may_read_what_nobody_writes_and_write_what_nobody_else_reads() -> None:
    run("y[b * 128 + t] = x[t] + x[127 - t];", 300)


def test_a_fence_before_the_store_orders_nothing() -> None:
    """Publication wants store, fence, atomic; with fence, store, atomic the reader of the last block races."""
    body = """__shared__ bool last;
        if (t == 0) { FIRST x[b * 128] = b + 1; SECOND last = atomicAdd((unsigned*)y, 1u) == gridDim.x - 1; }
        __syncthreads();
        if (last && t == 0) {
            __threadfence(); int v = 0;
            for (int i = 0; i < gridDim.x; ++i) v += ((volatile int*)x)[i * 128];
            y[1] = v;
        }"""
    fence = "__threadfence();"
    run(body.replace("FIRST", "").replace("SECOND", fence), 12)
    assert kind_of(body.replace("FIRST", fence).replace("SECOND", ""), 12) == "race between blocks"


PARTIAL = {
    "a vector of which three words are written": (
        "if (t < 3) own[t] = t;",
        "if (t < 4) own[t] = t;",
        "int4 v = *(int4*)own; y[t] = v.x + v.y + v.z + v.w;",
    ),
    "a word of which two bytes are written": ("if (t == 0) *(short*)own = 1;", "if (t == 0) *own = 1;", "y[t] = *own;"),
    "a word that is only added to": ("", "if (t == 0) own[9] = 0;", "atomicAdd(own + 9, 1);"),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_shared_memory_counts_as_written_byte_by_byte(name: str) -> None:
    bad, good, read = PARTIAL[name]
    start = "__shared__ __align__(16) int own[32];"
    assert kind_of(f"{start} {bad} __syncthreads(); {read}") == "uninitialised shared memory"
    run(f"{start} {good} __syncthreads(); {read}")
