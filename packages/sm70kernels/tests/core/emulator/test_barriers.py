"""Block barriers: bar.sync by number, from several program counters, with thread counts, bar.arrive, bar.red, barrier.sync of lanes."""

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from .harness import entry

START = """.shared .align 4 .b8 cells[1024]; .reg .b32 %t, %mine, %warp, %lane; mov.u32 %t, %tid.x; shl.b32 %mine, %t, 2;
        mov.u32 %r0, cells; add.u32 %mine, %mine, %r0;
    shr.u32 %warp, %t, 5; and.b32 %lane, %t, 31; mov.u32 %r7, 0;"""
END = "ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %t, 4; add.u64 %l0, %l0, %l1; st.global.u32 [%l0], %r7;"


def run(body: str, threads: int, order: int | None = None) -> list[int]:
    """%r7 of each thread; `body` may use %t (thread), %warp, %lane, and %mine, the address of the thread's word of shared memory."""
    out = np.zeros(threads, np.uint32)
    emulate(entry("u64 out", f"{START} {body} {END}"), "probe", 1, threads, out, order=order)
    return [int(x) for x in out]


# Every thread reads the word of the thread `%r1` places up, modulo 128.
READ_UP = (
    "add.u32 %r2, %t, %r1; and.b32 %r2, %r2, 127; shl.b32 %r2, %r2, 2; mov.u32 %r3, cells; add.u32 %r2, %r2, %r3; ld.shared.u32 %r7, [%r2];"
)


@pytest.mark.parametrize("order", [None, 1, 2, 3])
def test_a_barrier_separates_the_writes_from_the_reads_of_all_warps(order: int | None) -> None:
    body = f"mul.lo.u32 %r1, %t, %t; st.shared.u32 [%mine], %r1; bar.sync 0; mov.u32 %r1, 33; {READ_UP}"
    assert run(body, 128, order) == [(t + 33) % 128 * ((t + 33) % 128) for t in range(128)]


@pytest.mark.parametrize(
    "barrier", ["bar.sync 0, 128", "barrier.sync 0", "barrier.sync.aligned 0", "barrier.sync.aligned 5, 128", "bar.sync %r5"]
)
def test_every_spelling_of_a_block_barrier(barrier: str) -> None:
    body = f"mov.u32 %r5, 4; st.shared.u32 [%mine], %t; {barrier}; mov.u32 %r1, 50; {READ_UP}"
    assert run(body, 128) == [(t + 50) % 128 for t in range(128)]


@pytest.mark.parametrize("order", [None, 1, 2, 3])
def test_warps_meet_at_one_barrier_from_two_program_counters(order: int | None) -> None:
    body = f"""st.shared.u32 [%mine], %t; setp.lt.u32 %p0, %t, 64; @%p0 bra LOW; mov.u32 %r4, 1000; bar.sync 0; bra JOIN; LOW:
        mov.u32 %r4, 2000; bar.sync 0;
        JOIN: mov.u32 %r1, 64; {READ_UP} add.u32 %r7, %r7, %r4;"""
    assert run(body, 128, order) == [(t + 64) % 128 + (2000 if t < 64 else 1000) for t in range(128)]


@pytest.mark.parametrize("order", [None, 1, 2])
def test_pairs_of_warps_have_barriers_of_their_own(order: int | None) -> None:
    """Warps 0 and 1 use barrier 1 and go round three times; warps 2 and 3 use barrier 2 once; numbers may come from registers."""
    body = """setp.lt.u32 %p0, %t, 64; @%p0 bra LOW; mov.u32 %r1, 2; st.shared.u32 [%mine], %t; barrier.sync %r1, 64; xor.b32 %r2, %t, 32;
        shl.b32 %r2, %r2, 2; mov.u32 %r3, cells; add.u32 %r2, %r2, %r3;
        ld.shared.u32 %r7, [%r2]; bra JOIN;
        LOW: mov.u32 %r4, 0; mov.u32 %r5, %t; xor.b32 %r2, %t, 32; shl.b32 %r2, %r2, 2; mov.u32 %r3, cells; add.u32 %r2, %r2, %r3;
        AGAIN: st.shared.u32 [%mine], %r5; bar.sync 1, 64; ld.shared.u32 %r6, [%r2]; add.u32 %r5, %r6, 1; bar.sync 1, 64;
        add.u32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 3; @%p1 bra AGAIN; mov.u32 %r7, %r5;
        JOIN: bar.sync 0;"""
    assert run(body, 128, order) == [(t ^ 32) + 3 if t < 64 else t ^ 32 for t in range(128)]


