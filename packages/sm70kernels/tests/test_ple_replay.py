import pytest
import torch
from torch import Tensor

from sm70kernels.ops.ple_apply import ple_apply
from sm70kernels.ops.ple_replay import ple_replay
from sm70kernels.testing import clone, conforms, same_bits


def naive(history: Tensor, x: Tensor, slot: Tensor, accepted: Tensor, snapshot_slot: Tensor, snapshot_at: Tensor) -> None:
    length = history.shape[2]
    for layer in range(history.shape[0]):
        for i in range(slot.shape[0]):
            if slot[i] < 0 or accepted[i] == 0:
                continue
            column = torch.cat([history[layer, slot[i]], x[layer, i]])
            if snapshot_slot[i] >= 0 and 1 <= snapshot_at[i] <= accepted[i]:
                for r in range(length):
                    history[layer, snapshot_slot[i], r] = column[int(snapshot_at[i]) + r]
            for r in range(length):
                history[layer, slot[i], r] = column[int(accepted[i]) + r]


test_matches_naive = conforms(ple_replay, naive, examples=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_the_histories_ple_apply_would_have_stored(dtype: torch.dtype) -> None:
    """Verification writes nothing and returns what it would have taken in; the replay of its first rows gives the same history."""
    made = ple_apply.make(dict(N=6, M=30, KS=0, S=4, E=24, PE=16, KW=4, DIL=3, SL=14), 5, dtype)
    vectors = {"slot": [5, -1, 0, 3, 7, 1], "rows": [5] * 6, "start": [0] * 6, "fresh": [0] * 6}
    made |= {name: torch.tensor(values, dtype=torch.int32) for name, values in vectors.items()} | {"kind": "decode", "write": False}
    accepted, at = torch.tensor([1, 2, 0, 4, 5, 3], dtype=torch.int32), torch.tensor([1, 1, 1, 2, 3, 1], dtype=torch.int32)
    target = torch.tensor([8, 9, 10, 11, 12, -1], dtype=torch.int32)

    def stored(rows: Tensor) -> Tensor:
        call = clone(made) | {"rows": rows, "write": True}
        ple_apply(**call)
        history: Tensor = call["history"]
        return history

    expected, middle, pool = stored(accepted), stored(at), made["history"][None].clone()
    for i in (0, 3, 4):
        expected[target[i]] = middle[made["slot"][i]]
    c = ple_apply(**clone(made))
    ple_replay(pool, c.view(1, 6, 5, 96), made["slot"], accepted, target, at)
    assert same_bits(pool[0], expected)


def test_two_replays_equal_one_and_foreign_slots_stay() -> None:
    call = ple_replay.make({"L": 2, "N": 3, "T": 5, "SL": 7, "HL": 9, "C": 12})
    call["slot"], call["snapshot_slot"] = torch.tensor([6, -1, 0], dtype=torch.int32), torch.full((3,), -1, dtype=torch.int32)
    whole, parts = clone(call), clone(call)
    ple_replay(**whole | {"accepted": torch.tensor([5, 4, 3], dtype=torch.int32)})
    for first, taken in ((0, [2, 1, 3]), (2, [3, 3, 0])):
        rows = call["x"][:, :, first:]
        ple_replay(**parts | {"x": rows.contiguous(), "accepted": torch.tensor(taken, dtype=torch.int32)})
    assert same_bits(parts["history"], whole["history"])
    assert same_bits(whole["history"][:, 1:6], call["history"][:, 1:6])


def test_nan_of_rejected_rows_is_not_stored() -> None:
    call = ple_replay.make({"L": 1, "N": 2, "T": 4, "SL": 4, "HL": 9, "C": 8})
    call |= {
        name: torch.tensor(v, dtype=torch.int32)
        for name, v in (("slot", [1, 2]), ("accepted", [2, 0]), ("snapshot_slot", [0, 3]), ("snapshot_at", [1, 1]))
    }
    call["x"][:, 0, 2:], call["x"][:, 1] = float("nan"), float("nan")
    ple_replay(**call)
    assert call["history"].isfinite().all()
