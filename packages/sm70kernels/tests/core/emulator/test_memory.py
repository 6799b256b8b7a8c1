"""Loads and stores: widths and extension, vectors, cache and ordering qualifiers, every state space, generic addresses."""

import random

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from .harness import Row, check, entry

# Puts the address of the lane's own eight bytes of the second result array into %l0, and %a and %b there.
CELL = "ld.param.u64 %l0, [out1]; mul.wide.u32 %l1, %i, 8; add.u64 %l0, %l0, %l1; st.global.v2.b32 [%l0], {%a, %b};"


def extended(kind: str, a: int, to: int) -> int:
    width = int(kind[1:])
    value = a & ((1 << width) - 1)
    if kind[0] == "s" and value >> (width - 1):
        value -= 1 << width
    return value & ((1 << to) - 1)


def narrow_load(kind: str, to: int) -> Row:
    text = (
        f"{CELL} ld.global.{kind} %d, [%l0+1]; mov.u64 %q, 0;"
        if kind[1:] == "8"
        else f"{CELL} ld.global.{kind} %d, [%l0+2]; mov.u64 %q, 0;"
    )
    if int(kind[1:]) > 16:
        text = text.replace("+2", "+4" if kind[1:] == "32" else "")
    skip = {"8": 8, "16": 16, "32": 32, "64": 0}[kind[1:]]
    return Row(text, f"b{to} b64", "b32 b32", lambda a, b: (extended(kind, (b << 32 | a) >> skip, to), 0))


LOADS = [narrow_load(kind, to) for kind in ("u8", "s8", "b8") for to in (16, 32, 64)]
LOADS += [narrow_load(kind, to) for kind in ("u16", "s16", "b16") for to in (16, 32, 64)]
LOADS += [narrow_load(kind, to) for kind in ("u32", "s32", "b32") for to in (32, 64)]
LOADS += [narrow_load(kind, 64) for kind in ("u64", "s64", "b64")]


@pytest.mark.parametrize("row", LOADS, ids=[row.text.split("; ")[-2] + row.results for row in LOADS])
def test_loads_extend_to_the_register_as_their_type_says(row: Row) -> None:
    check(row)


@pytest.mark.parametrize(("kind", "register"), [("u8", "%a"), ("s8", "%a"), ("b8", "%h0"), ("u16", "%a"), ("b16", "%h0"), ("u32", "%a")])
def test_stores_write_the_low_bytes_of_the_register(kind: str, register: str) -> None:
    text = f"{CELL} cvt.u16.u32 %h0, %c; mov.u32 %a, %c; st.global.{kind} [%l0+4], {register}; ld.global.u64 %q, [%l0]; mov.u32 %d, 0;"
    width = int(kind[1:])

    def formula(a: int, b: int, c: int) -> tuple[int, int]:
        return 0, a | (b >> width << width | c & ((1 << width) - 1)) << 32

    check(Row(text, "b32 b64", "b32 b32 b32", formula))


