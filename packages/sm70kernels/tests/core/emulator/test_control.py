"""Control flow: divergence, loops with a trip count per lane, early exits, jump tables, device functions."""

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from .harness import HEAD, Row, check, entry, execute
from .sources import compile_cuda

WORD = 1 << 32


def collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    return steps


def test_loops_have_a_trip_count_per_lane() -> None:
    source = """extern "C" __global__ void kernel(const unsigned* x, unsigned* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        unsigned v = x[i], steps = 0;
        while (v != 1) { v = v % 2 == 0 ? v / 2 : 3 * v + 1; ++steps; }
        y[i] = steps;
    }"""
    x = np.arange(1, 501, dtype=np.uint32)
    y = np.zeros(500, np.uint32)
    emulate(compile_cuda(source), "kernel", 4, 128, x, y, 500)
    assert y.tolist() == [collatz(n) for n in range(1, 501)]


def nested(x: int) -> int:
    total = 0
    for i in range(x % 7):
        if (x >> i) & 1:
            for j in range(i, x % 5):
                total += 3 * j + 1
                if total > 40:
                    break
        elif x % 3 == 0:
            if i == 2:
                continue
            total += 100
        else:
            total ^= i
        total += 7
    return total


@pytest.mark.parametrize("order", [None, 3, 4])
def test_nested_branches_and_loops_with_break_and_continue(order: int | None) -> None:
    source = """extern "C" __global__ void kernel(const int* x, int* y) {
        int i = blockIdx.x * blockDim.x + threadIdx.x, v = x[i], total = 0;
        for (int i = 0; i < v % 7; ++i) {
            if ((v >> i) & 1) {
                for (int j = i; j < v % 5; ++j) { total += 3 * j + 1; if (total > 40) break; }
            } else if (v % 3 == 0) {
                if (i == 2) continue;
                total += 100;
            } else total ^= i;
            total += 7;
        }
        y[i] = total;
    }"""
    x = np.random.default_rng(2).integers(0, 1 << 20, 256).astype(np.int32)
    y = np.zeros(256, np.int32)
    emulate(compile_cuda(source), "kernel", 2, 128, x, y, order=order)
    assert y.tolist() == [nested(int(v)) for v in x]


def test_a_diverged_warp_comes_together_again() -> None:
    """After an if-else without any *.sync, a full-mask ballot of the joined warp sees all lanes."""
    text = """mov.u32 %r5, %laneid; setp.lt.u32 %p0, %r5, %a; @%p0 bra LESS; mov.u32 %r0, 3; mov.u32 %r1, 4; bra JOIN; LESS:
        mov.u32 %r0, 5; JOIN:
        setp.eq.u32 %p1, %r0, 5; vote.sync.ballot.b32 %d, %p1, -1;"""
    got = execute(text, "b32", "b32", [(bound,) for bound in (0, 1, 17, 31, 32) for _ in range(32)])
    assert [x for (x,) in got[::32]] == [(1 << bound) - 1 for bound in (0, 1, 17, 31, 32)]


def test_lanes_leave_at_different_places() -> None:
    """exit, ret, and the end of the kernel, under predicates; what was stored before stays."""
    body = """mov.u32 %r0, %tid.x; ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %r0, 4; add.u64 %l0, %l0, %l1; mov.u32 %r1, 1;
        st.global.u32 [%l0], %r1; setp.lt.u32 %p0, %r0, 10; @%p0 exit;
        mov.u32 %r1, 2; st.global.u32 [%l0], %r1; setp.gt.u32 %p0, %r0, 40; @%p0 ret; mov.u32 %r1, 3; st.global.u32 [%l0], %r1;
        and.b32 %r2, %r0, 1; setp.eq.u32 %p0, %r2, 1; @!%p0 bra END;
        mov.u32 %r1, 4; st.global.u32 [%l0], %r1; exit; END: mov.u32 %r1, 5; st.global.u32 [%l0], %r1;"""
    out = np.zeros(64, np.uint32)
    emulate(entry("u64 out", body), "probe", 1, 64, out)
    assert out.tolist() == [1 if t < 10 else 2 if t > 40 else 4 if t % 2 else 5 for t in range(64)]


