import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sm70kernels.ops.process_logits import process_logits
from sm70kernels.testing import clone, conforms, same_bits

INF = math.inf


def naive(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    bias_row: Tensor | None,
    bias_id: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None,
    seen_row: Tensor | None,
    seen_id: Tensor | None,
    seen_count: Tensor | None,
    repetition: Tensor | None,
    frequency: Tensor | None,
    presence: Tensor | None,
) -> None:
    """One row after the other, one token after the other."""
    for m in range(logits.shape[0]):
        for b in range(0 if bias_row is None else len(bias_row)):
            if bias_row[b] == m:
                logits[m, bias_id[b]] += bias[b]
        for v in range(0 if mask is None else logits.shape[1]):
            if not int(mask[m, v // 32]) >> v % 32 & 1:
                logits[m, v] = -INF
        for i in range(0 if seen_row is None else len(seen_row)):
            if seen_row[i] == m:
                z = float(logits[m, seen_id[i]])
                z = z / float(repetition[m]) if z > 0 else z * float(repetition[m])
                if seen_count[i] > 0:
                    z -= float(frequency[m]) * int(seen_count[i]) + float(presence[m])
                logits[m, seen_id[i]] = z
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


test_matches_naive = conforms(process_logits, naive, examples=60, dtypes=(torch.float32,))

PER_ROW = [arg.name for arg in process_logits.args if "M" in arg.axes]
SPARSE = {"bias_row": ("bias_id", "bias"), "seen_row": ("seen_id", "seen_count")}
ADDED = [arg.name for arg in process_logits.args if arg.may_be_none]


def part(call: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """The given rows of a call as a call of their own."""
    taken = {name: call[name][rows].clone() for name in PER_ROW if call[name] is not None}
    taken |= {name: call[name] for name in call.keys() - taken.keys()}
    for row, others in SPARSE.items():
        if call[row] is not None:
            at = [(i, place) for place, m in enumerate(rows) for i in range(len(call[row])) if call[row][i] == m]
            taken |= {name: call[name][[i for i, _ in at]] for name in others}
            taken[row] = torch.tensor([place for _, place in at], dtype=torch.int32)
    return {name: taken[name] for name in call}


@pytest.mark.parametrize("seed", range(20))
def test_a_row_does_not_depend_on_the_batch_or_its_place(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, vocabulary = (int(torch.randint(1, hi, (), generator=generator)) for hi in (13, 91))
    call = process_logits.make({"M": rows, "V": vocabulary, "B": vocabulary, "S": vocabulary}, seed)
    together = clone(call)
    process_logits(**together)
    order = torch.randperm(rows, generator=generator).tolist()
    for index in (order, *([m] for m in order)):
        some = part(call, index)
        process_logits(**some)
        assert same_bits(some["logits"], together["logits"][index])


def run(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, **more: Any) -> list[float]:
    row = torch.tensor([logits])
    filters = (torch.tensor([temperature]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p]))
    process_logits(row, *filters, **more)
    return [float(x) for x in row[0]]


def bias(values: dict[int, float]) -> dict[str, Tensor]:
    ids = torch.tensor([*values], dtype=torch.int32)
    return {"bias_row": torch.zeros_like(ids), "bias_id": ids, "bias": torch.tensor([*values.values()])}


def seen(counts: dict[int, int], repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> dict[str, Tensor]:
    ids = torch.tensor([*counts], dtype=torch.int32)
    found = {"seen_row": torch.zeros_like(ids), "seen_id": ids, "seen_count": torch.tensor([*counts.values()], dtype=torch.int32)}
    return found | {name: torch.tensor([x]) for name, x in dict(repetition=repetition, frequency=frequency, presence=presence).items()}


def mask(allowed: list[int], vocabulary: int) -> dict[str, Tensor]:
    words = [sum(1 << v % 32 for v in allowed if v // 32 == word) for word in range(-(-vocabulary // 32))]
    return {"mask": torch.tensor([[word - (1 << 32) if word >> 31 else word for word in words]], dtype=torch.int32)}


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


def test_greedy_rows_are_not_filtered_and_do_not_touch_others() -> None:
    call = process_logits.make({"M": 12, "V": 60, "B": 0, "S": 0}, seed=4) | dict.fromkeys(ADDED)
    call["temperature"][::2] = 0.0
    call["logits"][::2, 3] = math.nan
    mixed, before = clone(call), call["logits"].clone()
    process_logits(**mixed)
    assert same_bits(mixed["logits"][::2], before[::2])
    sampled = part(call, [*range(1, 12, 2)])
    process_logits(**sampled)
    assert same_bits(mixed["logits"][1::2], sampled["logits"])


def test_greedy_rows_take_bias_mask_and_penalties() -> None:
    more = bias({0: 2.0}) | mask([0, 2, 3], 4) | seen({0: 2, 3: 0}, repetition=2.0, frequency=0.25, presence=1.0)
    assert run([4.0, 9.0, 1.0, -1.0], temperature=0.0, top_k=1, top_p=0.1, min_p=1.0, **more) == [1.5, -INF, 1.0, -2.0]


def test_penalties() -> None:
    logits = [3.0, -3.0, 0.0, 1.0]
    assert run(logits, **seen({0: 0, 1: 5, 2: 1}, repetition=2.0)) == [1.5, -6.0, 0.0, 1.0]
    assert run(logits, **seen({0: 0, 1: 5, 2: 1}, frequency=0.5)) == [3.0, -5.5, -0.5, 1.0]
    assert run(logits, **seen({0: 0, 1: 5, 2: 1}, presence=0.5)) == [3.0, -3.5, -0.5, 1.0]
    assert run(logits, **seen({3: 2}, repetition=0.5, frequency=-0.5, presence=-0.25)) == [3.0, -3.0, 0.0, 3.25]


def test_each_stage_sees_what_the_one_before_left() -> None:
    assert run([-1.0], **bias({0: 5.0}), **seen({0: 0}, repetition=2.0)) == [2.0]  # positive only after the bias
    assert run([1.0], **seen({0: 1}, repetition=2.0, frequency=1.0)) == [-0.5]  # positive only before frequency
    assert run([1.0], **seen({0: 1}, repetition=2.0, presence=1.0)) == [-0.5]
    assert run([4.0], temperature=2.0, **bias({0: 2.0}), **seen({0: 2}, repetition=2.0, frequency=0.5, presence=1.0)) == [0.5]
    assert run([5.0, 1.0, 2.0], top_k=1, **mask([1, 2], 3)) == [-INF, -INF, 2.0]
    assert run([5.0, 1.0, 2.0], top_k=1, **bias({1: 10.0})) == [-INF, 11.0, -INF]
    assert run([5.0, 4.0, 2.0], top_k=1, **seen({0: 1}, presence=2.0)) == [-INF, 4.0, -INF]
    assert run([5.0, 1.0], **bias({0: 50.0}), **mask([1], 2)) == [-INF, 1.0]  # no bias brings a masked token back


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, 90])
def test_every_bit_of_the_mask_belongs_to_its_token(vocabulary: int) -> None:
    for v in range(vocabulary):
        only = mask([v], vocabulary)
        only["mask"][0, -1] |= -1 << vocabulary % 32 if vocabulary % 32 else 0  # bits after the last token say nothing
        assert kept([0.0] * vocabulary, **only) == [v]
    assert kept([0.0] * vocabulary, **mask([], vocabulary)) == []
    assert run([0.0] * vocabulary, top_p=0.5, **mask([], vocabulary)) == [-INF] * vocabulary


def test_special_values_under_penalties() -> None:
    more = bias({0: 1.0, 1: 1.0, 2: 1.0}) | seen({0: 1, 1: 1, 2: 1}, repetition=2.0, frequency=1.0, presence=1.0)
    assert run([INF, -INF, math.nan, 0.0], **more) == [INF, -INF, -INF, 0.0]


def test_neutral_values_change_no_bit() -> None:
    call = process_logits.make({"M": 6, "V": 70, "B": 0, "S": 0}, seed=2) | dict.fromkeys(ADDED)
    call["logits"][0, :3] = torch.tensor([-0.0, INF, -INF])
    plain, neutral = clone(call), clone(call)
    cells = torch.arange(420)
    neutral |= {"mask": torch.full((6, 3), -1, dtype=torch.int32)}
    neutral |= {"seen_row": (cells // 70).int(), "seen_id": (cells % 70).int(), "seen_count": (cells % 3).int()}
    neutral |= {"repetition": torch.ones(6), "frequency": torch.zeros(6), "presence": torch.zeros(6)}
    process_logits(**plain)
    process_logits(**neutral)
    assert same_bits(plain["logits"], neutral["logits"])


def test_tokens_that_do_not_exist_or_come_twice_are_refused() -> None:
    for name, make in (("bias", bias), ("seen", lambda ids: seen(dict.fromkeys(ids, 1)))):
        for outside in (-1, 3):
            with pytest.raises(ValueError, match=rf"{name}_id: {outside}, but logits has V=3; pass 0 \.\. V-1"):
                run([0.0] * 3, **make({0: 1.0, outside: 1.0}))
        with pytest.raises(ValueError, match=rf"{name}_row: 1, but logits has M=1; pass 0 \.\. M-1"):
            run([0.0] * 3, **make({0: 1.0}) | {f"{name}_row": torch.ones(1, dtype=torch.int32)})
        for ids in ([2, 1, 2], [1, 1, 2]):
            again = make({0: 1.0, 1: 1.0, 2: 1.0}) | {f"{name}_id": torch.tensor(ids, dtype=torch.int32)}
            with pytest.raises(ValueError, match=f"{name}_row, {name}_id: row 0, id {ids[0]} comes 2 times; merge"):
                run([0.0] * 3, **again)
    with pytest.raises(ValueError, match="seen_count 1: -2 times"):
        run([0.0] * 3, **seen({0: 1, 2: -2}))


def test_a_large_vocabulary_splits_over_no_thread() -> None:
    """70,001 tokens: several element-wise calls a row, and a row's bits are the same alone and among others."""
    call = process_logits.make({"M": 3, "V": 70_001, "B": 300, "S": 5000}, seed=1)
    assert all(call[name] is not None for name in ADDED)
    call |= {"temperature": torch.full((3,), 0.7), "top_k": torch.tensor([0, 500, 0], dtype=torch.int32)}
    call |= {"top_p": torch.tensor([0.9, 0.95, 1.0]), "min_p": torch.tensor([0.0, 0.0, 0.05])}
    together = clone(call)
    process_logits(**together)
    for m in range(3):
        one = part(call, [m])
        process_logits(**one)
        assert same_bits(one["logits"][0], together["logits"][m])
    assert (together["logits"] > -INF).sum(1)[1] <= 500
