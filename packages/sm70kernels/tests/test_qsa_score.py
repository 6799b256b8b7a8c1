"""qsa_score against its definition: relu per head, sum over heads, one division by sqrt(DI)."""

import math

import torch
from torch import Tensor

from sm70kernels import qsa_score
from sm70kernels.testing import conforms, rows_independent, same_bits


def naive(iq: Tensor, keys: Tensor, block_table: Tensor, request: Tensor, visible: Tensor) -> Tensor:
    page, di = keys.shape[1], keys.shape[2]
    scores = torch.full((len(iq), block_table.shape[1] * page), -math.inf, dtype=torch.float64)
    for m in range(len(iq)):
        for b in range(int(visible[m])):
            key = keys[int(block_table[request[m], b // page]), b % page]
            scores[m, b] = sum(max(0.0, float(head @ key)) for head in iq[m]) / math.sqrt(di)
    return scores


test_matches_naive = conforms(qsa_score, naive, examples=6)
test_rows = rows_independent(qsa_score)

SIZES = {"M": 20, "HI": 4, "DI": 16, "B": 12, "PK": 16, "N": 3, "P": 9}


def test_invisible_blocks_are_minus_infinity_whatever_memory_holds() -> None:
    arguments = qsa_score.make(SIZES)
    clean = qsa_score(**arguments)
    poisoned = dict(arguments)
    owned = set()
    for m, request in enumerate(arguments["request"].tolist()):
        owned |= {(int(arguments["block_table"][request, b // 16]), b % 16) for b in range(int(arguments["visible"][m]))}
    poisoned["keys"] = torch.full((12, 16, 16), math.nan)
    for cell in owned:
        poisoned["keys"][cell] = arguments["keys"][cell]
    got = qsa_score(**poisoned)
    assert same_bits(got, clean)
    assert torch.equal(got == -math.inf, torch.arange(144) >= arguments["visible"].unsqueeze(1))


def test_rows_of_one_request_score_as_they_do_among_other_requests() -> None:
    """A tile whose rows share their keys may take another product: the bits are the same either way."""
    arguments = qsa_score.make({**SIZES, "M": 32, "N": 2})
    arguments["visible"] = torch.full((32,), 144, dtype=torch.int32)
    arguments["request"] = torch.zeros(32, dtype=torch.int32)
    shared = qsa_score(**arguments)
    arguments["request"] = torch.tensor([1, 0] * 16, dtype=torch.int32)
    mixed = qsa_score(**arguments)
    assert same_bits(shared[1::2].contiguous(), mixed[1::2].contiguous())
    assert not torch.equal(shared[::2], mixed[::2])


def test_block_placement_does_not_matter() -> None:
    arguments = qsa_score.make({**SIZES, "B": 30, "N": 3})
    arguments["block_table"] = torch.arange(27, dtype=torch.int32).view(3, 9)
    before = qsa_score(**arguments)
    place = torch.randperm(30)
    moved = torch.empty_like(arguments["keys"])
    moved[place] = arguments["keys"]
    arguments |= {"keys": moved, "block_table": place[arguments["block_table"].long()].int()}
    assert same_bits(before, qsa_score(**arguments))


def test_neighbours_that_see_more_change_nothing() -> None:
    arguments = qsa_score.make(SIZES)
    arguments["visible"] = torch.full((20,), 5, dtype=torch.int32)
    short = qsa_score(**arguments)
    arguments["visible"][1:] = 144
    assert same_bits(short[0], qsa_score(**arguments)[0])


def test_no_match_scores_plus_zero_and_nan_keys_score_nan() -> None:
    keys = torch.zeros(1, 4, 16)
    keys[0, 0], keys[0, 1], keys[0, 3] = -1.0, -0.0, math.nan
    table, zero = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    got = qsa_score(torch.ones(1, 4, 16), keys, table, zero, zero + 4)
    assert same_bits(got[0, :3], torch.zeros(3))
    assert got[0, 3].isnan()


def test_heads_are_summed_as_a_tree_of_halves() -> None:
    """Scores 2^23, 0.75, 2^23, 0.75: the pairs first make 2^24 + 1.5, one by one the fractions round differently."""
    keys = torch.zeros(1, 1, 16)
    keys[0, 0, 0] = 1.0
    iq = torch.zeros(1, 4, 16)
    iq[0, :, 0] = torch.tensor([2.0**23, 0.75, 2.0**23, 0.75])
    zero = torch.zeros(1, dtype=torch.int32)
    got = qsa_score(iq, keys, torch.zeros(1, 1, dtype=torch.int32), zero, zero + 1)
    left_to_right = ((iq[0, 0, 0] + iq[0, 1, 0]) + iq[0, 2, 0]) + iq[0, 3, 0]
    tree = (iq[0, 0, 0] + iq[0, 2, 0]) + (iq[0, 1, 0] + iq[0, 3, 0])
    assert tree != left_to_right
    assert same_bits(got[0, 0], tree * 0.25)


def test_rows_without_blocks_and_empty_tables() -> None:
    arguments = qsa_score.make(SIZES)
    arguments["visible"] = torch.zeros(20, dtype=torch.int32)
    assert qsa_score(**arguments).eq(-math.inf).all()
    arguments |= {"visible": torch.full((20,), 9, dtype=torch.int32), "request": torch.full((20,), -1, dtype=torch.int32)}
    assert qsa_score(**arguments).eq(-math.inf).all()
    assert qsa_score(**qsa_score.make({**SIZES, "P": 0})).shape == (20, 0)
