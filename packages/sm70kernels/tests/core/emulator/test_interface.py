"""emulate(): arguments, errors, unknown instructions, the cache of translated modules."""

import time

import numpy as np
import pytest
import torch

from sm70kernels.emulator import Counters, EmulatorError, Fault, UnknownInstruction, emulate

from .harness import entry

COPY = entry(
    "u64 x, u64 y, u32 n",
    """mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r0, %r0, %r1, %r2; ld.param.u32 %r3, [n];
        setp.ge.u32 %p0, %r0, %r3; @%p0 ret;
    mul.wide.u32 %l0, %r0, 4; ld.param.u64 %l1, [x]; ld.param.u64 %l2, [y]; add.u64 %l1, %l1, %l0; add.u64 %l2, %l2, %l0;
        ld.global.b32 %r4, [%l1]; st.global.b32 [%l2], %r4;""",
    name="copy_words",
)


@pytest.mark.parametrize(("grid", "block"), [(4, 32), ((4,), (32,)), ((4, 1), (32, 1, 1)), ((4, 1, 1), 32)])
def test_grid_and_block_are_numbers_or_tuples(grid: object, block: object) -> None:
    x, y = np.arange(100, dtype=np.int32), np.zeros(100, np.int32)
    counters = emulate(COPY, "copy_words", grid, block, x, y, 100)
    assert isinstance(counters, Counters)
    assert np.array_equal(x, y)


def test_tensors_are_written_in_place() -> None:
    x, y = torch.arange(64, dtype=torch.float32), torch.zeros(64)
    emulate(COPY, "copy_words", 2, 32, x, y, 64)
    assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.bool, torch.float64])
def test_arrays_of_any_type_are_bytes_to_a_pointer(dtype: torch.dtype) -> None:
    x = torch.arange(64).to(dtype)
    y = torch.zeros(64, dtype=dtype)
    emulate(COPY, "copy_words", 1, 1024, x, y, x.numel() * x.element_size() // 4)
    assert torch.equal(x, y)


def test_views_of_one_storage_overlap_as_they_do_in_memory() -> None:
    storage = np.arange(100, dtype=np.int32)
    emulate(COPY, "copy_words", 1, 32, storage[:32], storage[60:92], 32)
    assert storage[60:92].tolist() == list(range(32))
    assert storage[:60].tolist() == list(range(60))
    shifted = torch.arange(64, dtype=torch.int32)
    emulate(COPY, "copy_words", 1, 1, shifted[8:], shifted[:8], 1)
    assert shifted[0] == 8


def test_what_lies_between_the_elements_of_a_strided_array_is_kept() -> None:
    storage = np.zeros((8, 4), np.int32)
    emulate(COPY, "copy_words", 1, 32, np.arange(32, dtype=np.int32), storage[:, :2], 26)
    assert storage.reshape(-1).tolist() == [*range(26), *[0] * 6]


def test_a_scalar_array_and_an_empty_one_are_pointers() -> None:
    y = np.zeros((), np.int32)
    emulate(COPY, "copy_words", 1, 1, np.array(7, np.int32), y, 1)
    assert y == 7
    emulate(COPY, "copy_words", 1, 32, np.zeros(0, np.int32), np.zeros(0, np.int32), 0)


SCALARS = entry(
    "u32 a, f32 b, u8 c, f64 d, u64 out",
    """ld.param.u32 %r0, [a]; ld.param.u32 %r1, [b]; ld.param.u8 %r2, [c]; ld.param.f64 %fd0, [d]; cvt.rn.f32.f64 %f0, %fd0;
    ld.param.u64 %l0, [out]; mov.b32 %r3, %f0; st.global.v4.b32 [%l0], {%r0, %r1, %r2, %r3};""",
)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ((7, 1.5, True, 2.5), (7, 0x3FC00000, 1, 0x40200000)),
        ((-1, 2, False, 0.1), (0xFFFFFFFF, 0x40000000, 0, 0x3DCCCCCD)),
        ((np.int32(-2), np.float32(0.1), np.bool_(True), np.float64(1)), (0xFFFFFFFE, 0x3DCCCCCD, 1, 0x3F800000)),
        ((0xFFFFFFFF, 0.1, 255, float("inf")), (0xFFFFFFFF, 0x3DCCCCCD, 255, 0x7F800000)),
    ],
)
def test_numbers_are_packed_as_their_parameters_say(values: tuple[object, ...], wanted: tuple[int, ...]) -> None:
    out = np.zeros(4, np.uint32)
    emulate(SCALARS, "probe", 1, 1, *values, out)
    assert tuple(out.tolist()) == wanted


