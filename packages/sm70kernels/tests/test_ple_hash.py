import pytest
import torch
from torch import Tensor

from sm70kernels.ops.ple_hash import ple_hash
from sm70kernels.testing import conforms, rows_independent

EOS = 248044
MULTIPLIERS = [23703573157769, 20109073645365, 8052911324071]
PRIMES = [
    20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
    20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
]  # fmt: skip
# Golden rows of the request [1, 2, 3, eos, 5, 6] in the published hash (vocabulary 248,320).
GOLDEN = {
    0: [16121432, 28938500, 59087997, 73487090, 81148277, 104500129, 120276032, 149373875,
        176283436, 184305849, 216528839, 231080079, 257961536, 266068568, 289043455, 305959965],
    2: [14605717, 24410875, 49313567, 72177428, 86060820, 104022010, 130963819, 146886202,
        161523077, 195939126, 219424565, 220811782, 248020141, 275228530, 284297999, 309645223],
    3: [1040936, 20493796, 54629949, 79359381, 85142054, 114677089, 129861487, 151753631,
        160770146, 187379937, 207108329, 229509886, 243927029, 279402641, 291463027, 313528485],
    4: [15389869, 39778609, 55713969, 62213332, 88817728, 118483999, 133731511, 155458159,
        179763390, 197956758, 205378969, 220499474, 242466248, 265658744, 293662119, 315720898],
    5: [15567690, 35687509, 55747620, 67831959, 83904455, 115928743, 123965091, 148013673,
        164414634, 193473829, 212527239, 232037623, 240342494, 269007074, 298641997, 307414745],
}  # fmt: skip


def wrapped(value: int) -> int:
    """The int64 that holds `value` modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63


def naive(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, eos: int) -> Tensor:
    order, heads = ids.shape[1], primes.shape[0]
    found = torch.zeros(ids.shape[0], heads, dtype=torch.int64)
    for m, row in enumerate(ids.tolist()):
        # A token i back is in the segment unless a token nearer than it, and before the current one, ended the segment.
        tokens = [token if eos not in row[1:i] else eos for i, token in enumerate(row)]
        for j in range(heads):
            mix = 0
            for i in range(2 + j // (heads // (order - 1))):
                mix ^= wrapped(tokens[i] * int(multipliers[i]))
            found[m, j] = mix % int(primes[j]) + int(offsets[j])
    return found


test_matches_naive = conforms(ple_hash, naive, examples=12)
test_rows = rows_independent(ple_hash)


def model() -> tuple[Tensor, Tensor, Tensor, int]:
    offsets = [sum(PRIMES[:j]) for j in range(16)]
    return torch.tensor(MULTIPLIERS), torch.tensor(PRIMES), torch.tensor(offsets), EOS


def test_golden_rows() -> None:
    past = [EOS, EOS, 1, 2, 3, EOS, 5, 6]
    ids = torch.tensor([[past[t + 2], past[t + 1], past[t]] for t in range(6)])
    rows = ple_hash(ids, *model())
    for t, expected in GOLDEN.items():
        assert rows[t].tolist() == expected


def test_the_token_after_eos_sees_eos_only_and_eos_sees_its_own_segment() -> None:
    ids = torch.tensor([[5, EOS, 3], [5, EOS, 99], [5, EOS, EOS], [EOS, 3, 2], [EOS, 3, 1], [6, 5, EOS]])
    rows = ple_hash(ids, *model())
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[3, :8], rows[4, :8])
    assert not torch.equal(rows[3, 8:], rows[4, 8:])
    assert torch.equal(rows, naive(ids, *model()))


def test_products_that_wrap_negative_give_rows_inside_their_head() -> None:
    ids = torch.randint(0, 248320, (64, 3), generator=torch.Generator().manual_seed(1))
    multipliers, primes, offsets, eos = model()
    multipliers = multipliers * 1001  # ids times these leave int64 in both directions
    assert (ids[:, 0] * multipliers[0] < 0).any()
    rows = ple_hash(ids, multipliers, primes, offsets, eos)
    assert ((rows >= offsets) & (rows < offsets + primes)).all()
    assert torch.equal(rows, naive(ids, multipliers, primes, offsets, eos))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="J = 3 heads"):
        ple_hash(torch.zeros(1, 3, dtype=torch.int64), torch.ones(3, dtype=torch.int64), *([torch.ones(3, dtype=torch.int64)] * 2), 0)
