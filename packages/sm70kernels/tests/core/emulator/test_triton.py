"""Foreign PTX: kernels that Triton compiles for sm_70, against fp64, and with one thing wrong in them (made by triton_kernels.py)."""

import re
from pathlib import Path

import numpy as np
import pytest

from sm70kernels.emulator import Fault, emulate

WARPS = 4


def compiled(name: str) -> tuple[str, int]:
    """PTX for compute capability 7.0 and the dynamic shared memory it wants."""
    ptx = (Path(__file__).parent / "foreign" / f"{name}.ptx").read_text(encoding="utf-8")
    return ptx, int(ptx.split()[2])


ROWS, COLUMNS, STRIDE = 5, 777, 800


def run_softmax(ptx: str, shared: int, order: int | None = None) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    x = np.random.default_rng(0).standard_normal((ROWS, STRIDE)).astype(np.float16)[:, :COLUMNS] * np.float16(3)
    storage = np.zeros((ROWS, STRIDE), np.float16)
    storage[:, :COLUMNS] = x
    y = np.full((ROWS, STRIDE), -1, np.float32)
    emulate(
        ptx, "softmax_rows", ROWS, 32 * WARPS, storage[:, :COLUMNS], y[:, :COLUMNS], COLUMNS, STRIDE, None, None, shared=shared, order=order
    )
    assert (y[:, COLUMNS:] == -1).all()
    return x, y[:, :COLUMNS]


def test_softmax_rows_of_triton_match_double_precision() -> None:
    ptx, shared = compiled("softmax_rows")
    x, y = run_softmax(ptx, shared)
    wide = np.exp(x.astype(np.float64) - x.astype(np.float64).max(1, keepdims=True))
    assert np.allclose(y, wide / wide.sum(1, keepdims=True), rtol=2e-6, atol=0)
    for seed in range(3):
        assert np.array_equal(run_softmax(ptx, shared, seed)[1], y)


def test_layer_norm_of_triton_matches_double_precision() -> None:
    ptx, shared = compiled("layer_norm")
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((9, 401)).astype(np.float16), rng.standard_normal(401).astype(np.float32)
    y = np.zeros((9, 401), np.float16)
    emulate(ptx, "layer_norm", 9, 32 * WARPS, x, weight, y, 401, 1e-5, None, None, shared=shared)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(1, keepdims=True)
    wanted = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight
    assert np.abs(y - wanted).max() < 2.0**-11 * np.abs(wanted).max() * 1.01


BARRIER = re.compile(r"^\s*bar\.sync\s+0;", re.MULTILINE)


@pytest.mark.parametrize("index", range(5))
def test_a_barrier_taken_out_of_the_softmax_is_reported(index: int) -> None:
    ptx, shared = compiled("softmax_rows")
    found = list(BARRIER.finditer(ptx))
    assert len(found) == 5
    start, end = found[index].span()
    with pytest.raises(Fault) as error:
        run_softmax(ptx[:start] + ptx[end:], shared)
    assert error.value.kind in ("race between warps", "race between lanes")
    assert error.value.kernel == "softmax_rows"


def test_a_mask_taken_off_a_load_of_the_softmax_is_reported() -> None:
    ptx, shared = compiled("softmax_rows")
    loads = re.findall(r"@%p\d+ ld\.global\.b16", ptx)
    mutated = ptx.replace(loads[-1], "ld.global.b16")
    with pytest.raises(Fault) as error:
        run_softmax(mutated, shared)
    assert error.value.kind == "out of bounds"
    assert error.value.block == (ROWS - 1, 0, 0)
    assert "ld.global.b16" in str(error.value)
    assert error.value.line.startswith("triton_kernels.py:")


def test_too_little_shared_memory_for_the_softmax_is_reported() -> None:
    ptx, shared = compiled("softmax_rows")
    with pytest.raises(Fault, match="out of bounds"):
        run_softmax(ptx, shared - 4)
