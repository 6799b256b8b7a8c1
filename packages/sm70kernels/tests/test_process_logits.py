import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels.ops.process_logits import process_logits
from sm70kernels.testing import clone, conforms, same_bits

INF = math.inf


def naive(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    for m in range(logits.shape[0]):
        if temperature[m] == 0:
            continue
        row = [-INF if math.isnan(x) else x for x in logits[m].tolist()]
        scaled = [x / float(temperature[m]) for x in row]
        best = max(scaled)
        weight = [0.0 if best == -INF else math.exp(x - best) for x in scaled]
        order = sorted(range(len(row)), key=lambda v: (-row[v], v))
        kept = [v for v in order if weight[v] >= float(min_p[m])]
        if top_k[m] >= 1:
            kept = kept[: int(top_k[m])]
        if top_p[m] < 1:
            mass, total = 0.0, sum(weight[v] for v in kept)
            for n, v in enumerate(kept):
                mass += weight[v]
                if mass >= float(top_p[m]) * total:
                    kept = kept[: n + 1]
                    break
        logits[m] = torch.tensor([scaled[v] if v in kept else -INF for v in range(len(row))], dtype=logits.dtype)


test_matches_naive = conforms(process_logits, naive, examples=40, dtypes=(torch.float32,))


@pytest.mark.parametrize("seed", range(20))
def test_a_row_does_not_depend_on_the_batch_or_its_place(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, vocabulary = (int(torch.randint(1, hi, (), generator=generator)) for hi in (13, 91))
    call = process_logits.make({"M": rows, "V": vocabulary}, seed)
    together = clone(call)
    process_logits(**together)
    order = torch.randperm(rows, generator=generator)
    for index in (order, *order[:, None]):
        some = {name: value[index].clone() for name, value in call.items()}
        process_logits(**some)
        assert same_bits(some["logits"], together["logits"][index])


def run(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    row = torch.tensor([logits])
    process_logits(row, torch.tensor([temperature]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p]))
    return [float(x) for x in row[0]]


def kept(*args: Any, **kwargs: Any) -> list[int]:
    return [v for v, x in enumerate(run(*args, **kwargs)) if x > -INF]


def test_ties_go_to_the_lowest_ids() -> None:
    assert kept([1.0, 2.0, 2.0, 2.0, 1.0], top_k=2) == [1, 2]
    assert kept([0.0] * 8, top_p=0.5) == [0, 1, 2, 3]
    assert kept([0.0] * 8, top_p=0.51) == [0, 1, 2, 3, 4]
    assert kept([-0.0, 0.0, -0.0], top_k=1) == [0]


def test_filters_apply_in_order_each_to_what_is_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits, min_p=0.51) == [0, 1]
    assert kept(logits, top_k=3, top_p=0.7) == [0, 1]  # 0.4 + 0.3 of 0.9
    assert kept(logits, top_p=0.75) == [0, 1, 2]
    assert kept(logits, top_p=0.75, min_p=0.6) == [0, 1]  # 0.7 left: 0.4 / 0.7 is short, with 0.3 it is all
    assert kept(logits, temperature=0.5, top_p=0.8) == [0, 1]  # squares: 0.16 + 0.09 of 0.3


def test_off_values_keep_everything() -> None:
    logits = [3.0, -1.0, 2.0, 2.0]
    for top_k in (-1, 0, 4, 5):
        assert run(logits, temperature=2.0, top_k=top_k) == [1.5, -0.5, 1.0, 1.0]


def test_the_most_likely_token_always_stays() -> None:
    assert kept([0.0, 1.0, 0.5], top_p=1e-30) == kept([0.0, 1.0, 0.5], top_p=0.0) == [1]
    assert kept([0.0, 1.0, 0.5], min_p=1.0) == kept([0.0, 1.0, 0.5], min_p=1.5) == [1]
    assert kept([0.0, 1.0, 0.5], min_p=1.5, top_k=2) == [1]
    assert kept([7.0], top_k=1, top_p=0.1, min_p=1.0) == [0]


@pytest.mark.parametrize("filters", [{}, {"min_p": 0.1}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_special_values(filters: dict[str, Any]) -> None:
    assert run([math.nan, 1.0, -INF, 1.0], **filters) == [-INF, 1.0, -INF, 1.0]
    assert run([-INF, math.nan, -INF], **filters) == [-INF] * 3
    assert kept([INF, 1.0, INF], **filters)[0] == 0
    assert INF in run([INF, 1.0, INF], **filters)


def test_greedy_rows_are_untouched_and_do_not_touch_others() -> None:
    call = process_logits.make({"M": 12, "V": 60}, seed=4)
    call["temperature"][::2] = 0.0
    call["logits"][::2, 3] = math.nan
    mixed, before = clone(call), call["logits"].clone()
    process_logits(**mixed)
    assert same_bits(mixed["logits"][::2], before[::2])
    sampled = {name: value[1::2].contiguous() for name, value in call.items()}
    process_logits(**sampled)
    assert same_bits(mixed["logits"][1::2], sampled["logits"])


def test_a_large_vocabulary_splits_over_no_thread() -> None:
    """70,001 tokens: several element-wise calls a row, and a row's bits are the same alone and among others."""
    call = process_logits.make({"M": 3, "V": 70_001}, seed=1)
    call |= {"temperature": torch.full((3,), 0.7), "top_k": torch.tensor([0, 500, 0], dtype=torch.int32)}
    call |= {"top_p": torch.tensor([0.9, 0.95, 1.0]), "min_p": torch.tensor([0.0, 0.0, 0.05])}
    together = clone(call)
    process_logits(**together)
    for m in range(3):
        one = {name: value[m : m + 1].clone() for name, value in call.items()}
        process_logits(**one)
        assert same_bits(one["logits"][0], together["logits"][m])
    assert (together["logits"] > -INF).sum(1)[1] <= 500
