"""Makers give what their names say."""

from typing import Any

import torch

from sm70kernels import inputs
from sm70kernels.op import EXACT, Dim, Exact, Op


def made(seed: int = 0, **makers: inputs.Maker) -> dict[str, Any]:
    forms = {"ids": "i32[M]", "table": "i32[M,K]", "x": "f32[M,K] strided", "n": "int", "flag": "bool", "live": "i32 device"}
    defaults = dict(ids=inputs.distinct("M"), table=inputs.value(7), n=inputs.value(3), live=inputs.integers(2, 2))
    op = Op("sink", reference=lambda ids, table, x, n, flag, live: None, determinism=EXACT, tolerance=Exact(), args=forms,
            dims=dict(M=Dim(0, 50), K=Dim(0, 9)), inputs=defaults | makers)  # fmt: skip
    return op.make(dict(M=40, K=5), seed)


def test_distinct_ids_and_holes_beyond_their_count() -> None:
    assert sorted(made()["ids"].tolist()) == list(range(40))
    ids = made(ids=inputs.distinct(30))["ids"]
    assert sorted(ids.tolist()) == [-1] * 10 + list(range(30))


def test_integers_reach_both_ends() -> None:
    values = made(table=inputs.integers(-1, "K - 3"))["table"]
    assert values.unique().tolist() == [-1, 0, 1, 2]
    assert {made(seed, n=inputs.integers(1, 2))["n"] for seed in range(20)} == {1, 2}


def test_shapes_of_distributions() -> None:
    torch.testing.assert_close(made(x=inputs.unit())["x"].norm(dim=-1), torch.ones(40))
    assert (made(x=inputs.log_decay())["x"] < 0).all()
    uniform = made(x=inputs.uniform(2, 3))["x"]
    assert 2 <= float(uniform.min()) <= float(uniform.max()) < 3
    assert (made()["table"] == 7).all()


def test_device_scalars_are_tensors_and_strided_rows_come_as_column_slices() -> None:
    assert made()["live"].shape == ()
    assert made()["live"].dtype == torch.int32
    seen = {made(seed)["x"].is_contiguous() for seed in range(20)}
    assert seen == {True, False}
