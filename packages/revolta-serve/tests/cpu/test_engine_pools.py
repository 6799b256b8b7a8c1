"""The plan that is printed is the memory that is used, on every rank and in every format."""

from dataclasses import replace

import pytest
import torch

from revolta_serve.cache.capacity import capacity
from revolta_serve.config import ModelSource, ParallelConfig, ServeConfig
from revolta_serve.model.pools import allocate
from revolta_serve.weights.tiny import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"), layers=4, kv_heads=1, heads=4, max_positions=256)


def sized(model, planned, tensor, context, dtype):
    return allocate(model, blocks=planned.num_blocks, slots=planned.num_slots, tensor=tensor, context=context, dtype=dtype)


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pools_have_the_planned_size(model, tensor, context, dtype):
    config = ServeConfig(model=ModelSource(dtype=dtype), parallel=ParallelConfig(tensor=tensor, decode_context=context)).resolve(model)
    planned = capacity(config, model)
    pools = sized(model, planned, tensor, context, getattr(torch, dtype))
    assert pools.kv_bytes == planned.kv_bytes > 0
    assert pools.state_bytes == planned.state_bytes > 0


def test_a_budget_in_bytes_is_kept(model):
    config = replace(ServeConfig(), cache=replace(ServeConfig().cache, memory_bytes=4 << 20)).resolve(model)
    planned = capacity(config, model)
    pools = sized(model, planned, 1, 1, torch.float32)
    assert (4 << 20) - planned.block_bytes - planned.slot_bytes < pools.kv_bytes + pools.state_bytes <= 4 << 20
