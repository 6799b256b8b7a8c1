"""Our model against transformers' `qwen4_exp` on random, alive configurations: logits, streams, and the greedy continuation."""

import random
from pathlib import Path
from typing import Any

import pytest

from revolta_serve.runner.runner import Runner
from revolta_serve.weights.tiny import make_tiny
from support.drive import Request, full_pass, load
from support.oracle import Oracle, Pass

LENGTHS = (1, 2, 3, 5, 63, 64, 65, 127, 130, 300)
NEW_TOKENS = 64
TRIES = 50

# Twelve and more index heads: with few, many block scores are exactly zero (relu), and the oracle's order among equals is unspecified.
CONFIGS: dict[str, dict[str, Any]] = {
    "default-like": dict(seed=1, layers=4, index_heads=12, budget=16),
    "wide-heads": dict(seed=2, layers=4, hidden=96, heads=6, kv_heads=1, gdn_key_heads=2, gdn_value_heads=6, index_heads=12, budget=16),
    "two-streams-ratio-8": dict(seed=3, layers=4, streams=2, ratio=8, budget=16, index_heads=16, ple_layers=(1, 2)),
    "bigram-ratio-2": dict(seed=4, layers=4, ngram=2, ratio=2, budget=8, index_heads=12, output_gate="silu"),
    "four-grams-eos-list": dict(
        seed=5, layers=5, ngram=4, ngram_heads=2, ple_layers=(3,), eos_list=True, index_heads=16, budget=24, hidden=48, ple_dim=48
    ),
    "yarn": dict(seed=6, layers=4, yarn=2.0, max_positions=2048, index_heads=12, budget=16, rank=24),
    "all-sparse-tail": dict(seed=7, layers=8, streams=3, index_heads=12, budget=32, gdn_key_heads=4, gdn_value_heads=4),
}


def prompt_of(length: int, config: Any, seed: int) -> list[int]:
    """Random ids with the n-gram segment mark inside wherever it fits."""
    rng = random.Random(seed)
    ids = [rng.randrange(config.vocab) for _ in range(length)]
    if length >= 3:
        ids[length // 2] = config.eos
    return ids


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Oracle]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    make_tiny(directory, **CONFIGS[request.param])
    return load(directory), Oracle(directory)


def decided_case(runner: Runner, oracle: Oracle, length: int) -> tuple[list[int], list[int], Pass]:
    """The first prompt of this length whose whole greedy run meets no close choice: prompt, prompt + continuation, oracle's pass."""
    for attempt in range(TRIES):
        prompt = prompt_of(length, runner.model.config, length * 1000 + attempt)
        request = Request(runner, 0, prompt)
        request.prefill()
        request.decode(NEW_TOKENS - 1)
        request.finish()
        judged = oracle.full_pass(request.ids)
        if judged.decided():
            return prompt, request.ids, judged
    pytest.fail(f"no prompt of {length} tokens without a close choice in {TRIES} tries")


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_states_and_greedy_tokens(pair: tuple[Runner, Oracle], length: int) -> None:
    runner, oracle = pair
    prompt, ids, judged = decided_case(runner, oracle, length)
    logits, states = full_pass(runner, prompt)
    expected = judged.logits[:length]
    assert 2.0 <= float(judged.logits.std()) <= 4.0
    error = (logits - expected).abs()
    assert float(error.max()) < 1e-3
    assert float(error.median()) < 5e-5
    for layer, (ours, theirs) in enumerate(zip(states, judged.states, strict=True)):
        assert float((ours - theirs[:length]).abs().max()) < 5e-4, f"streams after layer {layer}"
    assert ids[length:] == judged.logits[length - 1 : -1].argmax(-1).tolist()


def test_most_rows_choose_among_blocks(pair: tuple[Runner, Oracle]) -> None:
    runner, oracle = pair
    passes = [(length, oracle.full_pass(prompt_of(length, runner.model.config, length)).choosing) for length in LENGTHS]
    assert sum(length * share for length, share in passes) / sum(LENGTHS) >= 0.5
