"""Exchange between the lanes of a warp: shfl, vote, match, activemask, bar.warp.sync."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from .harness import entry, execute

ALL = 0xFFFFFFFF


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The lane a shuffle reads, and whether it lies inside the segment; from the pseudocode of the PTX manual."""
    segment, bound, b = c >> 8 & 31, c & 31, b & 31
    last = (lane & segment) | (bound & ~segment)
    first = lane & segment
    if mode == "up":
        source, inside = lane - b, lane - b >= last
    elif mode == "idx":
        source = first | (b & ~segment & 31)
        inside = source <= last
    else:
        source = lane + b if mode == "down" else lane ^ b
        inside = source <= last
    return (source, True) if inside else (lane, False)


def bounds(mode: str) -> list[int]:
    """The usual c operands, segments of 32, 16, 8, 4, 2 and 1 lanes, and odd ones."""
    clamp = 0 if mode == "up" else 31
    usual = [(32 - width) << 8 | clamp for width in (32, 16, 8, 4, 2, 1)]
    return [*usual, 5 if mode == "up" else 20, 0x0A0B]


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_a_shuffle_reads_the_lane_of_the_manuals_pseudocode(mode: str) -> None:
    """One warp for every distance and bound, then warps whose lanes have distances and bounds of their own."""
    rng = random.Random(6)
    settings = [[(b, c)] * 32 for b in range(33) for c in bounds(mode)]
    settings += [[(rng.randrange(64), rng.choice(bounds(mode))) for _ in range(32)] for _ in range(40)]
    rows = [(rng.getrandbits(32), b, c) for warp in settings for b, c in warp]
    got = execute(f"shfl.sync.{mode}.b32 %d|%q, %a, %b, %c, 0xffffffff;", "b32 pred", "b32 b32 b32", rows)
    plain = execute(f"shfl.sync.{mode}.b32 %d, %a, %b, %c, -1;", "b32", "b32 b32 b32", rows)
    for at, (_, b, c) in enumerate(rows):
        source, inside = shuffled(mode, at % 32, b, c)
        assert got[at] == (rows[at // 32 * 32 + source][0], inside), f"lane {at % 32}, b={b}, c={c:#x}"
        assert plain[at] == got[at][:1]


def test_half_a_warp_may_shuffle_alone() -> None:
    text = """mov.u32 %r5, %laneid; setp.lt.u32 %p0, %r5, 16; mov.u32 %d, 0; @!%p0 bra SKIP;
        shfl.sync.bfly.b32 %d, %a, 3, 31, 0xffff;
        SKIP: bar.warp.sync 0xffffffff;"""
    rows = [(1000 + lane,) for lane in range(64)]
    got = execute(text, "b32", "b32", rows)
    assert [x for (x,) in got] == [1000 + (lane ^ 3) if lane % 32 < 16 else 0 for lane in range(64)]


def test_both_halves_of_a_diverged_warp_shuffle_with_their_own_masks() -> None:
    text = """mov.u32 %r5, %laneid; and.b32 %r5, %r5, 1; setp.eq.u32 %p0, %r5, 0; @%p0 bra EVEN;
        shfl.sync.down.b32 %d, %a, 2, 31, 0xaaaaaaaa; bra JOIN;
        EVEN: shfl.sync.up.b32 %d, %a, 2, 0, 0x55555555; JOIN: bar.warp.sync -1;"""
    got = execute(text, "b32", "b32", [(lane,) for lane in range(32)])
    odd = [lane + 2 if lane < 30 else lane for lane in range(32)]
    assert [x for (x,) in got] == [odd[lane] if lane % 2 else max(lane - 2, 0) for lane in range(32)]


def test_a_shuffle_joins_lanes_that_reach_it_from_two_places() -> None:
    text = """mov.u32 %r5, %laneid; setp.lt.u32 %p0, %r5, 16; mov.u32 %r1, %a; @%p0 bra LOW; add.u32 %r1, %r1, 5; LOW:
        shfl.sync.bfly.b32 %d, %r1, 16, 31, -1;"""
    got = execute(text, "b32", "b32", [(lane,) for lane in range(32)])
    assert [x for (x,) in got] == [lane + 16 + 5 if lane < 16 else lane - 16 for lane in range(32)]


def masks() -> list[int]:
    rng = random.Random(8)
    return [0, ALL, 1, 1 << 31, *(rng.getrandbits(32) for _ in range(12))]


VOTES: dict[str, Callable[[int, int], int]] = {
    "all": lambda votes, mask: int(votes & mask == mask),
    "any": lambda votes, mask: int(votes & mask != 0),
    "uni": lambda votes, mask: int(votes & mask in (0, mask)),
    "ballot": lambda votes, mask: votes & mask,
}


@pytest.mark.parametrize("mode", VOTES)
def test_votes_of_a_full_warp(mode: str) -> None:
    kind, result = ("b32", "b32") if mode == "ballot" else ("pred", "pred")
    rows = [(votes >> lane & 1,) for votes in masks() for lane in range(32)]
    got = execute(f"vote.sync.{mode}.{kind} %d, %a, 0xffffffff;", result, "pred", rows)
    negated = execute(f"vote.sync.{mode}.{kind} %d, !%a, 0xffffffff;", result, "pred", rows)
    for warp, votes in enumerate(masks()):
        assert {x for (x,) in got[32 * warp : 32 * warp + 32]} == {VOTES[mode](votes, ALL)}
        assert {x for (x,) in negated[32 * warp : 32 * warp + 32]} == {VOTES[mode](~votes & ALL, ALL)}


@pytest.mark.parametrize("mode", VOTES)
def test_votes_count_only_the_lanes_of_their_mask(mode: str) -> None:
    kind, result = ("b32", "b32") if mode == "ballot" else ("pred", "pred")
    member = 0x0F0F00F1
    text = f"""mov.u32 %r5, %laneid; shr.u32 %r5, {member:#x}, %r5; and.b32 %r5, %r5, 1; setp.eq.u32 %p5, %r5, 1;
        {"mov.u32 %d, 0" if mode == "ballot" else "setp.ne.u32 %d, 0, 0"}; @!%p5 bra OUT; vote.sync.{mode}.{kind} %d, %a, {member:#x}; OUT:
        bar.warp.sync -1;"""
    rows = [(votes >> lane & 1,) for votes in [*masks(), member] for lane in range(32)]
    got = execute(text, result, "pred", rows)
    for at, (answer,) in enumerate(got):
        votes = [*masks(), member][at // 32]
        assert answer == (VOTES[mode](votes, member) if member >> at % 32 & 1 else 0)


@pytest.mark.parametrize("width", [32, 64])
def test_match_finds_the_lanes_of_equal_value(width: int) -> None:
    rng = random.Random(width)
    high = 1 << (width - 1)
    warps = [[rng.choice((0, 1, high, high | 1, (1 << width) - 1)) for _ in range(32)] for _ in range(10)] + [
        [5] * 32,
        list(range(32)),
        [9] * 31 + [8],
    ]
    rows = [(value,) for warp in warps for value in warp]
    anyone = execute(f"match.any.sync.b{width} %d, %a, 0xffffffff;", "b32", f"b{width}", rows)
    everyone = execute(f"match.all.sync.b{width} %d|%q, %a, 0xffffffff;", "b32 pred", f"b{width}", rows)
    for index, warp in enumerate(warps):
        same = len(set(warp)) == 1
        for lane, value in enumerate(warp):
            assert anyone[32 * index + lane] == (sum(1 << i for i, other in enumerate(warp) if other == value),)
            assert everyone[32 * index + lane] == (ALL if same else 0, same)


def test_match_within_a_part_of_the_warp() -> None:
    text = """mov.u32 %r5, %laneid; setp.ge.u32 %p0, %r5, 8; mov.u32 %d, 0; @%p0 bra OUT; match.any.sync.b32 %d, %a, 0xff;
        OUT: bar.warp.sync -1;"""
    values = [lane % 3 for lane in range(32)]
    got = execute(text, "b32", "b32", [(value,) for value in values])
    assert [x for (x,) in got] == [sum(1 << i for i in range(8) if values[i] == values[lane]) if lane < 8 else 0 for lane in range(32)]


def test_activemask_of_a_whole_warp_and_of_a_ragged_one() -> None:
    body = """activemask.b32 %r1; mov.u32 %r0, %tid.x; ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %r0, 4; add.u64 %l0, %l0, %l1;
        st.global.u32 [%l0], %r1;"""
    out = np.zeros(40, np.uint32)
    emulate(entry("u64 out", body), "probe", 1, 40, out)
    assert out.tolist() == [ALL] * 32 + [255] * 8


def test_activemask_inside_a_branch_names_only_lanes_that_took_it() -> None:
    text = """mov.u32 %r5, %laneid; rem.u32 %r5, %r5, 3; setp.ne.u32 %p0, %r5, 1; mov.u32 %d, 0; @%p0 bra OUT;
        activemask.b32 %d; OUT: bar.warp.sync -1;"""
    taken = sum(1 << lane for lane in range(1, 32, 3))
    for lane, (mask,) in enumerate(execute(text, "b32", "b32", [(0,)] * 32)):
        assert mask & ~taken == 0
        assert mask >> lane & 1 == (lane % 3 == 1)


def test_a_warp_barrier_makes_the_stores_of_its_lanes_visible() -> None:
    """Rotation through shared memory by groups of eight lanes, each with its own mask."""
    text = """.shared .align 4 .b8 cells[512]; mov.u32 %r5, %laneid; mov.u32 %r0, %tid.x; shl.b32 %r0, %r0, 2;
        mov.u32 %r1, cells; add.u32 %r0, %r0, %r1; st.shared.u32 [%r0], %a;
        and.b32 %r6, %r5, 24; shl.b32 %r6, 0xff, %r6; bar.warp.sync %r6; add.u32 %r2, %r5, 1; and.b32 %r2, %r2, 7; and.b32 %r3, %r5, 7;
        sub.u32 %r2, %r2, %r3; shl.b32 %r2, %r2, 2; add.u32 %r2, %r0, %r2;
        ld.shared.u32 %d, [%r2];"""
    got = execute(text, "b32", "b32", [(lane * lane,) for lane in range(96)])
    assert [x for (x,) in got] == [(lane // 8 * 8 + (lane + 1) % 8) ** 2 for lane in range(96)]


def test_the_last_warp_of_a_block_may_be_shorter() -> None:
    """40 threads: the eight lanes of the second warp shuffle, vote and match among themselves."""
    body = """mov.u32 %r0, %tid.x; ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %r0, 16; add.u64 %l0, %l0, %l1; setp.lt.u32 %p0, %r0, 32;
        selp.b32 %r1, -1, 0xff, %p0;
        shfl.sync.bfly.b32 %r2, %r0, 4, 31, %r1; and.b32 %r5, %r0, 1; setp.eq.u32 %p1, %r5, 1; vote.sync.ballot.b32 %r3, %p1, %r1;
        match.any.sync.b32 %r4, %r5, %r1;
        shfl.sync.down.b32 %r5, %r0, 3, 31, %r1; st.global.v4.u32 [%l0], {%r2, %r3, %r4, %r5};"""
    out = np.zeros((40, 4), np.uint32)
    emulate(entry("u64 out", body), "probe", 1, 40, out)
    for t, row in enumerate(out.tolist()):
        full = ALL if t < 32 else 255
        odd = 0xAAAAAAAA & full
        assert row[:3] == [t ^ 4, odd, odd if t & 1 else full & ~odd]
        if t % 32 + 3 < full.bit_length():
            assert row[3] == t + 3


def test_a_butterfly_sums_a_warp() -> None:
    steps = " ".join(f"shfl.sync.bfly.b32 %r0, %d, {step}, 31, -1; add.u32 %d, %d, %r0;" for step in (16, 8, 4, 2, 1))
    rng = random.Random(1)
    rows = [(rng.getrandbits(32),) for _ in range(32 * 9)]
    got = execute(f"mov.u32 %d, %a; {steps}", "b32", "b32", rows)
    for warp in range(9):
        total = sum(x for (x,) in rows[32 * warp : 32 * warp + 32]) & ALL
        assert {x for (x,) in got[32 * warp : 32 * warp + 32]} == {total}
