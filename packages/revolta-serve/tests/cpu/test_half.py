"""float16 activations against float32: the tolerance class of the law, teacher-forced."""

import random
from pathlib import Path

import pytest
import torch

from revolta_serve.weights.tiny import make_tiny
from support.drive import full_pass, load

POSITIONS = 5120
TEXT = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory, seed=21, layers=4, budget=16)
    return directory


def test_half_precision_stays_close(checkpoint: Path) -> None:
    single, half = load(checkpoint), load(checkpoint, dtype="float16")
    rng = random.Random(0)
    divergence, same = [], []
    for _ in range(POSITIONS // TEXT):
        ids = [rng.randrange(single.model.config.vocab) for _ in range(TEXT)]
        p, q = (full_pass(runner, ids)[0].log_softmax(-1) for runner in (single, half))
        divergence.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    kl, top1 = float(torch.cat(divergence).mean()), float(torch.cat(same).float().mean())
    print(f"mean KL {kl:.2e}, top-1 equal {top1:.4f} over {POSITIONS} positions")
    assert kl < 1e-3
    assert top1 >= 0.995