VECTORS = [
    Row(f"{CELL} ld.global.v2.u32 {{%d, %r0}}, [%l0]; mov.b64 %q, {{%r0, %d}};", "b32 b64", "b32 b32", lambda a, b: (a, a << 32 | b)),
    Row(
        f"{CELL} ld.global.v2.u16 {{%h0, %h1}}, [%l0+4]; mov.b32 %d, {{%h1, %h0}}; mov.u64 %q, 1;",
        "b32 b64",
        "b32 b32",
        lambda a, b: (b >> 16 | b << 16 & 0xFFFFFFFF, 1),
    ),
    Row(
        f"{CELL} ld.global.v4.u16 {{%h0, %h1, %h2, %h3}}, [%l0]; mov.b64 %q, {{%h3, %h2, %h1, %h0}}; mov.u32 %d, 1;",
        "b32 b64",
        "b32 b32",
        lambda a, b: (1, b >> 16 | (b & 0xFFFF) << 16 | a >> 16 << 32 | (a & 0xFFFF) << 48),
    ),
    Row(
        f"{CELL} ld.global.v2.s8 {{%r0, %r1}}, [%l0]; add.s32 %d, %r0, %r1; mov.u64 %q, 1;",
        "b32 b64",
        "b32 b32",
        lambda a, b: ((extended("s8", a, 32) + extended("s8", a >> 8, 32)) & 0xFFFFFFFF, 1),
    ),
    Row(
        f"{CELL} ld.global.v4.u8 {{%r0, %r1, %r2, %r3}}, [%l0+4]; shl.b32 %r3, %r3, 8; or.b32 %d, %r3, %r0; mov.u64 %q, 1;",
        "b32 b64",
        "b32 b32",
        lambda a, b: (b & 255 | b >> 24 << 8, 1),
    ),
    Row(
        f"{CELL} mov.b32 {{%h0, %h1}}, %a; st.global.v2.u16 [%l0+4], {{%h1, %h0}}; ld.global.u64 %q, [%l0]; mov.u32 %d, 1;",
        "b32 b64",
        "b32 b32",
        lambda a, b: (1, a | (a >> 16) << 32 | (a & 0xFFFF) << 48),
    ),
    Row(
        f"{CELL} st.global.v4.u8 [%l0], {{%a, %b, %a, %b}}; ld.global.u64 %q, [%l0]; mov.u32 %d, 1;",
        "b32 b64",
        "b32 b32",
        lambda a, b: (1, (a & 255 | (b & 255) << 8) * 0x10001 | b << 32),
    ),
]


@pytest.mark.parametrize("row", VECTORS, ids=[row.text.split("; ", 4)[-1] for row in VECTORS])
def test_short_vectors_keep_the_order_of_their_elements(row: Row) -> None:
    check(row)


WIDE = [
    ("v4.b32", "%r0, %r1, %r2, %r3", 4),
    ("v4.f32", "%f0, %f1, %f2, %f3", 4),
    ("v2.b64", "%l2, %l3", 8),
    ("v2.f64", "%fd0, %fd1", 8),
]


@pytest.mark.parametrize(("kind", "registers", "size"), WIDE)
def test_sixteen_byte_vectors(kind: str, registers: str, size: int) -> None:
    body = f"""mov.u32 %r4, %tid.x; ld.param.u64 %l0, [x]; mul.wide.u32 %l1, %r4, 16; add.u64 %l0, %l0, %l1;
        ld.global.nc.{kind} {{{registers}}}, [%l0+16]; ld.param.u64 %l4, [y]; add.u64 %l4, %l4, %l1;
        st.global.{kind} [%l4], {{{", ".join(reversed(registers.split(", ")))}}};"""
    x = np.arange(33 * 16, dtype=np.uint8).reshape(33, 16)
    y = np.zeros((32, 16), np.uint8)
    emulate(entry("u64 x, u64 y", body), "probe", 1, 32, x, y)
    assert np.array_equal(y.reshape(32, -1, size), x[1:].reshape(32, -1, size)[:, ::-1])


QUALIFIED_LOADS = [
    "ld.global.nc",
    "ld.volatile.global",
    "ld.relaxed.gpu.global",
    "ld.relaxed.cta.global",
    "ld.acquire.gpu.global",
    "ld.acquire.sys.global",
    "ld.weak.global",
]
QUALIFIED_LOADS += [f"ld.global.{cache}" for cache in ("ca", "cg", "cs", "lu", "cv")] + [
    "ld.global.nc.ca",
    "ld",
    "ld.volatile",
    "ld.relaxed.gpu",
]
QUALIFIED_LOADS += ["ld.global.L1::no_allocate", "ld.global.nc.L1::no_allocate", "ld.global.L1::evict_last"]
QUALIFIED_STORES = [
    "st.volatile.global",
    "st.relaxed.gpu.global",
    "st.release.gpu.global",
    "st.release.cta.global",
    "st.weak.global",
    "st",
    "st.volatile",
    "st.release.gpu",
]
QUALIFIED_STORES += [f"st.global.{cache}" for cache in ("wb", "cg", "cs", "wt")] + ["st.global.L1::no_allocate"]


