"""The model of a V100: bounds worked out by hand, counts carried on from small sizes, the floor."""

import pytest

import sm70kernels
from sm70kernels import linear_skinny, lm_head_logits, moe_route, rms_norm, roofline
from sm70kernels.__main__ import main
from sm70kernels.bench import Cases
from sm70kernels.bench.cases import Case
from sm70kernels.roofline import Estimate, Work


def case(op: object, rows: int, **dims: int) -> Case:
    (only,) = Cases(op, (rows,), dict(size=dims)).each()  # type: ignore[arg-type]
    return only


def work(**changes: float) -> Work:
    numbers = dict(blocks=80.0, warps=640.0, instructions=0.0, thread_instructions=0.0, mma=0.0, bytes=0.0, sectors=0.0, wavefronts=0.0)
    return Work("kernel", **{**numbers, **changes})


@pytest.mark.parametrize(
    ("part", "changes", "seconds"),
    [
        ("HBM", dict(bytes=830e6), 1e-3),
        ("issue", dict(instructions=320 * 1.38e6), 1e-3),
        ("issue", dict(mma=320 * 1.38e6 / 3), 1e-3),  # an mma is four instructions of the machine, one is counted as itself
        ("tensor", dict(mma=320 * 1.38e6 / 8), 1e-3),
        ("L1 and shared", dict(wavefronts=80 * 1.38e6), 1e-3),
        ("L1 and shared", dict(sectors=4 * 80 * 1.38e6), 1e-3),
        ("issue", dict(instructions=1.38e6, blocks=1.0, warps=1.0), 1e-3),  # one warp issues one instruction a cycle
        ("issue", dict(instructions=4 * 1.38e6, blocks=1.0, warps=8.0), 1e-3),
        ("issue", dict(instructions=320 * 1.38e6, blocks=81.0, warps=648.0), 2e-3 * 80 / 81),  # one multiprocessor has two blocks
        ("launch", {}, 2e-6),
    ],
)
def test_each_part_of_the_machine_has_its_rate(part: str, changes: dict[str, float], seconds: float) -> None:
    assert work(**changes).bounds()[part] == pytest.approx(seconds, rel=1e-9)


def test_launches_follow_each_other_and_the_longest_part_decides() -> None:
    found = Estimate((work(bytes=830e3, instructions=1.38e4), work()), 415_000, "")
    assert found.seconds == pytest.approx(1e-6 * max(1, 2) + 2e-6)
    assert next(iter(found.parts)) == "launch"
    assert found.floor == pytest.approx(0.5e-6)
    assert found.share == pytest.approx(0.5 / 4)


def test_no_blocks_is_only_a_launch() -> None:
    assert work(blocks=0.0, warps=0.0).bounds() == {"HBM": 0, "issue": 0, "tensor": 0, "L1 and shared": 0, "launch": 2e-6}


def test_counts_of_a_call_that_is_emulated_whole() -> None:
    found = roofline.estimate(case(rms_norm, 3, E=2560))
    (one,) = found.works
    assert found.scaled == ""
    assert one.blocks == 3
    assert one.bytes == found.bytes == rms_norm.bytes(dict(M=3, E=2560))
    assert found.seconds == roofline.LAUNCH


def test_counts_carried_on_are_those_of_the_whole_call() -> None:
    whole = case(linear_skinny, 1, N=2560, K=160)
    config = linear_skinny.config(whole.dims)
    (direct,) = roofline.run(whole, config)
    carried = roofline.estimate(whole, limit=int(roofline.expected(whole)) // 3)
    assert carried.scaled.startswith("counts carried on from N = ")
    (found,) = carried.works
    for name in ("blocks", "warps", "instructions", "thread_instructions", "mma", "bytes", "sectors", "wavefronts"):
        assert getattr(found, name) == pytest.approx(getattr(direct, name), rel=1e-3), name


def test_the_dim_that_is_made_smaller_is_never_the_rows() -> None:
    assert roofline.reduced(case(lm_head_logits, 1, V=62080), 4_000_000) == ("V", 512)
    assert roofline.reduced(case(moe_route, 64, K=10), 4_000_000) is None
    assert roofline.reduced(case(rms_norm, 1 << 20, E=2560), 1000) is not None
    assert roofline.reduced(case(rms_norm, 1 << 20, E=2560), 1000)[0] == "E"  # type: ignore[index]


def test_dims_that_follow_change_with_the_others() -> None:
    (only,) = Cases(linear_skinny, (5,), dict(size=dict(N=640)), follows=dict(K=lambda d: d["N"] * 4)).each()
    assert only.dims == dict(M=5, N=640, K=2560)
    assert only.at(dict(N=320)).dims == dict(M=5, N=320, K=1280)
    assert roofline.reduced(only, 1000) == ("N", 128)


def test_the_table_has_every_op_with_a_kernel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "estimate", lambda case: Estimate((work(bytes=case.bytes),), case.bytes, ""))
    assert main(["roofline", "--rows", "3"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert roofline.LABEL in head
    launching = [name for name in sm70kernels.OPS if getattr(sm70kernels, name).launch is not None]
    assert sorted({row.split()[0] for row in rows}) == launching
    assert all("-M3 " in row for row in rows)


def test_show_has_resources_counts_and_a_labelled_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "moe_route"]) == 0
    page = capsys.readouterr().out
    assert "## Kernels" in page
    assert f"## At the model's sizes ({roofline.LABEL})" in page
    assert "| `moe_route` " in page
    assert "warp instructions" in page
