"""check_ops finds every way a name can lie, and its generated texts follow the ops."""

from pathlib import Path

import pytest

import check_ops

OP = '"""{name}: adds.\n\nMore.\n"""\n{imports}\ndef reference(x):\n    return x\n\n\n{name} = Op("{name}", reference=reference{launch})\n'
TRITON = "import triton\n\n\n@triton.jit\ndef kernel(x):\n    pass\n"
INIT = f'"""Ops."""\nif TYPE_CHECKING:\n{check_ops.BEGIN}{check_ops.END}OPS = ()\n'


def write(root: Path, path: str, text: str = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with an op that has a kernel, a Triton op, and one without a kernel, all in order."""
    write(tmp_path, check_ops.INIT, INIT)
    write(tmp_path, f"{check_ops.OPS}/__init__.py")
    for name, launch, imports in (("add", ", launch=launch", ""), ("scale", ", launch=launch", TRITON), ("copy", ", launch=None", "")):
        write(tmp_path, f"{check_ops.OPS}/{name}.py", OP.format(name=name, launch=launch, imports=imports))
        write(tmp_path, f"{check_ops.TESTS}/test_{name}.py")
    write(tmp_path, f"{check_ops.OPS}/add.cu")
    for name in ("add", "scale"):
        write(tmp_path, f"{check_ops.BENCH}/bench_{name}.py")
    write(tmp_path, "docs/00-map.md")
    assert check_ops.main(["--root", str(tmp_path), "--write"]) == 0
    return tmp_path


def problems(root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    status = check_ops.main(["--root", str(root)])
    lines = capsys.readouterr().out.splitlines()
    assert status == (1 if len(lines) > 1 else 0)
    return lines[:-1]


def test_a_tree_in_order_has_no_violations(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(root, capsys) == []


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (f"{check_ops.TESTS}/test_copy.py", "tests/test_copy.py is missing"),
        (f"{check_ops.OPS}/add.cu", "ops/add.cu is missing"),
        (f"{check_ops.BENCH}/bench_scale.py", "bench/ops/bench_scale.py is missing"),
    ],
)
def test_missing_files(root: Path, capsys: pytest.CaptureFixture[str], missing: str, sentence: str) -> None:
    (root / missing).unlink()
    (line,) = problems(root, capsys)
    assert line.endswith(sentence)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (f"{check_ops.OPS}/copy.cu", "a kernel belongs to an op that declares launch, and there is no such copy"),
        (f"{check_ops.TESTS}/test_cpoy.py", "tests of anything but an op are in tests/core, and there is no such cpoy"),
        (f"{check_ops.BENCH}/bench_engine.py", "a benchmark of ops/ belongs to an op, and there is no such engine"),
    ],
)
def test_stray_files(root: Path, capsys: pytest.CaptureFixture[str], path: str, sentence: str) -> None:
    write(root, path)
    assert problems(root, capsys) == [f"{path}: {sentence}"]


@pytest.mark.parametrize(
    "line",
    [
        "from sm70kernels.ops.add import add",
        "import sm70kernels.ops.add",
        "from sm70kernels import add, rows",
        "from sm70kernels.ops import add",
        "from .add import reference",
        "from . import add",
    ],
)
def test_an_op_imports_no_other(root: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    write(root, f"{check_ops.OPS}/copy.py", OP.format(name="copy", launch="", imports=line))
    (found,) = problems(root, capsys)
    assert "ops/copy.py: imports the op add" in found


def test_wrong_names(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, f"{check_ops.OPS}/copy.py", OP.format(name="copy", launch="", imports="").replace('Op("copy"', 'Op("cpoy"'))
    assert "Op('cpoy') in copy.py" in problems(root, capsys)[0]
    write(root, f"{check_ops.OPS}/copy.py", OP.format(name="other", launch="", imports=""))
    assert "defines the ops ['other']" in problems(root, capsys)[0]


def test_generated_texts_are_compared_and_rewritten(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (root / check_ops.LIST).read_text(encoding="utf-8")
    assert "1 of 3 ops." in text
    assert "| `copy` | adds. |" in text
    assert "    from sm70kernels.ops.add import add as add\n" in (root / check_ops.INIT).read_text(encoding="utf-8")
    write(root, f"{check_ops.OPS}/wipe.py", OP.format(name="wipe", launch="", imports=""))
    write(root, f"{check_ops.TESTS}/test_wipe.py")
    assert [line.partition(":")[0] for line in problems(root, capsys)] == [check_ops.LIST, check_ops.INIT]
    assert check_ops.main(["--root", str(root), "--write"]) == 0
    assert problems(root, capsys) == []


def test_an_init_without_markers_is_an_error(root: Path) -> None:
    write(root, check_ops.INIT, "OPS = ()\n")
    with pytest.raises(ValueError, match="are missing"):
        check_ops.main(["--root", str(root)])