@pytest.mark.parametrize("load", QUALIFIED_LOADS)
def test_qualifiers_do_not_change_what_a_load_returns(load: str) -> None:
    text = f"ld.param.u64 %l0, [in0]; mul.wide.u32 %l1, %i, 4; add.u64 %l0, %l0, %l1; {load}.u32 %d, [%l0];"
    check(Row(text, "b32", "b32", lambda a: a))


@pytest.mark.parametrize("store", QUALIFIED_STORES)
def test_qualifiers_do_not_change_what_a_store_writes(store: str) -> None:
    check(
        Row(f"{CELL} {store}.u32 [%l0+4], %a; ld.global.u64 %q, [%l0]; mov.u32 %d, 1;", "b32 b64", "b32 b32", lambda a, b: (1, a | a << 32))
    )


def test_prefetches_and_fences_do_nothing_visible() -> None:
    text = f"""{CELL} prefetch.global.L1 [%l0]; prefetch.global.L2 [%l0]; prefetchu.L1 [%l0]; membar.cta; membar.gl; membar.sys;
        fence.acq_rel.gpu; fence.sc.cta; nanosleep.u32 100; .pragma "nounroll"; ld.global.u64 %q, [%l0]; mov.u32 %d, %a;"""
    check(Row(text, "b32 b64", "b32 b32", lambda a, b: (a, b << 32 | a)))


def test_shared_memory_is_addressed_by_symbol_register_and_offset() -> None:
    """Two arrays and dynamic memory in one block; 32-bit and 64-bit address registers; negative offsets."""
    outside = ".extern .shared .align 16 .b8 dynamic[];"
    body = """.shared .align 4 .b8 first[128]; .shared .align 4 .u32 second[32];
        mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; mov.u32 %r2, first; add.u32 %r2, %r2, %r1; mov.u64 %l0, second; cvt.u64.u32 %l1, %r1;
        add.u64 %l0, %l0, %l1;
        mov.u32 %r3, dynamic; add.u32 %r3, %r3, %r1; add.u32 %r4, %r0, 100; add.u32 %r5, %r0, 200; st.shared.u32 [%r2], %r0;
        st.shared.u32 [%l0], %r4;
        st.shared.u32 [%r3], %r5; bar.sync 0; ld.shared.u32 %r4, [first+8]; ld.shared.u32 %r5, [%l0]; add.u32 %r3, %r3, 4;
        ld.shared.u32 %r6, [%r3+-4];
        ld.shared.u32 %r7, [second+124]; ld.param.u64 %l2, [out]; mul.wide.u32 %l3, %r0, 16; add.u64 %l2, %l2, %l3;
        st.global.v4.u32 [%l2], {%r4, %r5, %r6, %r7};"""
    out = np.zeros((32, 4), np.uint32)
    emulate(entry("u64 out", body, outside), "probe", 1, 32, out, shared=128)
    lanes = np.arange(32)
    assert np.array_equal(out, np.stack([np.full(32, 2), lanes + 100, lanes + 200, np.full(32, 131)], 1))


def test_shared_memory_belongs_to_its_block() -> None:
    body = """.shared .align 4 .u32 cell; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; setp.eq.u32 %p0, %r1, 0;
        @%p0 st.shared.u32 [cell], %r0; bar.sync 0;
        ld.shared.u32 %r2, [cell]; mad.lo.u32 %r3, %r0, 64, %r1; ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %r3, 4; add.u64 %l0, %l0, %l1;
        st.global.u32 [%l0], %r2;"""
    out = np.zeros((300, 64), np.uint32)
    emulate(entry("u64 out", body), "probe", 300, 64, out)
    assert np.array_equal(out, np.repeat(np.arange(300)[:, None], 64, 1))


