"""ptxas_budget finds every way kernels and table can differ for the worse, and takes over what is measured without losing reasons."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ptxas_budget
from ptxas_budget import Row

KERNEL = "rms_norm E=2560"
ROW = Row(registers=40, shared=1024, blocks=2, hmma=8, wide_loads=0.75)
ENTRY: dict[str, Any] = dict(registers=40, shared=1024, blocks=2, hmma=8, wide_loads=0.75)


def problems(row: Row, **entry: Any) -> list[str]:
    return list(ptxas_budget.violations({"rms_norm": {KERNEL: row}}, {"rms_norm": {KERNEL: ENTRY | entry}}, {"rms_norm"}))


def test_kernels_as_the_table_says_have_no_violations() -> None:
    assert problems(ROW) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(registers=41), "41 registers, the table has 40"),
        (dict(shared=2048), "2048 bytes of shared memory, the table has 1024"),
        (dict(hmma=4), "4 HMMA instructions, the table has 8"),
        (dict(hmma=16), "16 HMMA instructions, the table has 8"),
        (dict(wide_loads=0.5), "0.5 of the global loads move 16 bytes, the table has 0.75"),
        (dict(spills=12), "spills 12 bytes"),
        (dict(local=3), "3 instructions on local memory"),
    ],
)
def test_worse_kernels(changes: dict[str, Any], sentence: str) -> None:
    (line,) = problems(replace(ROW, **changes))
    assert line.startswith(f"rms_norm: {KERNEL}: {sentence}")


def test_better_kernels_are_no_violation() -> None:
    assert problems(replace(ROW, registers=32, shared=0, blocks=4, wide_loads=1.0)) == []


def test_fewer_blocks_are_a_violation_and_below_two_need_a_reason() -> None:
    fewer = problems(replace(ROW, blocks=1))
    assert ["1 blocks a multiprocessor, the table has 2" in fewer[0], 'give the reason in the entry\'s "why"' in fewer[1]] == [True, True]
    (line,) = problems(replace(ROW, blocks=1), blocks=1)
    assert 'give the reason in the entry\'s "why"' in line
    assert problems(replace(ROW, blocks=1), blocks=1, why="  ") == [line]
    assert problems(replace(ROW, blocks=1), blocks=1, why="its tile is all of the shared memory") == []


def test_the_table_and_the_kernels_must_name_each_other() -> None:
    found = list(ptxas_budget.violations({"a": {"a": ROW}}, {"a": {"gone": ENTRY}, "b": {"b": ENTRY}}, {"a", "b"}))
    assert ["not in the table" in found[0], "no call needs it" in found[1], "no call needs it" in found[2]] == [True] * 3
    assert [line.partition(": ")[0] for line in found] == ["a", "a", "b"]


def test_only_the_ops_asked_for_are_compared() -> None:
    assert list(ptxas_budget.violations({"a": {"a": ROW}}, {"b": {"b": ENTRY}}, {"a"})) == [
        "a: a: not in the table: run ci/ptxas_budget.py --write and review what it takes"
    ]


def test_writing_keeps_reasons_and_other_ops_and_drops_what_is_gone() -> None:
    table = {"a": {"a": ENTRY | dict(why="small"), "gone": ENTRY | dict(why="was")}, "b": {"b": ENTRY}}
    merged = ptxas_budget.merged({"a": {"a": replace(ROW, registers=50), "new": ROW}}, table, {"a"})
    assert merged == {"a": {"a": ENTRY | dict(registers=50, why="small"), "new": ENTRY}, "b": {"b": ENTRY}}
    assert json.loads(ptxas_budget.text(merged)) == merged
    assert ptxas_budget.text(merged).count("\n") == 9


def test_a_reason_goes_to_kernels_that_need_one_and_have_none() -> None:
    table = {"a": {"a": ENTRY | dict(blocks=1, why="first")}}
    measured = {"a": {"a": replace(ROW, blocks=1), "b": replace(ROW, blocks=1), "c": ROW}}
    found = ptxas_budget.merged(measured, table, {"a"}, "later")["a"]
    assert [found[kernel].get("why") for kernel in "abc"] == ["first", "later", None]


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: ptxas_budget.Rows, *words: str, failed: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr(ptxas_budget, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr(ptxas_budget, "names", lambda: list(measured))
    monkeypatch.setattr(ptxas_budget, "measure", lambda ops: ({op: measured[op] for op in measured if op in ops}, list(failed)))
    return ptxas_budget.main(list(words))


def test_the_command_writes_compares_and_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, tmp_path, {"a": {"a": ROW}}) == 1
    assert run(monkeypatch, tmp_path, {"a": {"a": ROW}}, "--write") == 0
    assert run(monkeypatch, tmp_path, {"a": {"a": ROW}}) == 0
    assert run(monkeypatch, tmp_path, {"a": {"a": replace(ROW, registers=41)}}) == 1
    assert run(monkeypatch, tmp_path, {"a": {"a": ROW}}, failed=("b: does not compile: too much shared data",)) == 1
    assert "b: does not compile: too much shared data" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path, {"a": {"a": ROW}, "b": {"b": ROW}}, "a") == 0


def test_an_op_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, {"a": {"a": ROW}}, "b")
    assert ended.value.code == 2
    assert "no op b with a kernel; there are a" in capsys.readouterr().err


def test_spills_are_not_taken_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, {"a": {"a": replace(ROW, spills=4)}}, "--write") == 1


def test_the_committed_table_is_as_the_command_writes_it() -> None:
    table = ptxas_budget.read_table(ptxas_budget.TABLE)
    assert table
    assert ptxas_budget.TABLE.read_text(encoding="utf-8") == ptxas_budget.text(table)
    for op, entries in table.items():
        for kernel, entry in entries.items():
            assert entry["blocks"] >= ptxas_budget.WANTED_BLOCKS or entry.get("why"), f"{op}: {kernel}"
