"""atom and red: every operation and type in shared, global and generic space, then under contention."""

from collections import Counter

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from . import softfloat
from .harness import Formula, Row, check, entry, ids
from .operands import bits_of, operands, signed
from .softfloat import FORMATS

SPACES = {
    "global": "ld.param.u64 %l0, [out1]; mul.wide.u32 %l1, %i, SIZE; add.u64 %l0, %l0, %l1;",
    "shared": """.shared .align 8 .b8 cells[1024]; mov.u32 %r0, %tid.x; mul.wide.u32 %l1, %r0, SIZE; mov.u64 %l0, cells;
        add.u64 %l0, %l0, %l1;""",
}


def bounded(kind: str, pick: Formula) -> Formula:
    if kind[0] == "s":
        return lambda a, b: pick(a, b, key=lambda x: signed(x, bits_of(kind)))
    return pick


def updates() -> dict[str, tuple[str, Formula]]:
    """Operation and type -> kind of the operands, what memory holding a becomes."""
    table: dict[str, tuple[str, Formula]] = {}
    for kind in ("u32", "s32", "u64"):
        table[f"add.{kind}"] = kind, lambda a, b, kind=kind: (a + b) & ((1 << bits_of(kind)) - 1)
    for kind in ("u32", "s32", "u64", "s64"):
        table[f"min.{kind}"], table[f"max.{kind}"] = (kind, bounded(kind, min)), (kind, bounded(kind, max))
    for kind in ("b32", "b64"):
        table[f"and.{kind}"], table[f"or.{kind}"], table[f"xor.{kind}"] = (
            (kind, lambda a, b: a & b),
            (kind, lambda a, b: a | b),
            (kind, lambda a, b: a ^ b),
        )
    table["inc.u32"] = "u32", lambda a, b: 0 if a >= b else a + 1
    table["dec.u32"] = "u32", lambda a, b: b if a == 0 or a > b else a - 1
    for kind in ("f32", "f64"):
        table[f"add.{kind}"] = kind, lambda a, b, kind=kind: softfloat.add(FORMATS[kind], a, b)
    table["add.noftz.f16"] = "f16", lambda a, b: softfloat.add(softfloat.F16, a, b)
    table["add.noftz.f16x2"] = (
        "f16x2",
        lambda a, b: sum(softfloat.add(softfloat.F16, a >> s & 0xFFFF, b >> s & 0xFFFF) << s for s in (0, 16)),
    )
    return table


UPDATES = updates()