def test_constant_memory_holds_its_initial_values() -> None:
    outside = """.const .align 4 .u32 words[4] = {1, 0xFFFFFFFF, 3, 40}; .const .align 8 .f64 real = 0d400921FB54442D18;
        .const .align 4 .f32 singles[3] = {0f3F800000, 0fBF800000};
        .const .align 4 .b8 bytes[8] = {1, 2, 3, 255}; .global .align 4 .u32 table[3] = {7, 8, 9};"""
    body = """ld.const.u32 %r0, [words+4]; ld.const.f64 %fd0, [real]; mov.u64 %l0, words; mov.u32 %r1, %tid.x; and.b32 %r1, %r1, 3;
        mul.wide.u32 %l1, %r1, 4; add.u64 %l0, %l0, %l1;
        ld.const.u32 %r2, [%l0]; cvta.const.u64 %l2, %l0; ld.u32 %r3, [%l2]; ld.const.s8 %r4, [bytes+3]; ld.const.u32 %r5, [bytes+4];
        ld.const.f32 %f0, [singles+4]; mov.b32 %r6, %f0;
        ld.global.u32 %r7, [table+8]; cvt.rzi.u32.f64 %r1, %fd0; ld.param.u64 %l0, [out]; mov.u32 %n, %tid.x; mul.wide.u32 %l1, %n, 32;
        add.u64 %l0, %l0, %l1;
        st.global.v4.u32 [%l0], {%r0, %r1, %r2, %r3}; st.global.v4.u32 [%l0+16], {%r4, %r5, %r6, %r7};"""
    out = np.zeros((32, 8), np.uint32)
    emulate(entry("u64 out", ".reg .b32 %n; " + body, outside), "probe", 1, 32, out)
    for lane, row in enumerate(out.tolist()):
        word = (1, 0xFFFFFFFF, 3, 40)[lane & 3]
        assert row == [0xFFFFFFFF, 3, word, word, 0xFFFFFFFF, 0, 0xBF800000, 9]


def test_local_memory_is_private_to_the_thread() -> None:
    """Each lane fills an array with its own numbers, then reads it back through local and generic addresses in a lane-dependent order."""
    body = """.local .align 8 .b8 depot[64]; mov.u32 %r0, %tid.x; mov.u64 %l0, depot; mov.u32 %r1, 0;
        FILL: mad.lo.u32 %r2, %r0, 100, %r1; mul.wide.u32 %l1, %r1, 4; add.u64 %l2, %l0, %l1; st.local.u32 [%l2], %r2; add.u32 %r1, %r1, 1;
        setp.lt.u32 %p0, %r1, 16; @%p0 bra FILL;
        and.b32 %r3, %r0, 15; mul.wide.u32 %l1, %r3, 4; add.u64 %l2, %l0, %l1; ld.local.u32 %r4, [%l2]; cvta.local.u64 %l3, %l2;
        ld.u32 %r5, [%l3]; ld.local.v2.u32 {%r6, %r7}, [depot+8];
        ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %r0, 16; add.u64 %l0, %l0, %l1; st.global.v4.u32 [%l0], {%r4, %r5, %r6, %r7};"""
    out = np.zeros((64, 4), np.uint32)
    emulate(entry("u64 out", body), "probe", 1, 64, out)
    lanes = np.arange(64)
    assert np.array_equal(out, np.stack([lanes * 100 + lanes % 16] * 2 + [lanes * 100 + 2, lanes * 100 + 3], 1))