WORDS = np.zeros(4, np.int32)
WRONG = {
    "too few": ((WORDS, WORDS), "3"),
    "too many": ((WORDS, WORDS, 4, 5), "3"),
    "a number for a pointer": ((1.5, WORDS, 4), "x"),
    "an array for a number": ((WORDS, WORDS, WORDS), "n"),
    "a fraction for an integer": ((WORDS, WORDS, 1.5), "n"),
    "an integer that does not fit": ((WORDS, WORDS, 1 << 32), "n"),
    "none for a number": ((WORDS, WORDS, None), "n"),
    "a string": (("x", WORDS, 4), "x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_anything_runs(name: str) -> None:
    arguments, mention = WRONG[name]
    with pytest.raises(ValueError, match="copy_words") as error:
        emulate(COPY, "copy_words", 1, 4, *arguments)
    assert mention in str(error.value)
    assert not isinstance(error.value, EmulatorError)


def test_the_error_of_a_mistyped_argument_tells_its_position_what_was_expected_and_what_came() -> None:
    with pytest.raises(ValueError, match="copy_words") as error:
        emulate(COPY, "copy_words", 1, 4, WORDS, WORDS, 2.5)
    for part in ("2", "u32", "float"):
        assert part in str(error.value)


def test_a_kernel_that_is_not_in_the_module_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="no_such") as error:
        emulate(COPY, "no_such", 1, 1)
    assert "copy_words" in str(error.value)


@pytest.mark.parametrize(("grid", "block"), [(1, 0), (1, 1025), ((1, 1, 1, 1), 32), (1, (32, 33)), (-1, 1), (1, (1, 1, 65))])
def test_impossible_launch_shapes_are_refused(grid: object, block: object) -> None:
    with pytest.raises(ValueError, match="grid" if grid != 1 else "block"):
        emulate(COPY, "copy_words", grid, block, WORDS, WORDS.copy(), 4)


UNKNOWN = [
    "frobnicate.u32 %r0, %r1;",
    "add.u33 %r0, %r0, %r1;",
    "add.rn.u32 %r0, %r0, %r1;",
    "wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r0}, [%l0];",
    "cp.async.ca.shared.global [%r0], [%l0], 16;",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r4}, {%f4, %f5, %f6, %f7};",
    "tex.1d.v4.f32.s32 {%f0, %f1, %f2, %f3}, [t, {%r0}];",
]


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_instruction_is_named_even_where_nothing_executes_it(text: str) -> None:
    body = f".loc 1 42 0\nbra END;\n.loc 1 77 0\n{text}\nEND:"
    ptx = entry("", body, '.file 1 "/somewhere/odd.cu"')
    with pytest.raises(UnknownInstruction) as error:
        emulate(ptx, "probe", 1, 32)
    assert text.split()[0].rstrip(";") in str(error.value)
    assert "odd.cu:77" in str(error.value)
    assert isinstance(error.value, EmulatorError)
    assert not isinstance(error.value, Fault)


def test_translation_is_done_once_for_a_text() -> None:
    body = "mov.u32 %r0, %tid.x;" + " add.u32 %r0, %r0, 1;" * 4000 + " ld.param.u64 %l0, [y]; st.global.u32 [%l0], %r0;"
    ptx = entry("u64 y", body)
    y = np.zeros(1, np.uint32)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        emulate(ptx, "probe", 1, 1, y)
        seconds.append(time.perf_counter() - start)
    assert y[0] == 4000
    assert min(seconds[1:]) < seconds[0] / 2


def test_without_checks_results_are_the_same() -> None:
    x, y = np.arange(1000, dtype=np.int32), np.zeros(1000, np.int32)
    emulate(COPY, "copy_words", 8, 128, x, y, 1000, check=False)
    assert np.array_equal(x, y)


def test_a_register_that_nobody_wrote_is_neither_zero_nor_a_number() -> None:
    ptx = entry("u64 out", "ld.param.u64 %l0, [out]; st.global.b32 [%l0], %r1; st.global.f32 [%l0+4], %f1; st.global.b64 [%l0+8], %l1;")
    out = np.zeros(4, np.uint32)
    emulate(ptx, "probe", 1, 1, out)
    assert out.tolist() == [0xFFFFFFFF] * 4
    assert np.isnan(out.view(np.float32)).all()
