"""Random structured programs, run by the emulator and statement by statement in Python: branches, loops, early exits, calls, arrays.

A program is a tree of statements over six variables of a thread. It is printed as CUDA C++ and interpreted here, thread by thread.
"""

import contextlib
import random

import numpy as np
import pytest

from sm70kernels.emulator import emulate

from .sources import compile_cuda

WORD = 1 << 32
VARIABLES = 6
OPERATORS = ("+", "-", "*", "^", "&", "|", "<<", ">>", "%")
COMPARISONS = ("<", "==", "!=", ">=")
Statement = tuple  # type: ignore[type-arg]  # (name, operands..., blocks of statements...)


class Left(Exception):
    """break, continue or return in the interpreted program."""


def statements(rng: random.Random, depth: int, loop: bool) -> list[Statement]:
    block: list[Statement] = []
    for _ in range(rng.randint(2, 5)):
        pick = rng.random()
        a, b, c = (rng.randrange(VARIABLES) for _ in range(3))
        test = (b, rng.choice(COMPARISONS), rng.randrange(9), rng.choice((3, 5, 8)))
        if depth and pick < 0.25:
            block.append(("if", test, statements(rng, depth - 1, loop), statements(rng, depth - 1, loop) if rng.random() < 0.6 else []))
        elif depth and pick < 0.42:
            block.append(("loop", a, statements(rng, depth - 1, True)))
        elif loop and pick < 0.5:
            block.append((rng.choice(("break", "continue")), test))
        elif pick < 0.54:
            block.append(("return", test))
        elif pick < 0.62:
            block.append(("call", a, b, c))
        elif pick < 0.7:
            block.append(("cell", a, b))
        else:
            block.append(("set", a, b, rng.choice(OPERATORS), c))
    return block


def condition(test: tuple[int, str, int, int]) -> str:
    variable, comparison, constant, modulus = test
    return f"v{variable} % {modulus} {comparison} {constant}u"


def printed(block: list[Statement], level: int = 0) -> str:
    """CUDA C++ of a block; `level` keeps the counters of nested loops apart."""
    text = ""
    for name, *rest in block:
        if name == "set":
            a, b, operator, c = rest
            right = f"(v{c} & 31)" if operator in ("<<", ">>") else f"(v{c} | 1)" if operator == "%" else f"v{c}"
            text += f"v{a} = v{b} {operator} {right};\n"
        elif name == "call":
            text += "v{} = mix(v{}, v{});\n".format(*rest)
        elif name == "cell":
            text += "own[v{1} & 3] += v{0}; v{0} = own[(v{1} >> 2) & 3];\n".format(*rest)
        elif name == "if":
            text += f"if ({condition(rest[0])}) {{\n{printed(rest[1], level)}}} else {{\n{printed(rest[2], level)}}}\n"
        elif name == "loop":
            i = f"i{level}"
            text += f"for (unsigned {i} = 0, n{i} = v{rest[0]} % 6; {i} < n{i}; ++{i}) {{\n{printed(rest[1], level + 1)}}}\n"
        else:
            text += f"if ({condition(rest[0])}) {'goto done' if name == 'return' else name};\n"
    return text


def mix(a: int, b: int) -> int:
    return (a * 3 + b if a & 4 else a ^ (b >> 3)) % WORD


def holds(test: tuple[int, str, int, int], v: list[int]) -> bool:
    variable, comparison, constant, modulus = test
    x = v[variable] % modulus
    return {"<": x < constant, "==": x == constant, "!=": x != constant, ">=": x >= constant}[comparison]


def interpret(block: list[Statement], v: list[int], own: list[int]) -> None:
    for name, *rest in block:
        if name == "set":
            a, b, operator, c = rest
            x, y = v[b], v[c]
            results = {"+": x + y, "-": x - y, "*": x * y, "^": x ^ y, "&": x & y, "|": x | y}
            results |= {"<<": x << (y & 31), ">>": x >> (y & 31), "%": x % (y | 1)}
            v[a] = results[operator] % WORD
        elif name == "call":
            v[rest[0]] = mix(v[rest[1]], v[rest[2]])
        elif name == "cell":
            a, b = rest
            own[v[b] & 3] = (own[v[b] & 3] + v[a]) % WORD
            v[a] = own[v[b] >> 2 & 3]
        elif name == "if":
            interpret(rest[1] if holds(rest[0], v) else rest[2], v, own)
        elif name == "loop":
            for _ in range(v[rest[0]] % 6):
                try:
                    interpret(rest[1], v, own)
                except Left as left:
                    if left.args[0] == "break":
                        break
                    if left.args[0] == "return":
                        raise
        elif holds(rest[0], v):
            raise Left(name)


def size(block: list[Statement]) -> int:
    return sum(1 + sum(size(part) for part in statement if isinstance(part, list)) for statement in block)


@pytest.mark.parametrize("seed", range(16))
def test_a_random_program_computes_what_its_statements_say(seed: int) -> None:
    """`own` is an array in local memory or, for even seeds, in shared memory; the order of warps and branches changes nothing."""
    rng = random.Random(seed)
    program = next(drawn for drawn in iter(lambda: statements(rng, 3, False), None) if 20 <= size(drawn) <= 120)
    names = ", ".join(f"v{i} = x[{i} * 96 + t]" for i in range(VARIABLES))
    place = "unsigned own[4] = {1, 2, 3, 4};" if seed % 2 else "__shared__ unsigned all[96][4]; unsigned* own = all[t];"
    fill = "" if seed % 2 else "for (int i = 0; i < 4; ++i) own[i] = i + 1;"
    stores = " ".join(f"y[{i} * 96 + t] = v{i};" for i in range(VARIABLES))
    source = f"""__noinline__ __device__ unsigned mix(unsigned a, unsigned b) {{ if (a & 4) return a * 3 + b; return a ^ (b >> 3); }}
        extern "C" __global__ void probe(const unsigned* x, unsigned* y) {{
            int t = threadIdx.x;
            unsigned {names};
            {place} {fill}
            {{ {printed(program)} }}
            done: {stores}
        }}"""
    x = np.random.default_rng(seed).integers(0, WORD, (VARIABLES, 96), np.uint32)
    wanted = []
    for column in x.T.tolist():
        v = list(column)
        with contextlib.suppress(Left):
            interpret(program, v, [1, 2, 3, 4])
        wanted.append(v)
    for order in (None, seed):
        y = np.zeros_like(x)
        emulate(compile_cuda(source), "probe", 1, 96, x, y, order=order)
        assert y.T.tolist() == wanted
