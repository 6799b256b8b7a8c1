"""python -m sm70kernels list and show."""

import pytest

import sm70kernels
from sm70kernels import manual, rms_norm
from sm70kernels.__main__ import main


def test_list_has_a_row_for_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(sm70kernels.OPS)
    assert all(row.count("|") == 5 for row in rows)


def test_show_prints_maths_arguments_dims_and_guarantees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "rms_norm"]) == 0
    page = capsys.readouterr().out
    x = f"| `x` | `{rms_norm.args[0].text}` | input |"
    for part in (rms_norm.doc, x, "| E | specialised: 2560", "bits (INV)", "output, allocated when omitted"):
        assert part in page


def test_show_offers_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "rmsnorm"]) == 2
    assert "did you mean rms_norm" in capsys.readouterr().err


def test_summary_is_one_line_without_the_name() -> None:
    assert manual.summary(rms_norm) == "root mean square normalisation of each row."
