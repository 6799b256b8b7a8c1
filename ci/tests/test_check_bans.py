"""The bans of .pre-commit-config.yaml match what they are meant to match, and only that."""

import re
from pathlib import Path

import pytest

import check_bans

ROOT = Path(__file__).resolve().parents[2]
BANS = {ban.id: ban for ban in check_bans.read_bans((ROOT / check_bans.CONFIG).read_text())}
OP = "packages/sm70kernels/src/sm70kernels/ops/norm.py"
MODULE = "packages/revolta-serve/src/revolta_serve/engine/core.py"

LAUNCH = '"""norm."""\n\n\ndef reference(x):\n    return torch.empty_like(x)\n\n\ndef launch(cfg, d, x, out):\n    {}\n\n\nnorm = Op()\n'

BROKEN = {
    "an allocation in a launch": ("launch-allocates", OP, LAUNCH.format("y = torch.empty_like(x)"), 9),
    "a host sync in a launch": ("launch-allocates", OP, LAUNCH.format("n = x.max().item()"), 9),
    "a synchronisation in a launch": ("launch-allocates", OP, LAUNCH.format("torch.cuda.synchronize()"), 9),
    "a read of the environment": ("environment", MODULE, "import os\nx = os.environ['A']\n", 2),
    "the environment under another name": ("environment", MODULE, "from os import environ\n", 1),
    "transformers": ("transformers", MODULE, "def f():\n    from transformers import AutoTokenizer\n", 2),
    "an order among equals": ("tied-order", MODULE, "values, ids = scores.topk(4)\n", 1),
    "a banner": ("banner", MODULE, "x = 1\n# ------------------\n", 2),
    "a path of one machine": ("outside", "docs/02-x.md", "Look at `/root/notes`.\n", 1),
    "a folder of one machine": ("outside", "Makefile", "x:\n\tcd /work && make\n", 2),
    "a package index": ("outside", "README.md", "from https://pypi.org/simple\n", 1),
    "a TODO that nothing retires": ("banner", MODULE, "# TO" + "DO: later\n", 1),
}

ALLOWED = {
    "an allocation in the reference": ("launch-allocates", OP, LAUNCH.format("run(d, x, out)")),
    "an allocation after the launch": ("launch-allocates", OP, LAUNCH.format("run(x)") + "\n\ndef make():\n    return torch.empty(3)\n"),
    "the environment in cli.py": ("environment", "packages/revolta-serve/src/revolta_serve/cli.py", "import os\nx = os.environ['A']\n"),
    "the environment in a test": ("environment", "packages/revolta-serve/tests/pure/test_x.py", "import os\nx = os.environ['A']\n"),
    "transformers in a test": ("transformers", "packages/revolta-serve/tests/cpu/test_x.py", "import transformers\n"),
    "a path that is everybody's": ("outside", "README.md", "revolta-serve make-tiny /tmp/tiny; packages/x/root/y; /workers\n"),
    "a TODO with its event": ("banner", MODULE, "# TO" + "DO(triton with sm_70 mma): fold this back\n"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_banned_is_found(case: str) -> None:
    name, path, text, line = BROKEN[case]
    assert list(BANS[name].matches(path, text)) == [line]


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_allowed_is_left_alone(case: str) -> None:
    name, path, text = ALLOWED[case]
    assert list(BANS[name].matches(path, text)) == []


def test_every_ban_has_a_case_that_breaks_it() -> None:
    assert {name for name, *_ in BROKEN.values()} == set(BANS)


def test_a_broken_file_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / check_bans.CONFIG).write_text((ROOT / check_bans.CONFIG).read_text())
    path = tmp_path / MODULE
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n")
    assert check_bans.main(["--root", str(tmp_path)]) == 0
    path.write_text("import transformers\n")
    assert check_bans.main(["--root", str(tmp_path)]) == 1
    assert re.search(r"core\.py:1: transformers: .*never imported", capsys.readouterr().out)
