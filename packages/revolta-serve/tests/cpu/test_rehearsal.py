"""Before the first request a runner has taken every route once: what cannot be computed shows at start-up."""

from pathlib import Path
from typing import Any

import pytest

from revolta_serve.config import CacheConfig, ModelSource, ScheduleConfig, ServeConfig
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.runner.runner import Runner
from revolta_serve.weights.tiny import make_tiny
from sm70kernels import rows
from sm70kernels.op import record
from support.drive import Request

ROUTES = {
    "prefill": ("linear_prefill", "gdn_prefill", "qsa_prefill", "moe_gemm"),
    "decode": ("linear_skinny", "gdn_step", "qsa_attention", "moe_qpn"),
    "verify": ("conv_replay", "gdn_replay", "ple_replay"),
}
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shortest": (dict(max_model_len=2), {}),
    "one block": (dict(max_model_len=64), {}),
    "two blocks": (dict(max_model_len=66), {}),
    "one slot": (dict(max_model_len=700, max_num_seqs=1), dict(num_slots=1)),
    "usual": (dict(max_model_len=700), {}),
    "many": (dict(max_model_len=700, max_num_seqs=256), dict(num_slots=10_000)),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory, seed=3, layers=4, budget=16)
    return directory


def config_of(checkpoint: Path, size: str) -> ServeConfig:
    schedule, cache = SIZES[size]
    config = ServeConfig(model=ModelSource(path=str(checkpoint)), schedule=ScheduleConfig(**schedule), cache=CacheConfig(**cache))
    return config.resolve(ModelConfig.load(checkpoint))


@pytest.mark.parametrize("size", SIZES)
def test_loading_takes_every_route_and_leaves_nobody_behind(checkpoint: Path, size: str) -> None:
    """The smallest servers too: some have no room for a snapshot, or no slot beside the running one."""
    config = config_of(checkpoint, size)
    with record() as names:
        runner = Runner.load(config, 0)
    for route, ops in ROUTES.items():
        assert set(ops) <= set(names), route
    assert ("state_copy" in names) == (config.schedule.max_model_len > 64)
    assert (runner.builder.row_of, runner.sampler.params) == ({}, {})
    one = Request(runner, 0, [5])
    one.prefill()
    assert len(one.ids) == 2


def test_a_shape_without_a_product_ends_the_start(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(m: int, n: int, k: int) -> rows.Product:
        raise rows.RowDependenceError(f"linear: no row-independent product for {m} rows, N={n}, K={k}")

    monkeypatch.setattr(rows, "product", none)
    with pytest.raises(rows.RowDependenceError, match=r"N=\d+, K=\d+"):
        Runner.load(config_of(checkpoint, "usual"), 0)
