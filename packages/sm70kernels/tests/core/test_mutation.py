"""Mutants are one changed instruction each, differ from each other, and come out the same for the same seed."""

import pytest

from sm70kernels.cuda import Kernel
from sm70kernels.mutation import mutants

IMAGE = dict(E=64, THREADS=32)


def test_every_mutant_changes_one_line_of_the_entry() -> None:
    ptx = Kernel("rms_norm").image(IMAGE).ptx
    found = mutants(ptx, "rms_norm", 60, seed=3)
    lines = ptx.split("\n")
    assert len({(mutant.ptx_line, mutant.after) for mutant in found}) == len(found) == 60
    for mutant in found:
        changed = [(a, b) for a, b in zip(lines, mutant.ptx.split("\n"), strict=True) if a != b]
        assert len(changed) == 1
        assert changed[0][0].strip() == mutant.before == lines[mutant.ptx_line - 1].strip()
        assert mutant.line.partition(":")[0].endswith((".cu", ".cuh"))


def test_a_seed_says_which() -> None:
    ptx = Kernel("rms_norm").image(IMAGE).ptx
    assert mutants(ptx, "rms_norm", 20, seed=3) == mutants(ptx, "rms_norm", 20, seed=3)
    assert mutants(ptx, "rms_norm", 20, seed=3) != mutants(ptx, "rms_norm", 20, seed=4)


def test_stores_barriers_and_guards_are_among_what_is_changed() -> None:
    ptx = Kernel("rms_norm").image(dict(E=256, THREADS=64)).ptx
    changes = {(mutant.before.split()[0], mutant.after == "(dropped)") for mutant in mutants(ptx, "rms_norm", 2000, seed=1)}
    assert ("bar.sync", True) in changes
    assert any(opcode.startswith("st.global") and dropped for opcode, dropped in changes)
    assert any(opcode.startswith("@") for opcode, _ in changes)


def test_an_entry_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="nothing: the PTX has no such entry"):
        mutants(Kernel("rms_norm").image(IMAGE).ptx, "nothing", 1, 1)