def test_predicated_instructions_touch_only_their_lanes() -> None:
    text = "mov.u32 %d, 1; setp.lt.s32 %p0, %a, 0; @%p0 add.u32 %d, %d, 10; @!%p0 add.u32 %d, %d, 20; bra.uni SKIP; mov.u32 %d, 9; SKIP:"
    check(Row(text, "b32", "s32", lambda a: 11 if a >> 31 else 21))


def test_an_indexed_branch_jumps_to_the_label_of_its_index() -> None:
    text = """TABLE: .branchtargets ZERO, ONE, TWO, ONE; and.b32 %r0, %a, 3; brx.idx %r0, TABLE; ZERO: mov.u32 %d, 100; bra JOIN; ONE:
        mov.u32 %d, 200; bra JOIN; TWO: mov.u32 %d, 300; JOIN:"""
    check(Row(text, "b32", "b32", lambda a: (100, 200, 300, 200)[a & 3]))


def test_labels_belong_to_their_braces() -> None:
    """Two scopes with the same labels and a jump table, forward and backward, as inline assembly has them."""
    loop = "AGAIN: add.u32 %d, %d, STEP; add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 3; @%p0 bra AGAIN; bra OUT; mov.u32 %d, 0; OUT:"
    table = "TABLE: .branchtargets ZERO, ONE; and.b32 %r0, %a, 1; brx.idx %r0, TABLE; ONE: add.u32 %d, %d, 5; ZERO:"
    scopes = "".join(f"mov.u32 %r0, 0; {{ {loop.replace('STEP', str(step))} }}" for step in (7, 100))
    check(Row(f"mov.u32 %d, 0; {scopes} {{ {table} }}", "b32", "b32", lambda a: 321 + 5 * (a & 1)))


@pytest.mark.parametrize("order", [None, 1])
def test_a_warp_may_wait_for_another_one(order: int | None) -> None:
    """Warp 0 spins on a flag that warp 2 sets later in the program, and block 0 on one that block 1 sets."""
    body = """mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; ld.param.u64 %l0, [flags]; setp.ge.u32 %p0, %r0, 32; @%p0 bra SET;
        SPIN: ld.acquire.gpu.global.u32 %r2, [%l0]; setp.lt.u32 %p1, %r2, 2; @%p1 bra SPIN; bra END;
        SET: setp.ne.u32 %p0, %r0, 64; @%p0 bra END; membar.gl; red.release.gpu.global.add.u32 [%l0], 1; END: bar.sync 0;"""
    flags = np.zeros(1, np.uint32)
    emulate(entry("u64 flags", body), "probe", 2, 96, flags, order=order, steps=20000)
    assert flags[0] == 2


def test_a_switch_compiled_to_a_jump_table() -> None:
    cases = "".join(f"case {i}: v = v * {3 + 2 * i} + {i * i}; break; " for i in range(12))
    source = f"""extern "C" __global__ void kernel(const unsigned* x, unsigned* y) {{
        unsigned v = x[threadIdx.x];
        for (int i = 0; i < 4; ++i) switch (v % 14) {{ {cases} default: v = ~v; }}
        y[threadIdx.x] = v;
    }}"""
    x = np.random.default_rng(3).integers(0, WORD, 128).astype(np.uint32)
    y = np.zeros(128, np.uint32)
    emulate(compile_cuda(source), "kernel", 1, 128, x, y)

    def step(v: int) -> int:
        case = v % 14
        return (v * (3 + 2 * case) + case * case) % WORD if case < 12 else v ^ (WORD - 1)

    for start, got in zip(x.tolist(), y.tolist(), strict=True):
        for _ in range(4):
            start = step(start)
        assert got == start


