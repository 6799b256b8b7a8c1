"""What a start will take of the machine's memory, and where the values of its configuration came from."""

import re

import pytest
import torch

from revolta_serve import profile
from revolta_serve.cache.capacity import capacity
from revolta_serve.commands import host_memory, serve
from revolta_serve.errors import ConfigError
from revolta_serve.weights.checkpoint import load
from revolta_serve.weights.names import parameters
from revolta_serve.weights.tiny import make_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return directory, make_tiny(directory, layers=4, kv_heads=2, max_positions=1024)


def configured(made, **fields):
    return profile.load("cpu", {"model.path": str(made[0]), **{name.replace("__", "."): value for name, value in fields.items()}})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_weights_that_are_planned_are_those_that_are_loaded(made, ranks, dtype):
    directory, model = made
    optional = {parameter.name for parameter in parameters(model, 0, ranks) if parameter.optional}
    loaded = [load(model, directory, rank, ranks, getattr(torch, dtype)) for rank in range(ranks)]
    config = configured(made, parallel__tensor=ranks, model__dtype=dtype).config.resolve(model)
    assert host_memory.weight_bytes(config, model) == sum(
        tensor.nbytes for rank in loaded for name, tensor in rank.items() if name not in optional
    )
    assert sum(tensor.nbytes for tensor in loaded[0].values()) > 1 << 19


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_start_needs_the_memory_of_all_its_ranks(made, monkeypatch, ranks):
    _, model = made
    config = configured(made, parallel__tensor=ranks).config.resolve(model)
    planned = capacity(config, model)
    need = host_memory.weight_bytes(config, model) + ranks * (planned.kv_bytes + planned.state_bytes)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: need)
    host_memory.check_memory(config, model, planned)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: need - 1)
    with pytest.raises(ConfigError) as caught:
        host_memory.check_memory(config, model, planned)
    shown = re.fullmatch(
        rf"weights of [\d.]+ MiB and a cache of ([\d.]+) MiB in {ranks} process{'es' if ranks > 1 else ''} are more than the ([\d.]+) MiB "
        r"of memory that are available; lower cache.memory_bytes=0 \(.*\) or schedule.max_model_len=1024 \(--max-model-len\)",
        caught.value.message,
    )
    assert shown is not None, caught.value.message
    assert float(shown[2]) == pytest.approx((need - 1) / 2**20, abs=0.06)


def test_every_value_knows_where_it_came_from(made):
    loaded = configured(made, schedule__max_queue=7)
    facts = serve._facts(loaded, serve.check(loaded.config))
    assert facts.sources["schedule.max_queue"] == "--max-queue"
    assert re.fullmatch(r"cpu\.toml:\d+", facts.sources["schedule.max_num_batched_tokens"])
    assert facts.sources["schedule.max_model_len"] == "derived", "the checkpoint's limit"
    assert "api.port" not in facts.sources
    assert configured(made, schedule__max_model_len=100).sources["schedule.max_model_len"] == "--max-model-len"
    given = configured(made, schedule__max_model_len=100)
    assert serve._facts(given, serve.check(given.config)).sources["schedule.max_model_len"] == "--max-model-len"
    assert facts.capacity["tokens"] == 64 * facts.capacity["num_blocks"] > 0
