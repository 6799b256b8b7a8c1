"""Sampling parameters against their definitions, recomputed from the whole history at every token.

The sampler alone, on random logits: what it keeps from token to token must come to what the ids so far say.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from revolta_serve.errors import EngineError
from revolta_serve.runner.occurrences import Occurrences
from revolta_serve.runner.sampler import Sampler
from revolta_serve.types import History, SamplingParams, Slice, SliceResult, Thinking
from sm70kernels import process_logits, sample_verify
from sm70kernels.op import record

VOCAB = 37
OPEN, CLOSE, END = 30, 31, 32


class Drawn:
    """One request before a sampler: its ids, and logits that depend on where it is alone."""

    def __init__(self, number: int, sampling: SamplingParams, prompt: Sequence[int], bias: dict[int, float] | None = None) -> None:
        self.number, self.sampling = number, sampling
        self.prompt, self.answer = list(prompt), list[int]()
        self.bias = bias or {}
        self.known = False

    @property
    def logits(self) -> Tensor:
        """f32[V] of the next token."""
        values = np.random.default_rng((self.sampling.seed, len(self.answer))).normal(0, 2, VOCAB).astype(np.float32)
        for token, value in self.bias.items():
            values[token] += value
        return torch.from_numpy(values)

    def slice(self) -> Slice:
        ids = self.prompt + self.answer
        first, self.known = not self.known, True
        history = History(prompt=tuple(self.prompt), answer=tuple(self.answer)) if self.sampling.needs_history else None
        return Slice(
            request=self.number, kind="decode", slot=0, start=len(ids) - 1, tokens=(ids[-1],), before=(0, 0),
            sampling=self.sampling if first else None, history=history if first else None,
        )  # fmt: skip


def step(sampler: Sampler, requests: Sequence[Drawn]) -> list[SliceResult]:
    """Draw one token for each."""
    pieces = [one.slice() for one in requests]
    for piece in pieces:
        sampler.admit(piece)
    results = sampler(torch.stack([one.logits for one in requests]), pieces)
    for one, result in zip(requests, results, strict=True):
        one.answer += result.tokens
    return results


def run(one: Drawn, count: int) -> list[int]:
    sampler = Sampler(VOCAB)
    for _ in range(count):
        step(sampler, [one])
    return one.answer


def definition(one: Drawn) -> np.ndarray:
    """The logits f32[V] a request draws from before temperature and filters, token by token from the formulas."""
    p, answer, ids = one.sampling, one.answer, one.prompt + one.answer
    inside, spent = bool(p.thinking and p.thinking.begun), 0
    for token in answer if p.thinking else ():
        if not inside:
            inside = token == p.thinking.open
        elif token == p.thinking.close:
            inside = False
        else:
            spent += 1
    if p.thinking and inside and spent >= p.thinking.budget:
        return np.where(np.arange(VOCAB) == p.thinking.close, one.logits.numpy(), np.float32(-np.inf))
    allowed = {v for v in range(VOCAB) if not p.allowed_tokens or v in p.allowed_tokens}
    for word in p.bad_words:
        if ids[len(ids) - len(word) + 1 :] == list(word[:-1]) and len(ids) >= len(word) - 1:
            allowed.discard(word[-1])
    if len(answer) < p.min_tokens and allowed - set(p.ending_tokens):
        allowed -= set(p.ending_tokens)
    result = np.full(VOCAB, -np.inf, np.float32)
    for v in allowed:
        z = np.float32(one.logits[v]) + np.float32(dict(p.logit_bias).get(v, 0.0))
        if v in ids:
            rate = np.float32(p.repetition_penalty)
            z = z / rate if z > 0 else z * rate
        count = answer.count(v)
        z = z - np.float32(p.frequency_penalty) * np.float32(count)
        result[v] = z - np.float32(p.presence_penalty) * np.float32(count > 0)
    return result


def expected(one: Drawn) -> int:
    """The token that the definition and the request's noise give."""
    p, logits = one.sampling, torch.from_numpy(definition(one))[None].clone()
    temperature = torch.tensor([p.temperature])
    top_k, top_p, min_p = torch.tensor([p.top_k], dtype=torch.int32), torch.tensor([p.top_p]), torch.tensor([p.min_p])
    process_logits(logits, temperature, top_k, top_p, min_p)
    position = torch.tensor([len(one.prompt) + len(one.answer)], dtype=torch.int32)
    none, row = torch.tensor([[-1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    tokens, _ = sample_verify(logits[None], torch.tensor([p.seed]), position, temperature, none, row)
    return int(tokens)


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    """Some of everything."""

    def some(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    def ids(count: int) -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(VOCAB), count)))

    words = tuple(tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 2, 2, 3)))) for _ in range(60))
    return SamplingParams(
        temperature=some(0.5, rng.uniform(0.3, 1.5), 0.0),
        top_k=some(0.3, rng.randrange(1, 20), 0),
        top_p=some(0.3, rng.uniform(0.5, 1.0), 1.0),
        min_p=some(0.3, rng.uniform(0.0, 0.3), 0.0),
        seed=seed,
        repetition_penalty=some(0.5, rng.uniform(0.7, 1.8), 1.0),
        presence_penalty=some(0.5, rng.uniform(-1.0, 2.0), 0.0),
        frequency_penalty=some(0.5, rng.uniform(-0.5, 1.0), 0.0),
        logit_bias=some(0.5, tuple((token, rng.uniform(-5, 5)) for token in ids(5)), ()),
        allowed_tokens=some(0.3, ids(12), ()),
        bad_words=some(0.5, words, ()),
        min_tokens=some(0.5, rng.randrange(1, 30), 0),
        ending_tokens=ids(4),
        thinking=some(0.4, Thinking(budget=rng.randrange(0, 20), close=CLOSE, open=OPEN, begun=rng.random() < 0.5), None),
    )


