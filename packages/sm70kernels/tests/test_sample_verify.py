import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sm70kernels import philox
from sm70kernels.ops.sample_verify import sample_verify
from sm70kernels.testing import clone, conforms, rows_independent, same_bits

# Random123's kat_vectors: philox4x32 with 10 rounds; counter, key, result.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def block(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def noise(seed: int, position: int, token: int) -> float:
    word = block([position, token // 4, 0, 0], [seed % 2**32, seed >> 32])[token % 4]
    return -math.log(-math.log1p(-(word + 0.5) / 2**32))


def naive(logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, draft: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    tokens, count = torch.full_like(draft, -1), torch.zeros_like(rows)
    for i in range(logits.shape[0]):
        for t in range(int(rows[i])):
            best, chosen = -math.inf, 0
            for v, x in enumerate(logits[i, t].tolist()):
                score = x + (noise(int(seed[i]), int(position[i]) + t, v) if temperature[i] > 0 else 0.0)
                if score > best:
                    best, chosen = score, v
            tokens[i, t] = chosen
            count[i] += 1
            if draft[i, t] != chosen:
                break
    return tokens, count


test_matches_naive = conforms(sample_verify, naive, examples=30, dtypes=(torch.float32,))
test_rows = rows_independent(sample_verify, "N", examples=20)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert block(counter, key) == words
    as_column = [np.array(side, np.uint64).reshape(-1, 1) for side in (counter, key)]
    assert philox.philox4x32(as_column[0], as_column[1]).ravel().tolist() == words


def test_noise_of_a_token_depends_on_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    seed = torch.randint(0, 2**62, (9_000,), generator=generator)
    position, group = (torch.randint(0, 2**31 - 1, (9_000,), generator=generator) for _ in range(2))
    together = philox.gumbel(seed, position, group)
    for i in (0, 1, 2047, 2048, 8_999):
        alone = philox.gumbel(seed[i : i + 1], position[i : i + 1], group[i : i + 1])
        assert same_bits(alone[0], together[i])
        expected = [noise(int(seed[i]), int(position[i]), 4 * int(group[i]) + word) for word in range(4)]
        torch.testing.assert_close(alone[0], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert together.isfinite().all()
    others = philox.gumbel(seed[:50], position[:50], group[:50], domain=2)
    assert not (others == together[:50]).any()


def vector(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(logits: Tensor, seeds: Tensor, position: int) -> Tensor:
    n = seeds.shape[0]
    rows, none = torch.ones(n, dtype=torch.int32), torch.full((n, 1), -1, dtype=torch.int32)
    place = torch.full((n,), position, dtype=torch.int32)
    return sample_verify(logits.expand(n, 1, -1).contiguous(), seeds, place, torch.ones(n), none, rows)[0][:, 0]


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_follow_the_distribution(over: str) -> None:
    """Chi-square over 20,480 draws with fixed seeds: 99.9% point for 9 degrees of freedom is 27.9; a token of p = 0 never comes."""
    p = torch.tensor([0.3, 0.0, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
    logits = p.log().float()
    calls = range(320)
    if over == "seeds":
        drawn = [draw(logits, torch.arange(64) + 64 * n, 17) for n in calls]
    else:
        drawn = [draw(logits, torch.arange(64), 1000 + n) for n in calls]
    seen = torch.bincount(torch.cat(drawn).long(), minlength=11).double()
    expected = p * 20_480
    assert seen.sum() == 20_480
    assert seen[1] == 0
    alive = p > 0
    assert ((seen - expected)[alive].square() / expected[alive]).sum() < 27.9


def test_drafts_give_plain_decodings_tokens_at_any_temperature() -> None:
    """Verify with the right drafts accepts them all; with one wrong draft it stops there, with plain decoding's token."""
    call = sample_verify.make({"N": 6, "T": 5, "V": 37}, seed=3)
    call["temperature"] = torch.tensor([1.0, 0.0, 0.3, 1.0, 0.0, 2.0])
    call["rows"].fill_(5)
    plain = torch.full((6, 5), -1, dtype=torch.int32)
    for t in range(5):
        one = call | {"logits": call["logits"][:, t : t + 1].contiguous(), "position": call["position"] + t}
        one |= {"draft": torch.full((6, 1), -1, dtype=torch.int32), "rows": torch.ones(6, dtype=torch.int32)}
        plain[:, t : t + 1] = sample_verify(**one)[0]
    tokens, count = sample_verify(**call | {"draft": plain})
    assert torch.equal(tokens, plain)
    assert count.tolist() == [5] * 6
    for wrong in range(4):
        draft = plain.clone()
        draft[:, wrong] = 36 - plain[:, wrong] + (plain[:, wrong] == 18)
        tokens, count = sample_verify(**call | {"draft": draft})
        assert count.tolist() == [wrong + 1] * 6
        assert torch.equal(tokens[:, : wrong + 1], plain[:, : wrong + 1])
        assert (tokens[:, wrong + 1 :] == -1).all()


def test_drafts_of_probability_zero_and_padded_vocabulary() -> None:
    logits = torch.full((1, 2, 12), -math.inf)
    logits[0, :, 5] = 0.0  # as top-k = 1 leaves it
    arguments = (torch.tensor([7]), vector(3), torch.ones(1))
    tokens, count = sample_verify(logits, *arguments, torch.tensor([[5, -1]], dtype=torch.int32), vector(2))
    assert tokens.tolist() == [[5, 5]]
    assert count.tolist() == [2]
    tokens, count = sample_verify(logits, *arguments, torch.tensor([[4, -1]], dtype=torch.int32), vector(2))
    assert tokens.tolist() == [[5, -1]]
    assert count.tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_nan_and_empty_rows_of_logits(temperature: float) -> None:
    logits = torch.zeros(3, 1, 6)
    logits[0, 0, 0], logits[0, 0, 1:] = math.nan, -math.inf
    logits[0, 0, 4] = -3.0
    logits[1] = -math.inf
    logits[2, 0, 2], logits[2, 0, 5] = math.inf, math.inf
    arguments: dict[str, Any] = {"seed": torch.arange(3), "position": vector(0, 1, 2), "temperature": torch.full((3,), temperature)}
    arguments |= {"draft": torch.full((3, 1), -1, dtype=torch.int32), "rows": torch.ones(3, dtype=torch.int32)}
    assert sample_verify(logits, **arguments)[0].ravel().tolist() == [4, 0, 2]
    if temperature == 0.0:
        assert sample_verify(torch.zeros(3, 1, 6), **arguments)[0].ravel().tolist() == [0, 0, 0]


def test_greedy_requests_draw_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("noise for a greedy batch")

    monkeypatch.setattr(philox, "gumbel", refuse)
    call = sample_verify.make({"N": 5, "T": 3, "V": 20})
    call["temperature"].zero_()
    target = clone(call)["logits"].argmax(-1)
    tokens, count = sample_verify(**call)
    for i in range(5):
        assert tokens[i, : count[i]].tolist() == target[i, : count[i]].tolist()


def test_a_large_vocabulary_gives_the_same_token_alone() -> None:
    call = sample_verify.make({"N": 3, "T": 1, "V": 40_003}, seed=2)
    call["temperature"].fill_(1.0)
    call["rows"].fill_(1)
    tokens, _ = sample_verify(**call)
    for i in range(3):
        one = {name: value[i : i + 1].clone() for name, value in call.items()}
        assert torch.equal(sample_verify(**one)[0], tokens[i : i + 1])
        sparse = one | {"logits": one["logits"].clone()}
        sparse["logits"][sparse["logits"] < one["logits"].flatten()[tokens[i, 0]] - 1e-3] = -math.inf
        assert torch.equal(sample_verify(**sparse)[0], tokens[i : i + 1])


def test_noise_of_the_extreme_words_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest 128 words round up to u = 1 in float32, whose noise would be infinite."""
    words = np.array([[0], [1], [2**32 - 129], [2**32 - 1]], np.uint64)
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: words)
    low, _, high, highest = philox.gumbel(torch.zeros(1, dtype=torch.int64), vector(0), vector(0))[0].tolist()
    assert low == pytest.approx(33 * math.log(2), rel=1e-6)
    assert -3.0 < highest <= high < -2.7
