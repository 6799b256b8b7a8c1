"""The planned bytes are the bytes a rank really takes: loaded weights by group, allocated pools plane by plane."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from revolta_serve.commands.plan_account import account, files
from revolta_serve.commands.plan_weights import group_of
from revolta_serve.config import CacheConfig, ModelSource, ParallelConfig, ServeConfig
from revolta_serve.model.pools import allocate
from revolta_serve.weights.checkpoint import load
from revolta_serve.weights.tiny import make_tiny

SHAPES = {
    "fused": {},
    "odd vocabulary": {"vocab": 1025, "tokens": 1024},
    "per expert, no scales": {"per_expert": True, "kv_scales": False, "text_only": True},
    "half": {"dtype": "float16", "shards": 3},
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    return directory, make_tiny(directory, layers=4, max_positions=256, **request.param)


def config(directory, dtype, tensor=1, context=1, **cache):
    source = ModelSource(path=str(directory), dtype=dtype)
    return ServeConfig(model=source, parallel=ParallelConfig(tensor=tensor, decode_context=context), cache=CacheConfig(**cache))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_those_that_are_loaded(checkpoint, dtype, ranks):
    directory, model = checkpoint
    planned = account(config(directory, dtype, ranks), model, index=files(str(directory)))
    loaded = Counter()
    for name, tensor in load(model, directory, 0, ranks, getattr(torch, dtype)).items():
        loaded[group_of(name)] += tensor.nbytes
    assert {part.name: part.bytes for part in planned.weights} == loaded
    assert planned.device_weights == loaded.total()
    assert planned.unknown == ()


def test_stored_bytes_are_those_of_the_files(checkpoint):
    directory, model = checkpoint
    planned = account(config(directory, "float32"), model, index=files(str(directory)))
    index = files(str(directory))
    assert index is not None
    sizes = {"F32": 4, "F16": 2, "I64": 8}
    wanted = sum(
        sizes[info.dtype] * torch.Size(info.shape).numel()
        for name, info in index.tensors.items()
        if "visual." not in name and "mtp." not in name
    )
    assert sum(part.stored for part in planned.weights) == wanted


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_pools_are_those_that_are_allocated(tmp_path, dtype, tensor, context):
    model = make_tiny(tmp_path, layers=4, max_positions=256, gdn_key_heads=4, heads=4)
    planned = account(config(tmp_path, dtype, tensor, context, memory_bytes=8 << 20), model, index=files(str(tmp_path)))
    form = planned.capacity
    pools = allocate(model, blocks=form.num_blocks, slots=form.num_slots, tensor=tensor, context=context, dtype=getattr(torch, dtype))
    for count, planes in ((form.num_blocks, planned.shape.block), (form.num_slots, planned.shape.slot)):
        for plane in planes:
            assert getattr(pools, plane.name).nbytes == count * plane.bytes, plane.name
    assert pools.kv_bytes + pools.state_bytes == planned.pool_bytes
    assert planned.left == (8 << 20) - planned.pool_bytes >= 0


def test_what_the_model_does_not_run_is_not_allocated(tmp_path):
    model = make_tiny(tmp_path, layers=4, max_positions=256)
    plain = account(config(tmp_path, "float16"), model)
    drafting = replace(config(tmp_path, "float16"), speculate=replace(ServeConfig().speculate, method="mtp"))
    planned = account(drafting, model)
    assert planned.capacity.block_bytes > plain.capacity.block_bytes
    pools = allocate(model, blocks=4, slots=4, tensor=1, context=1, dtype=torch.float16)
    assert pools.kv_bytes == 4 * plain.capacity.block_bytes
    assert pools.state_bytes == 4 * plain.capacity.slot_bytes
