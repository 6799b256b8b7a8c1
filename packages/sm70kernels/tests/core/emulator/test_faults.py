"""Faults: each kind with a program that has it and its twin that has not, and the message that tells where."""

import numpy as np
import pytest

from sm70kernels.emulator import EmulatorError, Fault, emulate

from .harness import entry
from .sources import compile_cuda, line_of

Array = np.ndarray  # type: ignore[type-arg]
Index = tuple[int, int, int]


def floats(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def caught(source: str, grid: int, block: int, *arguments: object, **options: int) -> Fault:
    """The fault of kernel `probe`, after checking what every fault must say."""
    with pytest.raises(Fault) as error:
        emulate(compile_cuda(source), "probe", grid, block, *arguments, **options)
    fault = error.value
    assert isinstance(fault, EmulatorError)
    assert fault.kernel == "probe"
    assert fault.line == line_of(source)
    message = str(fault)
    assert "\n" not in message
    for part in ("probe", fault.kind, fault.line):
        assert part in message
    return fault


def at(fault: Fault, kind: str, block: int, thread: int) -> None:
    assert fault.ptx_line > 0
    assert (fault.kind, fault.block, fault.thread) == (kind, (block, 0, 0), (thread, 0, 0))
    assert f"block ({block},0,0)" in str(fault)
    assert f"thread ({thread},0,0)" in str(fault)


READ = """extern "C" __global__ void probe(const float* x, float* y, int shift) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = x[i + shift]; // here
    y[i] = v;
}"""


@pytest.mark.parametrize(("shift", "block", "thread"), [(1, 1, 63), (-1, 0, 0), (1000, 0, 0)])
def test_a_load_outside_its_array(shift: int, block: int, thread: int) -> None:
    fault = caught(READ, 2, 64, floats(128), floats(128), shift)
    at(fault, "out of bounds", block, thread)
    assert "ld.global" in str(fault)
    assert "4 bytes" in str(fault)
    emulate(compile_cuda(READ), "probe", 2, 64, floats(128 + abs(shift)), floats(128), max(shift, 0))


WRITE = """extern "C" __global__ void probe(float4* y, int n) {
    int i = threadIdx.x;
    if (i < n) y[i] = make_float4(0, 1, 2, 3); // here
}"""


def test_a_store_that_ends_one_float_outside_its_array() -> None:
    """Bounds are those of the elements: 39 floats do not hold ten vectors of four."""
    fault = caught(WRITE, 1, 32, floats(39), 10)
    at(fault, "out of bounds", 0, 9)
    assert "st.global.v4" in str(fault)
    assert "16 bytes" in str(fault)
    emulate(compile_cuda(WRITE), "probe", 1, 32, floats(40), 10)


def test_bounds_are_the_extent_of_a_strided_view_not_of_its_storage() -> None:
    storage = floats(256)
    emulate(compile_cuda(READ), "probe", 1, 64, storage[:127:2], floats(64), 63)
    at(caught(READ, 1, 64, storage[:127:2], floats(64), 64), "out of bounds", 0, 63)


def test_an_atomic_outside_its_array() -> None:
    source = """extern "C" __global__ void probe(unsigned* count, int n) {
        atomicAdd(count + threadIdx.x % n, 1u); // here
    }"""
    at(caught(source, 1, 64, np.zeros(5, np.uint32), 7), "out of bounds", 0, 5)
    emulate(compile_cuda(source), "probe", 1, 64, np.zeros(7, np.uint32), 7)


SHARED = """extern "C" __global__ void probe(float* y, int shift) {
    extern __shared__ float tile[];
    tile[threadIdx.x + shift] = 1; // here
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x + shift];
}"""


def test_shared_memory_beyond_what_the_launch_gave() -> None:
    at(caught(SHARED, 1, 64, floats(64), 1, shared=256), "out of bounds", 0, 63)
    emulate(compile_cuda(SHARED), "probe", 1, 64, floats(64), 0, shared=256)


def test_a_local_array_beyond_its_end() -> None:
    source = """extern "C" __global__ void probe(const int* at, int* y) {
        int own[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        own[at[threadIdx.x]] = 9; // here
        y[threadIdx.x] = own[at[threadIdx.x] & 7] + own[at[threadIdx.x + 1] & 7];
    }"""
    index = np.arange(33, dtype=np.int32) % 8
    emulate(compile_cuda(source), "probe", 1, 32, index, np.zeros(32, np.int32))
    index[20] = 1000
    at(caught(source, 1, 32, index, np.zeros(32, np.int32)), "out of bounds", 0, 20)


MISALIGNED = """extern "C" __global__ void probe(const float* x, float4* y, int shift) {
    y[threadIdx.x] = *(const float4*)(x + 4 * threadIdx.x + shift); // here
}"""


@pytest.mark.parametrize("shift", [1, 2])
def test_a_vector_load_at_an_odd_address(shift: int) -> None:
    at(caught(MISALIGNED, 1, 32, floats(160), floats(128), shift), "misaligned", 0, 0)
    emulate(compile_cuda(MISALIGNED), "probe", 1, 32, floats(160), floats(128), 4)


def test_a_misaligned_access_in_shared_memory() -> None:
    source = """extern "C" __global__ void probe(int* y, int step) {
        __shared__ __align__(16) char tile[512];
        *(int*)(tile + step * threadIdx.x) = threadIdx.x; // here
        __syncthreads();
        y[threadIdx.x] = *(int*)(tile + step * threadIdx.x);
    }"""
    at(caught(source, 1, 32, np.zeros(32, np.int32), 6), "misaligned", 0, 1)
    emulate(compile_cuda(source), "probe", 1, 32, np.zeros(32, np.int32), 8)


UNWRITTEN = """extern "C" __global__ void probe(float* y, int n) {
    __shared__ float tile[64];
    if (threadIdx.x < n) tile[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = tile[63 - threadIdx.x]; // here
}"""


def test_reading_shared_memory_nobody_wrote() -> None:
    at(caught(UNWRITTEN, 1, 64, floats(64), 60), "uninitialised shared memory", 0, 0)
    emulate(compile_cuda(UNWRITTEN), "probe", 1, 64, floats(64), 64)


def test_shared_memory_of_an_earlier_block_does_not_count_as_written() -> None:
    source = """extern "C" __global__ void probe(float* y) {
        __shared__ float tile[32];
        if (blockIdx.x != 3) tile[threadIdx.x] = 1;
        __syncthreads();
        y[blockIdx.x * 32 + threadIdx.x] = tile[threadIdx.x]; // here
    }"""
    fault = caught(source, 5, 32, floats(160))
    assert (fault.kind, fault.block) == ("uninitialised shared memory", (3, 0, 0))


def test_reading_local_memory_nobody_wrote() -> None:
    source = """extern "C" __global__ void probe(const int* at, int* y, int n) {
        int own[16];
        for (int i = 0; i < n; ++i) own[at[i]] = i;
        y[threadIdx.x] = own[at[threadIdx.x]]; // here
    }"""
    index = np.arange(16, dtype=np.int32)[::-1].copy()
    at(caught(source, 1, 16, index, np.zeros(16, np.int32), 12), "uninitialised local memory", 0, 12)
    emulate(compile_cuda(source), "probe", 1, 16, index, np.zeros(16, np.int32), 16)


def test_a_null_pointer_that_is_followed() -> None:
    source = """extern "C" __global__ void probe(const float* bias, float* y, int use) {
        float v = 1;
        if (use) v = bias[threadIdx.x]; // here
        y[threadIdx.x] = v;
    }"""
    at(caught(source, 1, 32, None, floats(32), 1), "null pointer", 0, 0)
    emulate(compile_cuda(source), "probe", 1, 32, None, floats(32), 0)
    emulate(compile_cuda(source), "probe", 1, 32, floats(32), floats(32), 1)


def test_a_trap() -> None:
    source = """extern "C" __global__ void probe(const int* x) {
        if (x[blockIdx.x * blockDim.x + threadIdx.x] < 0) {
            __trap(); // here
        }
    }"""
    x = np.zeros(96, np.int32)
    emulate(compile_cuda(source), "probe", 3, 32, x)
    x[32 + 5] = -1
    at(caught(source, 3, 32, x), "trap", 1, 5)


ENDLESS = """extern "C" __global__ void probe(volatile int* flag, int* y) {
    while (*flag == 0) { // here
    }
    y[threadIdx.x] = 1;
}"""


def test_a_loop_that_nobody_ends() -> None:
    with pytest.raises(Fault, match="endless loop") as error:
        emulate(compile_cuda(ENDLESS), "probe", 1, 32, np.zeros(1, np.int32), np.zeros(32, np.int32), steps=5000)
    assert error.value.kind == "endless loop"
    assert error.value.kernel == "probe"
    assert "5000" in str(error.value).replace(",", "")
    emulate(compile_cuda(ENDLESS), "probe", 1, 32, np.ones(1, np.int32), np.zeros(32, np.int32), steps=5000)


@pytest.mark.parametrize("order", [None, 1])
def test_one_lane_that_never_comes_back(order: int | None) -> None:
    """The others have left or wait at the end; the step limit counts what the lane's warp has executed, divergent or not."""
    source = """extern "C" __global__ void probe(volatile int* flag, int* y) {
        int t = blockIdx.x * blockDim.x + threadIdx.x;
        for (int i = 0; i < 100; ++i) y[t] = i;
        if (t == LANE) while (*flag == 0) { // here
        }
        y[t] = 1;
    }"""
    bad = compile_cuda(source.replace("LANE", "165"))
    with pytest.raises(Fault) as error:
        emulate(bad, "probe", 2, 96, np.zeros(1, np.int32), np.zeros(192, np.int32), steps=4000, order=order)
    fault = error.value
    assert (fault.kind, fault.line) == ("endless loop", line_of(source))
    assert (fault.block, fault.thread) == ((1, 0, 0), (69, 0, 0))
    good = compile_cuda(source.replace("LANE", "192"))
    emulate(good, "probe", 2, 96, np.zeros(1, np.int32), np.zeros(192, np.int32), steps=4000, order=order)


def test_a_long_loop_is_not_endless() -> None:
    body = (
        "mov.u32 %r0, 0; L: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 3000; @%p0 bra L; ld.param.u64 %l0, [y]; st.global.u32 [%l0], %r0;"
    )
    y = np.zeros(1, np.uint32)
    emulate(entry("u64 y", body), "probe", 1, 1, y)
    assert y[0] == 3000


def test_writing_constant_memory_through_a_generic_pointer() -> None:
    outside = ".const .align 4 .u32 table[4] = {1, 2, 3, 4};"
    body = "mov.u64 %l0, table; cvta.const.u64 %l1, %l0; mov.u32 %r0, 5; ACTION"
    with pytest.raises(Fault) as error:
        emulate(entry("", body.replace("ACTION", "st.u32 [%l1], %r0;"), outside), "probe", 1, 32)
    assert error.value.kind == "write to constant memory"
    assert "st.u32" in str(error.value)
    emulate(entry("", body.replace("ACTION", "ld.u32 %r0, [%l1];"), outside), "probe", 1, 32)


STUCK = {
    "a barrier that too few threads reach": (
        'if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;"); // here',
        'if (threadIdx.x < 64) asm volatile("bar.sync 1, 64;"); // here',
    ),
    "a shuffle whose mask names lanes that have left": (
        "if (threadIdx.x % 32 >= 16) return;\n v = __shfl_xor_sync(~0u, v, 1); // here",
        "if (threadIdx.x % 32 >= 16) return;\n v = __shfl_xor_sync(0xffffu, v, 1); // here",
    ),
    "a warp barrier whose mask names lanes that have left": (
        "if (threadIdx.x % 32 == 7) return;\n __syncwarp(); // here",
        "if (threadIdx.x % 32 == 7) return;\n __syncwarp(~(1u << 7)); // here",
    ),
    "a vote inside a branch that waits for the lanes outside": (
        "if (threadIdx.x % 2) { while (__any_sync(~0u, v < 0)) ++v; } // here",
        "if (threadIdx.x % 2) { while (__any_sync(0xaaaaaaaau, v < 0)) ++v; } // here",
    ),
}


@pytest.mark.parametrize("name", STUCK)
def test_deadlocks(name: str) -> None:
    bad, good = (
        f"""extern "C" __global__ void probe(int* y) {{
        int v = threadIdx.x;
        {text}
        if (blockIdx.x == 0) y[threadIdx.x] = v;
    }}"""
        for text in STUCK[name]
    )
    fault = caught(bad, 3, 128, np.zeros(128, np.int32))
    assert fault.kind == "deadlock"
    assert fault.block == (0, 0, 0)
    assert fault.thread is not None
    assert f"thread ({fault.thread[0]},0,0)" in str(fault)
    emulate(compile_cuda(good), "probe", 1, 128, np.zeros(128, np.int32))


def test_two_warps_that_wait_for_each_other_at_different_barriers() -> None:
    body = """mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; @%p0 bra A; bar.sync 1, 64; bar.sync 2, 64; bra Z;
        A: bar.sync FIRST, 64; bar.sync SECOND, 64; Z:"""
    with pytest.raises(Fault) as error:
        emulate(entry("", body.replace("FIRST", "2").replace("SECOND", "1")), "probe", 1, 64)
    assert error.value.kind == "deadlock"
    emulate(entry("", body.replace("FIRST", "1").replace("SECOND", "2")), "probe", 1, 64)


def test_places_in_grids_and_blocks_of_three_dimensions() -> None:
    source = """extern "C" __global__ void probe(int* y) {
        int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        y[b * 24 + t] = 1; // here
    }"""
    size = ((1 * 3 + 2) * 2 + 1) * 24 + (1 * 3 + 2) * 4 + 3  # up to block (1,2,1), thread (3,2,1), which is left out
    with pytest.raises(Fault) as error:
        emulate(compile_cuda(source), "probe", (2, 3, 2), (4, 3, 2), np.zeros(size, np.int32))
    fault = error.value
    assert (fault.kind, fault.line) == ("out of bounds", line_of(source))
    assert (fault.block, fault.thread) == ((1, 2, 1), (3, 2, 1))
    assert "block (1,2,1) thread (3,2,1)" in str(fault)
    emulate(compile_cuda(source), "probe", (2, 3, 2), (4, 3, 2), np.zeros(size + 1, np.int32))


def test_a_fault_in_a_device_function_names_the_kernel_and_the_functions_line() -> None:
    source = """__device__ __noinline__ int pick(const int* x, int i) {
        return x[i]; // here
    }
    extern "C" __global__ void probe(const int* x, int* y) {
        y[threadIdx.x] = threadIdx.x < 20 ? pick(x, threadIdx.x * 2) : 0;
    }"""
    at(caught(source, 1, 32, np.zeros(30, np.int32), np.zeros(32, np.int32)), "out of bounds", 0, 15)
    emulate(compile_cuda(source), "probe", 1, 32, np.zeros(39, np.int32), np.zeros(32, np.int32))


def test_writing_an_array_that_may_not_be_written() -> None:
    x, fixed = np.arange(128, dtype=np.float32), floats(128)
    fixed.flags.writeable = False
    at(caught(READ.replace("// here", "").replace("= v;", "= v; // here"), 2, 64, x, fixed, 0), "write to a read-only argument", 0, 0)
    assert (fixed == 1).all()
    emulate(compile_cuda(READ), "probe", 2, 64, fixed, x, 0)


def test_writing_what_was_read_through_the_read_only_path() -> None:
    source = """extern "C" __global__ void probe(int* x) {
        int v = LOAD(x + threadIdx.x);
        x[threadIdx.x] = v + 1; // here
    }"""
    fault = caught(source.replace("LOAD", "__ldg"), 1, 32, np.zeros(32, np.int32))
    assert fault.kind == "write to memory read through ld.global.nc"
    x = np.zeros(32, np.int32)
    emulate(compile_cuda(source.replace("LOAD", "*")), "probe", 1, 32, x)
    assert (x == 1).all()


@pytest.mark.parametrize("space", ["shared", "global"])
def test_a_generic_address_between_the_spaces(space: str) -> None:
    """A pointer made from one space and moved far beyond it points to nothing."""
    body = """.shared .align 4 .u32 cell[4]; mov.u64 %l0, cell; cvta.shared.u64 %l0, %l0; ld.param.u64 %l1, [x]; mov.u32 %r0, 7; FIRST
        add.u64 %l2, %PICK, OFFSET; ld.u32 %r1, [%l2];"""
    body = body.replace("PICK", "l0" if space == "shared" else "l1").replace(
        "FIRST", f"st.u32 [%{'l0' if space == 'shared' else 'l1'}], %r0;"
    )
    with pytest.raises(Fault) as error:
        emulate(entry("u64 x", body.replace("OFFSET", "200000")), "probe", 1, 1, np.zeros(4, np.uint32))
    assert error.value.kind == "out of bounds"
    emulate(entry("u64 x", body.replace("OFFSET", "0")), "probe", 1, 1, np.zeros(4, np.uint32))


def test_a_misaligned_atomic() -> None:
    body = "ld.param.u64 %l0, [x]; add.u64 %l0, %l0, OFFSET; red.global.add.u32 [%l0], 1;"
    with pytest.raises(Fault) as error:
        emulate(entry("u64 x", body.replace("OFFSET", "2")), "probe", 1, 32, np.zeros(4, np.uint32))
    assert error.value.kind == "misaligned"
    emulate(entry("u64 x", body.replace("OFFSET", "4")), "probe", 1, 32, np.zeros(4, np.uint32))


def test_a_fault_leaves_the_next_launch_alone() -> None:
    for _ in range(2):
        caught(READ, 2, 64, floats(128), floats(128), 1)
        y = floats(128)
        emulate(compile_cuda(READ), "probe", 2, 64, np.arange(129, dtype=np.float32), y, 1)
        assert np.array_equal(y, np.arange(1, 129))