def test_one_generic_instruction_reaches_a_different_space_in_every_lane() -> None:
    """Lanes pick shared, global or local memory by lane modulo 3, add their number there, and read it back through the typed address."""
    body = """.shared .align 4 .u32 tile[32]; .local .align 4 .u32 own; .reg .b32 %n;
        mov.u32 %n, %tid.x; mul.wide.u32 %l1, %n, 4; mov.u64 %l2, tile; add.u64 %l2, %l2, %l1; cvta.shared.u64 %l3, %l2;
        ld.param.u64 %l4, [x]; cvta.to.global.u64 %l4, %l4; add.u64 %l4, %l4, %l1;
        cvta.global.u64 %l5, %l4; mov.u64 %l6, own; cvta.local.u64 %l7, %l6; mov.u32 %r0, 1000; st.shared.u32 [%l2], %r0;
        st.local.u32 [own], %r0; st.global.u32 [%l4], %r0;
        rem.u32 %r1, %n, 3; setp.eq.u32 %p0, %r1, 0; setp.eq.u32 %p1, %r1, 1; selp.b64 %l0, %l3, %l5, %p0;
        @!%p0 selp.b64 %l0, %l5, %l7, %p1;
        ld.u32 %r2, [%l0]; add.u32 %r2, %r2, %n; st.u32 [%l0], %r2; cvta.to.shared.u64 %l3, %l3; ld.shared.u32 %r3, [%l3];
        ld.global.u32 %r4, [%l4]; ld.local.u32 %r5, [%l6];
        mov.u32 %r6, 0; ld.param.u64 %l0, [out]; mul.wide.u32 %l1, %n, 16; add.u64 %l0, %l0, %l1;
        st.global.v4.u32 [%l0], {%r3, %r4, %r5, %r6};"""
    x, out = np.zeros(32, np.uint32), np.zeros((32, 4), np.uint32)
    emulate(entry("u64 x, u64 out", body), "probe", 1, 32, x, out)
    for lane in range(32):
        assert out[lane].tolist() == [1000 + lane * (lane % 3 == space) for space in range(3)] + [0]


def test_parameters_of_every_width_are_read_as_passed() -> None:
    parameters = "u8 a, s8 b, u16 c, s16 d, u32 e, s32 f, u64 g, s64 h, f32 i, f64 j, u64 out"
    body = """ld.param.u8 %r0, [a]; ld.param.s8 %r1, [b]; ld.param.u16 %r2, [c]; ld.param.s16 %r3, [d]; ld.param.u32 %r4, [e];
        ld.param.s32 %l1, [f]; ld.param.u64 %l2, [g];
        ld.param.s64 %l3, [h]; ld.param.f32 %f0, [i]; ld.param.f64 %fd0, [j]; ld.param.u64 %l0, [out]; cvt.u64.u32 %l4, %r0;
        st.global.u64 [%l0], %l4; cvt.s64.s32 %l4, %r1;
        st.global.u64 [%l0+8], %l4; cvt.u64.u32 %l4, %r2; st.global.u64 [%l0+16], %l4; cvt.s64.s32 %l4, %r3; st.global.u64 [%l0+24], %l4;
        cvt.u64.u32 %l4, %r4; st.global.u64 [%l0+32], %l4;
        st.global.u64 [%l0+40], %l1; st.global.u64 [%l0+48], %l2; st.global.u64 [%l0+56], %l3; cvt.f64.f32 %fd1, %f0;
        st.global.f64 [%l0+64], %fd1; st.global.f64 [%l0+72], %fd0;"""
    rng = random.Random(4)
    for _ in range(3):
        values = [
            rng.randrange(256),
            rng.randrange(-128, 128),
            rng.randrange(1 << 16),
            rng.randrange(-(1 << 15), 1 << 15),
            rng.randrange(1 << 32),
        ]
        values += [rng.randrange(-(1 << 31), 1 << 31), rng.randrange(1 << 64), rng.randrange(-(1 << 63), 1 << 63)]
        out = np.zeros(10, np.int64)
        emulate(entry(parameters, body), "probe", 1, 1, *values, 1.5, 0.1, out)
        assert [int(x) % (1 << 64) for x in out[:8]] == [value % (1 << 64) for value in values]
        assert out[8:].view(np.float64).tolist() == [1.5, 0.1]