def random_request(seed: int, number: int = 0) -> Drawn:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
    return Drawn(number, random_params(rng, seed), prompt, {OPEN: 1.0, CLOSE: 1.0})


@pytest.mark.parametrize("seed", range(24))
def test_every_token_is_that_of_the_definition(seed: int) -> None:
    one, sampler = random_request(seed), Sampler(VOCAB)
    for _ in range(40):
        token = expected(one)
        (result,) = step(sampler, [one])
        if math.isinf(definition(one if result.corrupt else before_last(one)).max()):
            assert result.corrupt
            return
        assert result.tokens == (token,), len(one.answer)


def before_last(one: Drawn) -> Drawn:
    """The same request one token ago."""
    earlier = Drawn(one.number, one.sampling, one.prompt, one.bias)
    earlier.answer = one.answer[:-1]
    return earlier


def test_the_random_requests_use_every_parameter() -> None:
    requests = [random_request(seed) for seed in range(24)]
    for name in ("logit_bias", "allowed_tokens", "bad_words", "min_tokens", "thinking"):
        assert 5 < sum(bool(getattr(one.sampling, name)) for one in requests) < 19, name
    answers = [run(one, 40) for one in requests]
    assert sum(len(answer) == 40 for answer in answers) > 18
    assert sum(CLOSE in answer for answer in answers) > 6


@pytest.mark.parametrize("seed", range(8))
def test_company_is_invisible(seed: int) -> None:
    """Every request among others that come and go gives the tokens it gives alone."""
    rng = random.Random(seed)
    alone = [run(random_request(40 * seed + n), 30) for n in range(4)]
    together = [random_request(40 * seed + n, n) for n in range(4)]
    sampler = Sampler(VOCAB)
    while any(len(one.answer) < len(answer) for one, answer in zip(together, alone, strict=True)):
        unfinished = [one for one, answer in zip(together, alone, strict=True) if len(one.answer) < len(answer)]
        step(sampler, rng.sample(unfinished, rng.randrange(1, len(unfinished) + 1)))
    assert [one.answer for one in together] == alone


@pytest.mark.parametrize("seed", range(16))
def test_what_is_forgotten_comes_back_with_its_history(seed: int) -> None:
    whole = run(random_request(seed), 40)
    one, sampler, rng = random_request(seed), Sampler(VOCAB), random.Random(seed)
    while len(one.answer) < len(whole):
        if rng.random() < 0.2:
            sampler.forget(one.number)
            one.known = False
        step(sampler, [one])
    assert one.answer == whole


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=5, **changes)


def test_nothing_left_fails_its_request_alone() -> None:
    sampler = Sampler(VOCAB)
    stuck = Drawn(0, greedy(allowed_tokens=(4, 5), bad_words=((4,), (6, 5))), [6])
    fine = Drawn(1, greedy(), [1])
    results = step(sampler, [stuck, fine])
    assert [result.corrupt for result in results] == [True, False]
    assert [len(result.tokens) for result in results] == [0, 1]
    assert step(sampler, [fine])[0].tokens


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    sampler = Sampler(VOCAB)
    bad, fine = Drawn(0, greedy(presence_penalty=1.0), [1], {3: math.nan}), Drawn(1, greedy(presence_penalty=1.0), [1])
    results = step(sampler, [bad, fine])
    assert [result.corrupt for result in results] == [True, False]
    assert results[1].tokens == (run(Drawn(2, greedy(presence_penalty=1.0), [1]), 1)[0],)


def test_min_tokens_yields_when_only_endings_are_left() -> None:
    # Of its ids one may end the answer and one may not: the latter comes until nothing forbids the end.
    assert run(Drawn(0, greedy(allowed_tokens=(4, END), min_tokens=3, ending_tokens=(END,)), [1], {END: 50.0}), 4) == [4, 4, 4, END]
    # Nothing but endings: they may come at once.
    assert run(Drawn(0, greedy(allowed_tokens=(END,), min_tokens=3, ending_tokens=(END,)), [1]), 2) == [END, END]
    # The other one is forbidden after the first token, so the end is all that is left.
    words = greedy(allowed_tokens=(4, END), bad_words=((4, 4),), min_tokens=3, ending_tokens=(END,))
    assert run(Drawn(0, words, [1], {END: 50.0}), 2) == [4, END]


