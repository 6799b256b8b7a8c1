"""CUDA's own functions as NVRTC compiles them for SM70: integer intrinsics, half precision, the float and double maths library.

Integer and half results must be equal; maths functions are held to the error CUDA's programming guide states for them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sm70kernels.emulator import emulate

from .operands import operands, signed
from .softfloat import F16, F32, Fraction, fma, ordinal
from .sources import compile_cuda

M = 0xFFFFFFFF


class Function(NamedTuple):
    """An expression of unsigned a, b, c, and its value."""

    text: str
    value: Callable[[int, int, int], int]


def bytes_of(a: int) -> list[int]:
    return [a >> s & 255 for s in (0, 8, 16, 24)]


def each(function: Callable[[int, int], int], a: int, b: int) -> list[int]:
    return [function(x, y) for x, y in zip(bytes_of(a), bytes_of(b), strict=True)]


def packed(values: list[int]) -> int:
    return sum((value & 255) << 8 * i for i, value in enumerate(values))


def s(a: int) -> int:
    return signed(a, 32)


def lows(*values: int) -> list[int]:
    return [value & 0xFFFF for value in values]


def half(a: int) -> Fraction | float:
    return F16.value(a & 0xFFFF)


def halves(function: Callable[[int, int], int]) -> Callable[[int, int, int], int]:
    return lambda a, b, c: function(a & 0xFFFF, b & 0xFFFF) | function(a >> 16, b >> 16) << 16


INTEGER = [
    Function("__popc(a) + __clz(b) + __ffs(c)", lambda a, b, c: a.bit_count() + 32 - b.bit_length() + (c & -c).bit_length()),
    Function("__brev(a)", lambda a, b, c: int(f"{a:032b}"[::-1], 2)),
    Function("__byte_perm(a, b, c & 0x7777)", lambda a, b, c: packed([(b << 32 | a) >> 8 * (c >> 4 * i & 7) & 255 for i in range(4)])),
    Function("__funnelshift_l(a, b, c)", lambda a, b, c: (b << 32 | a) << (c & 31) >> 32 & M),
    Function("__funnelshift_rc(a, b, c)", lambda a, b, c: (b << 32 | a) >> min(c, 32) & M),
    Function("__mulhi((int)a, (int)b)", lambda a, b, c: s(a) * s(b) >> 32 & M),
    Function("__umulhi(a, b)", lambda a, b, c: a * b >> 32),
    Function("__umul24(a, b)", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) & M),
    Function("__usad(a, b, c)", lambda a, b, c: abs(a - b) + c & M),
    Function("__sad((int)a, (int)b, c)", lambda a, b, c: abs(s(a) - s(b)) + c & M),
    Function("__uhadd(a, b) ^ __urhadd(a, b)", lambda a, b, c: (a + b >> 1) ^ (a + b + 1 >> 1)),
    Function("__dp4a((int)a, (int)b, (int)c)", lambda a, b, c: c + sum(each(lambda x, y: signed(x, 8) * signed(y, 8), a, b)) & M),
    Function("__vadd4(a, b)", lambda a, b, c: packed(each(lambda x, y: x + y, a, b))),
    Function("__vmaxu4(a, b)", lambda a, b, c: packed(each(max, a, b))),
    Function("__vcmpgts2(a, b)", halves(lambda x, y: 0xFFFF * (signed(x, 16) > signed(y, 16)))),
    Function("a / (b | 1) + a % (c | 1)", lambda a, b, c: a // (b | 1) + a % (c | 1) & M),
    Function("(int)a / 7 - (int)b % 10", lambda a, b, c: int(Fraction(s(a), 7)) - int(math.fmod(s(b), 10)) & M),
    Function("(unsigned)(((unsigned long long)a << 32 | b) / (c | 1))", lambda a, b, c: (a << 32 | b) // (c | 1) & M),
    Function("__half_as_ushort(__float2half_rn(__uint_as_float(a)))", lambda a, b, c: F16.round(F32.value(a), "rn", a >> 31)),
    Function("__float_as_uint(__half2float(__ushort_as_half(a)))", lambda a, b, c: F32.round(F16.value(a & 0xFFFF), "rn", a >> 15 & 1)),
    Function("(unsigned)__half2int_rz(__ushort_as_half(a))", lambda a, b, c: half_to_int(a & 0xFFFF)),
    Function("bits(__hfma2(pair(a), pair(b), pair(c)))", lambda *x: fma(F16, *lows(*x)) | fma(F16, *lows(*(y >> 16 for y in x))) << 16),
    Function("(unsigned)__hlt(__low2half(pair(a)), __low2half(pair(b)))", lambda a, b, c: int(half(a) < half(b))),
    Function("bits(__hadd2(pair(a), pair(b)))", halves(lambda x, y: fma(F16, x, F16.one, y))),
    Function("bits(__hmax2(pair(a), pair(b)))", halves(lambda x, y: larger(x, y))),
    Function("bits(__halves2half2(__high2half(pair(a)), __low2half(pair(b))))", lambda a, b, c: a >> 16 | (b & 0xFFFF) << 16),
    Function("bits(__hgeu2(pair(a), pair(b)))", halves(lambda x, y: 0 if F16.value(x) < F16.value(y) else F16.one)),
]  # fmt: skip


def half_to_int(a: int) -> int:
    value = F16.value(a)
    if isinstance(value, float):
        return 0 if math.isnan(value) else 0x7FFFFFFF if value > 0 else 0x80000000
    return math.trunc(value) & M


def larger(x: int, y: int) -> int:
    if F16.is_nan(x) or F16.is_nan(y):
        return F16.nan if F16.is_nan(x) and F16.is_nan(y) else y if F16.is_nan(x) else x
    return max(x, y, key=lambda z: (F16.value(z), not z & F16.minus))


def same(text: str, got: int, wanted: int) -> bool:
    """Equal bits; where halves come out, any NaN for a NaN."""
    if got == wanted:
        return True
    forms = (0, 16) if text.startswith("bits") else (0,) if "float2half" in text else ()
    if "half2float" in text:
        return F32.is_nan(got) and F32.is_nan(wanted)
    parts = [(got >> at & 0xFFFF, wanted >> at & 0xFFFF) for at in forms]
    return bool(parts) and all(x == y or (F16.is_nan(x) and F16.is_nan(y)) for x, y in parts)


def test_integer_and_half_intrinsics() -> None:
    """One kernel evaluates every expression for every row of operands."""
    lines = " ".join(f"y[{i} * n + i] = {function.text};" for i, function in enumerate(INTEGER))
    source = f"""#include <cuda_fp16.h>
        __device__ __half2 pair(unsigned a) {{ return *(__half2*)&a; }}
        __device__ unsigned bits(__half2 a) {{ return *(unsigned*)&a; }}
        extern "C" __global__ void probe(const unsigned* x, unsigned* y, int n) {{
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i >= n) return;
            unsigned a = x[3 * i], b = x[3 * i + 1], c = x[3 * i + 2];
            {lines}
        }}"""
    rows = operands(["u32", "u32", "amount"]) + operands(["f16x2", "f16x2", "f16x2"]) + operands(["f32", "u32", "u32"])
    x, y = np.array(rows, np.uint32), np.zeros((len(INTEGER), len(rows)), np.uint32)
    emulate(compile_cuda(source), "probe", -(-len(rows) // 128), 128, x, y, len(rows))
    for function, results in zip(INTEGER, y.tolist(), strict=True):
        wrong = [(row, got) for row, got in zip(rows, results, strict=True) if not same(function.text, got, function.value(*row))]
        assert not wrong, f"{function.text}: {len(wrong)} of {len(rows)} differ: {wrong[:4]}"


FLOATS = {
    "expf(a)": (math.exp, -80, 80, 2),
    "exp2f(a)": (lambda a: 2.0**a, -120, 120, 2),
    "logf(a)": (math.log, 1e-30, 1e30, 1),
    "log1pf(a)": (math.log1p, -0.9, 50, 1),
    "expm1f(a)": (math.expm1, -5, 5, 1),
    "sqrtf(a)": (math.sqrt, 0, 1e30, 0),
    "rsqrtf(a)": (lambda a: 1 / math.sqrt(a), 1e-30, 1e30, 2),
    "sinf(a)": (math.sin, -300000, 300000, 2),
    "cosf(a)": (math.cos, -30, 30, 2),
    "tanhf(a)": (math.tanh, -10, 10, 2),
    "erff(a)": (math.erf, -4, 4, 2),
    "powf(fabsf(a), 1.7f)": (lambda a: abs(a) ** float(np.float32(1.7)), -1000, 1000, 4),
    "fmodf(a, 0.37f)": (lambda a: math.fmod(a, float(np.float32(0.37))), -1000, 1000, 0),
    "a / 3.7f": (lambda a: a / float(np.float32(3.7)), -1e30, 1e30, 0),
    "1.0f / (1.0f + expf(-a))": (lambda a: 1 / (1 + math.exp(-a)), -20, 20, 4),
    "rintf(a)": (lambda a: float(round(a)), -100, 100, 0),
    "floorf(a) + ceilf(a) + truncf(a)": (lambda a: float(math.floor(a) + math.ceil(a) + math.trunc(a)), -100, 100, 0),
    "(float)lrintf(a) + (float)(int)a": (lambda a: float(round(a) + math.trunc(a)), -1e4, 1e4, 0),
    "(float)(exp((double)a) - 1.0 / (double)a)": (lambda a: math.exp(a) - 1 / a, 0.1, 20, 1),
    "(float)sqrt((double)a)": (math.sqrt, 0, 1e30, 0),
    "fmaf(a, a, -1.5f)": (lambda a: F32.value(F32.round(Fraction(a) * Fraction(a) - Fraction(3, 2))), -3, 3, 0),
}


def test_float_functions_are_within_their_documented_error() -> None:
    names = list(FLOATS)
    count = 400
    lines = " ".join(f"{{ float a = x[{i} * n + i]; y[{i} * n + i] = {name}; }}" for i, name in enumerate(names))
    source = f"""extern "C" __global__ void probe(const float* x, float* y, int n) {{
        int i = threadIdx.x;
        {lines}
    }}"""
    rng = np.random.default_rng(5)
    x = np.stack([rng.uniform(low, high, count).astype(np.float32) for _, low, high, _ in FLOATS.values()])
    y = np.zeros_like(x)
    emulate(compile_cuda(source), "probe", 1, count, x, y, count)
    for name, given, results in zip(names, x.tolist(), y.view(np.uint32).tolist(), strict=True):
        function, _, _, ulps = FLOATS[name]
        for a, got in zip(given, results, strict=True):
            wanted = F32.round(Fraction(function(a)), "rn", math.copysign(1, a) < 0)
            assert abs(ordinal(F32, got) - ordinal(F32, wanted)) <= ulps, f"{name} of {a}: {got:#x}, not {wanted:#x} within {ulps} ulp"
