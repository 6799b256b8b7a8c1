"""Every part of the architecture reaches the logits of a tiny checkpoint: silencing any one of them moves them by more than 1e-2.

Evidence from a model in which a part is dead would prove nothing about that part.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from revolta_serve.model.flash_next import FlashNext
from revolta_serve.model.gdn import GatedDeltaNet
from revolta_serve.model.qsa import SparseAttention
from revolta_serve.weights.tiny import make_tiny
from support.drive import full_pass, load
from support.law import SHAPE

CONFIGS = {
    "default": dict(seed=0),
    "narrow": dict(seed=5, layers=4, hidden=48, streams=2, ple_dim=48, budget=16),
    "law": SHAPE,
}


def silence_ple(model: FlashNext) -> None:
    for layer in model.layers:
        if layer.ple is not None:
            layer.ple.weights[1].zero_()


def silence_ple_convolution(model: FlashNext) -> None:
    for layer in model.layers:
        if layer.ple is not None:
            layer.ple.weights[5].zero_()


def silence_gdn(model: FlashNext) -> None:
    for layer in model.layers:
        if isinstance(layer.block, GatedDeltaNet):
            layer.block.out_proj.zero_()


def silence_attention(model: FlashNext) -> None:
    for layer in model.layers:
        if isinstance(layer.block, SparseAttention):
            layer.block.out_proj.zero_()


def silence_selection(model: FlashNext) -> None:
    """All blocks score alike: the first ones are taken."""
    for layer in model.layers:
        if isinstance(layer.block, SparseAttention):
            layer.block.in_proj[layer.block.widths[0] :].zero_()


def silence_injection_gates(model: FlashNext) -> None:
    for layer in model.layers:
        for hyper in (layer.attn_hyper, layer.mlp_hyper):
            hyper.w_in[hyper.w_up.shape[1] :].zero_()


def silence_mixing(model: FlashNext) -> None:
    for layer in model.layers:
        for hyper in (layer.attn_hyper, layer.mlp_hyper):
            hyper.w_up.zero_()


def silence_routing(model: FlashNext) -> None:
    for layer in model.layers:
        layer.moe.router.zero_()


def silence_experts(model: FlashNext) -> None:
    for layer in model.layers:
        layer.moe.bank[1].zero_()


def silence_shared_expert(model: FlashNext) -> None:
    for layer in model.layers:
        layer.moe.bank[3].zero_()


PARTS = [value for name, value in list(globals().items()) if name.startswith("silence_")]


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("alive")
    make_tiny(directory, **CONFIGS[request.param])
    return directory


@pytest.mark.parametrize("silence", PARTS, ids=lambda part: part.__name__.removeprefix("silence_"))
def test_every_part_moves_the_logits(checkpoint: Path, silence: Callable[[FlashNext], None]) -> None:
    runner = load(checkpoint)
    rng = random.Random(1)
    ids = [rng.randrange(runner.model.config.vocab) for _ in range(150)]
    before, _ = full_pass(runner, ids)
    silence(runner.model)
    after, _ = full_pass(runner, ids)
    assert float((after - before).abs().max()) > 1e-2