def test_bad_words_count_the_prompt() -> None:
    wanted = {9: 100.0, 8: 50.0}
    assert run(Drawn(0, greedy(bad_words=((7, 9),)), [3, 7], wanted), 3) == [8, 9, 9]
    assert run(Drawn(0, greedy(bad_words=((3, 7, 9),)), [3, 7], wanted), 2) == [8, 9]
    assert run(Drawn(0, greedy(bad_words=((4, 7, 9),)), [3, 7], wanted), 2) == [9, 9]
    assert run(Drawn(0, greedy(bad_words=((9, 9, 9),)), [3, 7], wanted), 6) == [9, 9, 8, 9, 9, 8]


def thinking(budget: int, begun: bool, **changes: Any) -> SamplingParams:
    return greedy(thinking=Thinking(budget=budget, close=CLOSE, open=OPEN, begun=begun), **changes)


def test_reasoning_is_closed_when_its_budget_is_spent() -> None:
    always = {9: 100.0}
    assert run(Drawn(0, thinking(0, True), [1], always), 3) == [CLOSE, 9, 9]
    assert run(Drawn(0, thinking(3, True), [1], always), 6) == [9, 9, 9, CLOSE, 9, 9]
    assert run(Drawn(0, thinking(3, False), [1], always), 6) == [9] * 6


def test_parts_that_open_in_the_answer_share_the_budget() -> None:
    """What is drawn is decided by presence: every id comes once, in the order of its bias."""
    order = [OPEN, 8, 9, CLOSE, 10]
    bias = {token: 1000.0 - 100.0 * place for place, token in enumerate(order)}
    once = {"presence_penalty": 2000.0}
    assert run(Drawn(0, thinking(5, False, **once), [1], bias), 5) == order
    assert run(Drawn(0, thinking(1, False, **once), [1], bias), 5) == [OPEN, 8, CLOSE, 9, 10]
    reopening = Drawn(0, thinking(2, True), [1], {OPEN: 100.0})
    assert run(reopening, 6) == [OPEN, OPEN, CLOSE, OPEN, CLOSE, OPEN]


def test_a_forced_token_beats_every_other_rule() -> None:
    params = thinking(
        1, True, allowed_tokens=(4,), bad_words=((CLOSE,),), min_tokens=9, ending_tokens=(CLOSE,), logit_bias=((CLOSE, -90.0),)
    )
    assert run(Drawn(0, params, [1]), 3) == [4, CLOSE, 4]


def test_plain_requests_cost_nothing_more() -> None:
    """Greedy rows without rules are drawn from as they are; a row with rules changes that for nobody's parameters."""
    sampler = Sampler(VOCAB)
    plain, ruled = Drawn(0, greedy(), [1]), Drawn(1, greedy(frequency_penalty=0.5), [1])
    with record() as names:
        step(sampler, [plain])
    assert names == ["sample_verify"]
    with record() as names:
        step(sampler, [plain, ruled])
    assert names == ["process_logits", "sample_verify"]
    sampler.forget(1)
    with record() as names:
        step(sampler, [plain])
    assert names == ["sample_verify"]
    assert sampler.rules == {}


def test_a_missing_history_is_named() -> None:
    piece = replace(Drawn(3, greedy(presence_penalty=1.0), [1]).slice(), history=None)
    with pytest.raises(EngineError, match=r"request number 3: .* no history"):
        Sampler(VOCAB).admit(piece)


@pytest.mark.parametrize(
    "params",
    [
        greedy(logit_bias=((VOCAB, 1.0),)),
        greedy(allowed_tokens=(1, VOCAB)),
        greedy(bad_words=((1, -1),)),
        greedy(min_tokens=1, ending_tokens=(VOCAB,)),
    ],
)
def test_ids_the_model_does_not_have_are_named(params: SamplingParams) -> None:
    with pytest.raises(EngineError, match=r"name id (-1|37); the model has 0 \.\. 36"):
        Sampler(VOCAB).admit(Drawn(3, params, [1]).slice())


def test_occurrences_are_counts() -> None:
    rng = random.Random(0)
    known, ids = [rng.randrange(5000) for _ in range(200)], [rng.randrange(5000) for _ in range(300)]
    seen = Occurrences(known, ids)
    for _ in range(3000):
        ids.append(rng.choice((rng.randrange(5000), ids[-1])))
        seen.add(ids[-1])
    assert seen.ids.tolist() == sorted({*known, *ids})
    assert seen.counts.tolist() == [ids.count(token) for token in seen.ids.tolist()]
