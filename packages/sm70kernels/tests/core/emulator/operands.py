"""Operands of the instruction tables: the edge values of each kind, crossed, and then seeded random ones.

A kind is a PTX type (s32, f16x2, pred, ...) or one of the names below for an operand with a narrower meaning:
`amount` a shift distance, `field` a bit-field bound (the manual restricts them to 0..255), `near` an f32 of moderate size, `angle` an
f32 in [-pi, pi].
"""

import functools
import itertools
import random
import struct

from .softfloat import FORMATS, Format

BITS = {"pred": 32, "f16x2": 32, "amount": 32, "field": 32, "near": 32, "angle": 32}
AMOUNTS = [0, 1, 2, 7, 8, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64, 65, 127, 128, 255, 256, 257, 1 << 16, (1 << 32) - 1]
LIMIT = 900


def bits_of(kind: str) -> int:
    """Width of a kind's register."""
    return BITS[kind] if kind in BITS else int(kind[1:])


def signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) & 1 else bits


def integers(width: int) -> list[int]:
    top = 1 << width
    half = top >> 1
    picked = [0, 1, 2, 3, 7, half - 1, half, half + 1, top - 1, top - 2, top // 3, top // 5 * 3, 1 << (width // 2), (1 << (width // 2)) - 1]
    return list(dict.fromkeys(picked))


def floats(form: Format) -> list[int]:
    """Zeros, ones, thirds, the ends of the normal and subnormal ranges, halfway cases around one, infinities and NaNs, both signs."""
    tiny = 1 << form.fraction
    one = form.one
    picked = [0, 1, 2, tiny >> 1, tiny - 1, tiny, tiny + 1, one - 1, one, one + 1, one + 2, one + (tiny >> 1), one + tiny, one + tiny + 1]
    picked += [one - (form.fraction + 1) * tiny, one - form.fraction * tiny, one + form.fraction * tiny, form.inf - 1, form.inf, form.nan]
    picked += [one - tiny, one + tiny // 3, form.inf | (tiny >> 1)]
    return [sign | bits for bits in picked for sign in (0, form.minus)]


def edges(kind: str) -> list[int]:
    """The edge values of a kind."""
    if kind == "pred":
        return [0, 1]
    if kind in ("amount", "field"):
        return [x for x in AMOUNTS if kind == "amount" or x < 256]
    if kind in ("near", "angle"):
        return [struct.unpack("<I", struct.pack("<f", x))[0] for x in (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -2.0, 3.0, -3.0)]
    if kind == "f16x2":
        single = floats(FORMATS["f16"])
        return [low | high << 16 for low, high in zip(single, single[7:] + single[:7], strict=True)]
    return floats(FORMATS[kind]) if kind in FORMATS else integers(bits_of(kind))


def some_float(form: Format, rng: random.Random, spread: int) -> int:
    """A finite number of sparse or dense fraction whose exponent lies within `spread` of one's."""
    ones = (1 << form.fraction) - 1
    fraction = rng.randrange(ones + 1)
    shape = rng.randrange(4)
    if shape == 1:
        fraction &= ones << rng.randrange(form.fraction)
    elif shape == 2:
        fraction |= ones >> rng.randrange(form.fraction)
    bias = (1 << (form.exponent - 1)) - 1
    exponent = min(max(bias + rng.randint(-spread, spread), 0), 2 * bias)
    return rng.getrandbits(1) << (form.bits - 1) | exponent << form.fraction | fraction


def some(kind: str, rng: random.Random) -> int:
    """A random operand."""
    if kind == "pred":
        return rng.getrandbits(1)
    if kind in ("amount", "field"):
        return rng.choice(edges(kind)) if rng.getrandbits(1) else rng.randrange(70)
    if kind == "near":
        return some_float(FORMATS["f32"], rng, 6)
    if kind == "angle":
        return struct.unpack("<I", struct.pack("<f", rng.uniform(-3.141, 3.141)))[0]
    if kind == "f16x2":
        return some("f16", rng) | some("f16", rng) << 16
    if kind in FORMATS:
        form = FORMATS[kind]
        spread = rng.choice((2, form.fraction // 2, form.fraction + 2, 1 << form.exponent))
        return some_float(form, rng, spread)
    width = bits_of(kind)
    return rng.getrandbits(width) >> (rng.randrange(width) if rng.getrandbits(1) else 0)


@functools.cache
def _operands(kinds: tuple[str, ...], extra: int) -> list[tuple[int, ...]]:
    rng = random.Random(f"70 {kinds}")
    crossed = list(itertools.product(*map(edges, kinds)))
    if len(crossed) > LIMIT:
        crossed = rng.sample(crossed, LIMIT)
    return crossed + [tuple(some(kind, rng) for kind in kinds) for _ in range(extra)]


def operands(kinds: list[str], extra: int = 250) -> list[tuple[int, ...]]:
    """Rows of operands of `kinds`: all crossings of edge values (a seeded sample where they are too many), then `extra` random rows."""
    return list(_operands(tuple(kinds), extra))