def memory_row(space: str, operation: str, kind: str, formula: Formula, generic: bool = False, result: bool = True) -> Row:
    """Memory starts as %a, the operand is %b (and %c); %d is the value returned, %q what memory holds afterwards."""
    bits = bits_of(kind)
    place = "" if generic else f".{space}"
    text = f"{SPACES[space]} st.{space}.b{bits} [%l0], %a;".replace("SIZE", str(bits // 8))
    if generic:
        text += f" mov.u64 %l2, %l0; cvta.{space}.u64 %l0, %l0;"
    arity = 3 if operation.startswith("cas") else 2
    more = ", %b, %c" if arity == 3 else ", %b"
    text += f" atom{place}.{operation} %d, [%l0]{more};" if result else f" mov.b{bits} %d, %a; red{place}.{operation} [%l0]{more};"
    text += f" ld.{space}.b{bits} %q, [{'%l2' if generic else '%l0'}];"

    def both(a: int, *rest: int) -> tuple[int, int]:
        return a, formula(a, *rest)

    return Row(text, f"{kind} {kind}", " ".join([kind] * arity), both)


ROWS = [memory_row(space, name, kind, formula) for name, (kind, formula) in UPDATES.items() for space in SPACES]
ROWS += [memory_row(space, name, kind, formula, result=False) for name, (kind, formula) in UPDATES.items() for space in SPACES]
ROWS += [
    memory_row(space, name, UPDATES[name][0], UPDATES[name][1], generic=True)
    for name in ("add.u32", "add.f32", "max.s64")
    for space in SPACES
]
ROWS += [memory_row(space, f"exch.{kind}", kind, lambda a, b: b) for kind in ("b32", "b64") for space in SPACES]
ROWS += [memory_row(space, f"cas.{kind}", kind, lambda a, b, c: c if a == b else a) for kind in ("b16", "b32", "b64") for space in SPACES]
ROWS += [
    memory_row("global", f"{order}.add.u32", "u32", UPDATES["add.u32"][1])
    for order in ("relaxed.gpu", "acq_rel.gpu", "acquire.cta", "release.sys")
]


def moderate(row: Row) -> list[tuple[int, ...]] | None:
    """Silicon flushes subnormal f32 sums in global memory and keeps them in shared memory: leave them out."""
    kind = row.operands.split()[0]
    if kind != "f32":
        return None
    form = FORMATS[kind]
    rows = operands(["f32", "f32"])
    return [(a, b) for a, b in rows if not any(map(form.is_subnormal, (a, b, softfloat.add(form, a, b))))]


@pytest.mark.parametrize("row", ROWS, ids=[text.split("; ", 3)[3] for text in ids(ROWS)])
def test_one_atomic_returns_the_old_value_and_leaves_the_new_one(row: Row) -> None:
    if row.operands.startswith("b16"):
        check(row, [(a, b, c) for a in (0, 7, 0xFFFF) for b in (0, 7, 0xFFFF) for c in (1, 0x8000)])
    elif "cas" in row.text:
        check(row, [(a, a if i % 2 else b, c) for i, (a, b, c) in enumerate(operands(row.operands.split()))])
    else:
        check(row, moderate(row))


THREAD = "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r0, %r0, %r1, %r2;"
RETURN = "ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %r0, 4; add.u64 %l0, %l0, %l1; st.global.u32 [%l0], %r4;"
THREADS = 5 * 96


def run(body: str, cell: np.ndarray, order: int | None = None, steps: int | None = None) -> np.ndarray:  # type: ignore[type-arg]
    """Run `body` in 5 blocks of 96 threads on one cell in global memory (address in %l7); %r4 is returned for every thread."""
    out = np.zeros(THREADS, np.uint32)
    emulate(
        entry("u64 cell, u64 out", f"{THREAD} ld.param.u64 %l7, [cell]; {body} {RETURN}"),
        "probe",
        5,
        96,
        cell,
        out,
        order=order,
        steps=steps,
    )
    return out


@pytest.mark.parametrize("order", [None, 1, 2])
def test_contended_additions_each_see_another_old_value(order: int | None) -> None:
    cell = np.array([7], np.uint32)
    seen = run("atom.global.add.u32 %r4, [%l7], 3;", cell, order)
    assert cell[0] == 7 + 3 * THREADS
    assert sorted(seen.tolist()) == list(range(7, 7 + 3 * THREADS, 3))


def test_contended_reductions_sum_all_threads() -> None:
    cell = np.zeros(4, np.uint32)
    run(
        """red.global.add.u32 [%l7], %r0; red.global.max.u32 [%l7+4], %r0; red.global.xor.b32 [%l7+8], %r0; cvt.rn.f32.u32 %f0, %r0;
        red.global.add.f32 [%l7+12], %f0; mov.u32 %r4, 0;""",
        cell,
    )
    xor = 0
    for thread in range(THREADS):
        xor ^= thread
    assert cell[:3].tolist() == [THREADS * (THREADS - 1) // 2, THREADS - 1, xor]
    assert cell[3:].view(np.float32)[0] == THREADS * (THREADS - 1) // 2


def test_atomic_increment_wraps_at_its_bound_and_decrement_at_zero() -> None:
    cell = np.array([0, 3], np.uint32)
    up = run("atom.global.inc.u32 %r4, [%l7], 9;", cell)
    assert Counter(up.tolist()) == dict.fromkeys(range(10), THREADS // 10)
    down = run("atom.global.dec.u32 %r4, [%l7+4], 7;", cell)
    assert Counter(down.tolist()) == dict.fromkeys(range(8), THREADS // 8)
    assert cell.tolist() == [0, 3]


def test_contended_exchanges_pass_every_value_on_once() -> None:
    cell = np.array([0xFFFF], np.uint32)
    seen = run("atom.global.exch.b32 %r4, [%l7], %r0;", cell)
    assert sorted([*seen.tolist(), int(cell[0])]) == sorted([*range(THREADS), 0xFFFF])


@pytest.mark.parametrize("order", [None, 5])
def test_a_compare_and_swap_loop_serialises_its_threads(order: int | None) -> None:
    """x -> x * 3 + 1 modulo 2**32, once a thread; lanes that lose the race go round again."""
    body = """ld.relaxed.gpu.global.u32 %r3, [%l7];
        AGAIN: mad.lo.u32 %r5, %r3, 3, 1; atom.global.cas.b32 %r4, [%l7], %r3, %r5; setp.ne.u32 %p0, %r4, %r3; mov.u32 %r3, %r4;
        @%p0 bra AGAIN;"""
    cell = np.array([1], np.uint32)
    seen = run(body, cell, order)
    wanted, x = [], 1
    for _ in range(THREADS):
        wanted.append(x)
        x = (x * 3 + 1) % (1 << 32)
    assert sorted(seen.tolist()) == sorted(wanted)
    assert cell[0] == x


def test_a_spin_lock_taken_by_one_lane_of_each_warp_protects_plain_memory() -> None:
    """Lanes other than the first wait at a warp barrier; the counter behind the lock is read and written with volatile accesses."""
    body = """and.b32 %r3, %r0, 31; setp.ne.u32 %p0, %r3, 0; mov.u32 %r4, 0; @%p0 bra WAIT;
        SPIN: atom.acquire.gpu.global.cas.b32 %r5, [%l7], 0, 1; setp.ne.u32 %p1, %r5, 0; @%p1 bra SPIN; membar.gl;
        ld.volatile.global.u32 %r4, [%l7+4]; add.u32 %r6, %r4, 1; st.volatile.global.u32 [%l7+4], %r6; membar.gl;
        atom.release.gpu.global.exch.b32 %r5, [%l7], 0;
        WAIT: bar.warp.sync 0xffffffff;"""
    cell = np.zeros(2, np.uint32)
    seen = run(body, cell, steps=100000)
    assert cell.tolist() == [0, THREADS // 32]
    assert sorted(seen[::32].tolist()) == list(range(THREADS // 32))


def test_a_shared_histogram_counts_every_thread() -> None:
    body = """.shared .align 4 .b8 bins[64]; setp.lt.u32 %p0, %r2, 16; mul.wide.u32 %l1, %r2, 4; mov.u64 %l0, bins; add.u64 %l1, %l0, %l1;
        mov.u32 %r3, 0;
        @%p0 st.shared.u32 [%l1], %r3; bar.sync 0; mul.lo.u32 %r3, %r2, %r2; and.b32 %r3, %r3, 15; mul.wide.u32 %l2, %r3, 4;
        add.u64 %l2, %l0, %l2; red.shared.add.u32 [%l2], 1; bar.sync 0;
        mov.u32 %r4, 0; @%p0 ld.shared.u32 %r4, [%l1];"""
    seen = run(body, np.zeros(1, np.uint32)).reshape(5, 96)
    wanted = np.bincount(np.arange(96) ** 2 % 16, minlength=16)
    assert np.array_equal(seen[:, :16], np.tile(wanted, (5, 1)))
