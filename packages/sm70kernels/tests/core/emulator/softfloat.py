"""IEEE 754 arithmetic from its definition: an operand is a sign and an exact fraction, a result is one rounding of an exact value.

A format's numbers travel as bit patterns (ints). Zero keeps its sign; a NaN result is the format's canonical one: all
bits but the sign set.
Rounding modes carry their PTX names: rn nearest even, rz toward zero, rm down, rp up.
"""

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

MODES = ("rn", "rz", "rm", "rp")
Exact = Fraction | float  # a finite value, or the float inf or nan


@dataclass(frozen=True)
class Format:
    """A binary interchange format of 1 + `exponent` + `fraction` bits."""

    exponent: int
    fraction: int

    @functools.cached_property
    def bits(self) -> int:
        return 1 + self.exponent + self.fraction

    @functools.cached_property
    def minus(self) -> int:
        """The bit of the sign."""
        return 1 << (self.bits - 1)

    @functools.cached_property
    def inf(self) -> int:
        return ((1 << self.exponent) - 1) << self.fraction

    @functools.cached_property
    def nan(self) -> int:
        return self.minus - 1

    @functools.cached_property
    def one(self) -> int:
        return ((1 << (self.exponent - 1)) - 1) << self.fraction

    @functools.cached_property
    def lowest(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent - 1))

    def is_nan(self, bits: int) -> bool:
        return bits & ~self.minus > self.inf

    def is_subnormal(self, bits: int) -> bool:
        return 0 < bits & ~self.minus < 1 << self.fraction

    def flush(self, bits: int) -> int:
        """A subnormal number becomes the zero of its sign."""
        return bits & self.minus if self.is_subnormal(bits) else bits

    @functools.lru_cache(1 << 14)  # noqa: B019  (the three formats live as long as the module)
    def value(self, bits: int) -> Exact:
        """The number of a bit pattern; both zeros give 0."""
        size = bits & ~self.minus
        if size >= self.inf:
            return math.nan if size > self.inf else math.copysign(math.inf, -1 if bits & self.minus else 1)
        power, rest = size >> self.fraction, size & ((1 << self.fraction) - 1)
        scale = max(power, 1) - 1 + self.lowest - self.fraction
        whole = rest | (bool(power) << self.fraction)
        magnitude = Fraction(whole << scale) if scale >= 0 else Fraction(whole, 1 << -scale)
        return -magnitude if bits & self.minus else magnitude

    def round(self, value: Exact, mode: str = "rn", zero: int = 0) -> int:
        """The bit pattern nearest to `value` as `mode` says; `zero` is the sign of a result whose exact value is 0."""
        if isinstance(value, float):
            return self.nan if math.isnan(value) else self.inf | (self.minus if value < 0 else 0)
        if value == 0:
            return self.minus if zero else 0
        sign, size = (1, -value) if value < 0 else (0, value)
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        exponent -= size < (Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent))
        exponent = max(exponent, self.lowest)
        shift = exponent - self.fraction
        top, bottom = (size.numerator, size.denominator << shift) if shift >= 0 else (size.numerator << -shift, size.denominator)
        whole, rest = divmod(top, bottom)
        away = {"rn": (2 * rest, whole & 1) > (bottom, 0), "rz": False, "rm": rest and sign, "rp": rest and not sign}[mode]
        bits = whole + bool(away) + ((exponent - self.lowest) << self.fraction)
        if bits >= self.inf:
            bits = self.inf if mode == "rn" or mode == ("rm" if sign else "rp") else self.inf - 1
        return bits | (sign << (self.bits - 1))


F16, F32, F64 = Format(5, 10), Format(8, 23), Format(11, 52)
FORMATS = {"f16": F16, "f32": F32, "f64": F64}


def finish(form: Format, bits: int, ftz: bool = False, sat: bool = False) -> int:
    """Apply `.ftz` and `.sat` to a rounded result: `.sat` clamps to [+0, 1] and turns NaN into +0."""
    if sat:
        if form.is_nan(bits) or bits & form.minus:
            return 0
        bits = min(bits, form.one)
    return form.flush(bits) if ftz else bits


def borderline(form: Format, rounded: int, truncated: int) -> bool:
    """Whether only rounding lifts a result out of the subnormal range."""
    return form.is_subnormal(truncated) and not form.is_subnormal(rounded)


def add(form: Format, a: int, b: int, mode: str = "rn") -> int:
    return fma(form, a, form.one, b, mode)


def multiply(form: Format, a: int, b: int, mode: str = "rn") -> int:
    """a * b; unlike a fused sum with zero it keeps the sign of a zero product."""
    x, y = form.value(a), form.value(b)
    sign = ((a ^ b) & form.minus) and 1
    if isinstance(x, float) or isinstance(y, float):
        if x != x or y != y or x == 0 or y == 0:
            return form.nan
        return form.inf | (sign << (form.bits - 1))
    return form.round(x * y, mode, sign)


def fma(form: Format, a: int, b: int, c: int, mode: str = "rn") -> int:
    """a * b + c with one rounding."""
    x, y, z = form.value(a), form.value(b), form.value(c)
    negative = bool((a ^ b) & form.minus)
    if isinstance(x, float) or isinstance(y, float):
        if x != x or y != y or z != z or x == 0 or y == 0:
            return form.nan
        if isinstance(z, float) and bool(c & form.minus) != negative:
            return form.nan
        return form.inf | (negative << (form.bits - 1))
    if isinstance(z, float):
        return form.nan if z != z else c
    total = x * y + z
    same = negative == bool(c & form.minus)
    zero = negative if same and x * y == 0 else mode == "rm"
    return form.round(total, mode, zero)


def divide(form: Format, a: int, b: int, mode: str = "rn") -> int:
    x, y = form.value(a), form.value(b)
    sign = ((a ^ b) & form.minus) and 1
    both = isinstance(x, float) and isinstance(y, float)
    if x != x or y != y or both or (x == 0 and y == 0):
        return form.nan
    if isinstance(x, float) or y == 0:
        return form.inf | (sign << (form.bits - 1))
    return sign << (form.bits - 1) if isinstance(y, float) else form.round(x / y, mode, sign)


def root(form: Format, a: int, mode: str = "rn") -> int:
    """Square root: the integer root of the value scaled by 4**k, and a sticky part below its last bit when it is not exact."""
    x = form.value(a)
    if x == 0:
        return a
    if x != x or a & form.minus:
        return form.nan
    if isinstance(x, float):
        return form.inf
    scale = form.fraction + 2 - form.lowest
    whole = (x.numerator << (2 * scale)) // x.denominator
    floor = math.isqrt(whole)
    exact = floor * floor == whole and whole * x.denominator == x.numerator << (2 * scale)
    return form.round(Fraction(2 * floor + (not exact), 1 << (scale + 1)), mode)


def ordinal(form: Format, bits: int) -> int:
    """Position of a number among all numbers of its format, so that neighbours differ by one; the zeros coincide."""
    size = bits & ~form.minus
    return -size if bits & form.minus else size


def integral(value: Fraction, mode: str) -> int:
    """The integer nearest to `value`: rni, rzi, rmi or rpi."""
    return {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](value)