FUNCTIONS = """
.func (.param .b32 result) weigh (.param .b32 x, .param .b64 y)
{ .reg .b32 %a, %b; .reg .b64 %w; .reg .pred %p; ld.param.u32 %a, [x]; ld.param.u64 %w, [y]; cvt.u32.u64 %b, %w; setp.gt.u32 %p, %a, 100;
        @%p bra BIG; add.u32 %a, %a, %b; st.param.b32 [result], %a; ret;
  BIG: sub.u32 %a, %a, %b; st.param.b32 [result+0], %a; ret; }
.func (.param .b32 result) twice (.param .b32 x)
{ .reg .b32 %a; .reg .b64 %w; ld.param.u32 %a, [x]; cvt.u64.u32 %w, %a;
  { .param .b32 p0; st.param.b32 [p0+0], %a; .param .b64 p1; st.param.b64 [p1+0], %w; .param .b32 r; call.uni (r), weigh, (p0, p1);
        ld.param.b32 %a, [r+0]; }
  st.param.b32 [result+0], %a; ret; }
.func bump (.param .b64 at) { .reg .b64 %w; .reg .b32 %a; ld.param.u64 %w, [at]; ld.global.u32 %a, [%w]; add.u32 %a, %a, 1;
        st.global.u32 [%w], %a; ret; }
"""


def weigh(x: int, y: int) -> int:
    return (x - y if x > 100 else x + y) % WORD


@pytest.mark.parametrize("order", [None, 7])
def test_device_functions_pass_parameters_and_results(order: int | None) -> None:
    """Calls from a diverged warp, calls inside calls, a function without a result, a branch inside the function."""
    body = """mov.u32 %r0, %tid.x; ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %r0, 4; add.u64 %l0, %l0, %l1; mul.lo.u32 %r1, %r0, 3;
        setp.lt.u32 %p0, %r0, 20; @%p0 bra OTHER;
        { .param .b32 p0; st.param.b32 [p0+0], %r1; .param .b64 p1; st.param.b64 [p1+0], 7; .param .b32 r; call (r), weigh, (p0, p1);
        ld.param.b32 %r2, [r+0]; } bra JOIN;
        OTHER: { .param .b32 p0; st.param.b32 [p0+0], %r1; .param .b32 r; call.uni (r), twice, (p0); ld.param.b32 %r2, [r+0]; }
        JOIN: st.global.u32 [%l0], %r2; and.b32 %r3, %r0, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra END; { .param .b64 p0;
        st.param.b64 [p0+0], %l0; call.uni bump, (p0); } END:"""
    out = np.zeros(64, np.uint32)
    emulate(entry("u64 out", body, FUNCTIONS), "probe", 1, 64, out, order=order)
    for t, got in enumerate(out.tolist()):
        x = 3 * t
        assert got == (weigh(x, x) if t < 20 else weigh(x, 7)) + t % 2


def test_compiled_functions_take_and_return_structures() -> None:
    source = """struct Pair { float value; int index; };
        __noinline__ __device__ Pair better(Pair a, Pair b) {
            return a.value > b.value || (a.value == b.value && a.index < b.index) ? a : b;
        }
        extern "C" __global__ void kernel(const float* x, int* y, int n) {
            Pair best = {x[threadIdx.x], 0};
            for (int i = 1; i < n; ++i) best = better(best, Pair{x[i * 32 + threadIdx.x], i});
            y[threadIdx.x] = best.index;
        }"""
    x = np.random.default_rng(4).integers(0, 6, (17, 32)).astype(np.float32)
    y = np.zeros(32, np.int32)
    emulate(compile_cuda(source), "kernel", 1, 32, x, y, 17)
    assert np.array_equal(y, x.argmax(0))


def test_a_module_may_hold_several_kernels() -> None:
    one = entry("u64 out", "ld.param.u64 %l0, [out]; mov.u32 %r0, 11; st.global.u32 [%l0], %r0;", name="first")
    two = entry("u64 out", "ld.param.u64 %l0, [out]; mov.u32 %r0, 22; st.global.u32 [%l0], %r0;", name="second").removeprefix(HEAD)
    for name, value in (("first", 11), ("second", 22)):
        out = np.zeros(1, np.uint32)
        emulate(one + two, name, 1, 1, out)
        assert out[0] == value