@pytest.mark.parametrize("order", [None, 1, 2, 3])
def test_producers_arrive_and_consumers_wait(order: int | None) -> None:
    """Warps 0 and 1 write and arrive without waiting; warps 2 and 3 wait for all 128 threads, then read."""
    body = """setp.lt.u32 %p0, %t, 64; @!%p0 bra CONSUME; mul.lo.u32 %r1, %t, 3; st.shared.u32 [%mine], %r1; bar.arrive 3, 128;
        mov.u32 %r7, 7; bra JOIN;
        CONSUME: bar.sync 3, 128; sub.u32 %r1, %mine, 256; ld.shared.u32 %r7, [%r1]; JOIN: bar.sync 0;"""
    assert run(body, 128, order) == [7 if t < 64 else 3 * (t - 64) for t in range(128)]


def test_a_barrier_reduces_the_predicates_of_the_block() -> None:
    body = """rem.u32 %r1, %t, 5; setp.eq.u32 %p0, %r1, 0; barrier.red.popc.u32 %r2, 0, %p0; bar.red.popc.u32 %r3, 0, !%p0;
        bar.red.and.pred %p1, 0, %p0; bar.red.or.pred %p2, 0, %p0;
        setp.lt.u32 %p3, %t, 1000; bar.red.and.pred %p4, 1, 96, %p3; setp.gt.u32 %p3, %t, 1000; bar.red.or.pred %p5, 0, %p3;
        selp.u32 %r4, 1, 0, %p1; selp.u32 %r5, 2, 0, %p2; or.b32 %r4, %r4, %r5; selp.u32 %r5, 4, 0, %p4; or.b32 %r4, %r4, %r5;
        selp.u32 %r5, 8, 0, %p5; or.b32 %r4, %r4, %r5;
        shl.b32 %r2, %r2, 8; shl.b32 %r3, %r3, 16; or.b32 %r7, %r4, %r2; or.b32 %r7, %r7, %r3;"""
    multiples = len(range(0, 96, 5))
    assert set(run(body, 96)) == {6 | multiples << 8 | (96 - multiples) << 16}


def test_threads_that_left_early_are_not_waited_for() -> None:
    body = f"""setp.ge.u32 %p0, %t, 70; @%p0 exit; st.shared.u32 [%mine], %t; bar.sync 0; setp.ge.u32 %p1, %t, 40; @%p1 bra DONE;
        xor.b32 %r2, %t, 32; shl.b32 %r2, %r2, 2; mov.u32 %r3, cells;
        add.u32 %r2, %r2, %r3; ld.shared.u32 %r7, [%r2]; DONE: {END} ret;"""
    assert run(body, 128) == [t ^ 32 if t < 40 else 0 for t in range(128)]


def test_a_whole_warp_may_leave_before_the_barrier() -> None:
    body = "setp.eq.u32 %p0, %warp, 1; @%p0 ret; st.shared.u32 [%mine], %t; bar.sync 0; ld.shared.u32 %r7, [cells+256];"
    assert run(body, 128) == [0 if 32 <= t < 64 else 64 for t in range(128)]


@pytest.mark.parametrize("order", [None, 1, 2])
def test_the_lanes_of_a_diverged_warp_may_each_arrive_at_the_barrier(order: int | None) -> None:
    """barrier.sync without .aligned counts threads: even and odd lanes arrive from different branches."""
    body = f"""st.shared.u32 [%mine], %t; and.b32 %r1, %t, 1; setp.eq.u32 %p0, %r1, 0; @%p0 bra EVEN; mov.u32 %r4, 500; barrier.sync 0;
        bra JOIN; EVEN: mov.u32 %r4, 900; barrier.sync 0;
        JOIN: mov.u32 %r1, 65; {READ_UP} add.u32 %r7, %r7, %r4;"""
    assert run(body, 128, order) == [(t + 65) % 128 + (500 if t % 2 else 900) for t in range(128)]


def test_a_warp_ahead_waits_for_the_next_phase() -> None:
    """Double buffering over ten steps with one barrier a step gives the same sums in every order of the warps."""
    body = """mov.u32 %r1, 0; mov.u32 %r5, %t;
        STEP: and.b32 %r2, %r1, 1; shl.b32 %r2, %r2, 9; add.u32 %r3, %mine, %r2; st.shared.u32 [%r3], %r5; bar.sync 0; add.u32 %r4, %t, 37;
        and.b32 %r4, %r4, 127; shl.b32 %r4, %r4, 2;
        mov.u32 %r6, cells; add.u32 %r4, %r4, %r6; add.u32 %r4, %r4, %r2; ld.shared.u32 %r6, [%r4]; mad.lo.u32 %r5, %r5, 5, %r6;
        add.u32 %r1, %r1, 1; setp.lt.u32 %p0, %r1, 10; @%p0 bra STEP;
        mov.u32 %r7, %r5;"""
    values = list(range(128))
    for _ in range(10):
        values = [(values[t] * 5 + values[(t + 37) % 128]) % (1 << 32) for t in range(128)]
    for order in (None, *range(10)):
        assert run(body, 128, order) == values
