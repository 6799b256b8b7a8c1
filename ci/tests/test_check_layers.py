"""check_layers finds what it promises to find: each test plants one violation in a small tree that is otherwise clean."""

import subprocess
import sys
from pathlib import Path

import pytest

import check_layers

ROOT = Path(__file__).resolve().parents[2]
SERVE = "packages/revolta-serve/src/revolta_serve"
KERNELS = "packages/sm70kernels/src/sm70kernels"

TABLE = """# A map

| part | may import | torch | what it is |
|---|---|---|---|
| `cli` | all below | | commands |
| `engine` | `engine.core`, `engine.worker` | | processes |
| `engine.core` | `scheduler`, `engine.channel` | never | loop |
| `engine.worker` | `model`, `engine.channel` | | rank |
| `engine.channel` | the floor | never | messages |
| `scheduler` | `cache` | never | steps |
| `model` | `sm70kernels` | | layers |
| `cache` | the floor | never | blocks |
| `sm70kernels` | nothing | | ops |
| `types`, `model.model_config` | the floor | never | nouns |

Text after the table.
"""

CLEAN = {
    "docs/00-map.md": TABLE,
    f"{SERVE}/__init__.py": "",
    f"{SERVE}/types.py": "import json\n",
    f"{SERVE}/cli.py": "def main():\n    from revolta_serve.engine import core, worker\n",
    f"{SERVE}/engine/__init__.py": "",
    f"{SERVE}/engine/channel.py": "from revolta_serve.types import Plan\n",
    f"{SERVE}/engine/core.py": "from revolta_serve.engine.channel import Channel\nfrom revolta_serve.scheduler.scheduler import S\n",
    f"{SERVE}/engine/worker.py": "import torch\nfrom . import channel\nfrom ..model.layer import Layer\n",
    f"{SERVE}/scheduler/__init__.py": "",
    f"{SERVE}/scheduler/scheduler.py": "from revolta_serve.cache import pool\nfrom revolta_serve.model.model_config import C\n",
    f"{SERVE}/cache/__init__.py": "",
    f"{SERVE}/cache/pool.py": "from revolta_serve import types\n",
    f"{SERVE}/model/__init__.py": "",
    f"{SERVE}/model/layer.py": "import torch\nfrom sm70kernels import norm\n",
    f"{SERVE}/model/model_config.py": "from revolta_serve.types import Plan\n",
    f"{KERNELS}/__init__.py": "",
    f"{KERNELS}/ops/norm.py": "import torch\n",
}


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: str) -> tuple[int, str]:
    """Write the clean tree with some files replaced or added, check it, return status and output."""
    for name, text in (CLEAN | changes).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    status = check_layers.main(["--root", str(tmp_path)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_a_clean_tree_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = check(tmp_path, capsys)
    assert status == 0, output
    assert "16 modules" in output


PLANTED = {
    "upwards": ("cache/pool.py", "from revolta_serve.scheduler.scheduler import S\n", "pool.py:1: cache imports scheduler"),
    "inside a function": ("cache/pool.py", "def f():\n    import revolta_serve.scheduler\n", "pool.py:2: cache imports scheduler"),
    "for typing only": (
        "cache/pool.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from revolta_serve.model import layer\n",
        "pool.py:3: cache imports model",
    ),
    "relative": ("cache/pool.py", "from ..scheduler import scheduler\n", "pool.py:1: cache imports scheduler"),
    "by name": (
        "cache/pool.py",
        "import importlib\nimportlib.import_module('revolta_serve.scheduler')\n",
        "pool.py:2: cache imports scheduler",
    ),
    "sideways": ("engine/worker.py", "from revolta_serve.engine.core import Core\n", "worker.py:1: engine.worker imports engine.core"),
    "over a message": ("engine/core.py", "from revolta_serve.model.layer import L\n", "core.py:1: engine.core imports model"),
    "torch": ("cache/pool.py", "import torch.nn\n", "pool.py:1: cache must never load torch"),
    "torch in a function": ("scheduler/scheduler.py", "def f():\n    from torch import Tensor\n", "scheduler must never load torch"),
    "torch through the package": ("cache/__init__.py", "import torch\n", "cache must never load torch"),
    "torch through another": (
        "types.py",
        "import torch\n",
        "scheduler must never load torch: revolta_serve.scheduler.scheduler -> revolta_serve.cache.pool -> revolta_serve.types -> torch",
    ),
    "transformers": ("model/layer.py", "def f():\n    from transformers import AutoTokenizer\n", "layer.py:2: imports transformers"),
    "a module in no row": ("offload/disk.py", "", "revolta_serve.offload.disk is in no row"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_violation_is_found(planted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, text, expected = PLANTED[planted]
    status, output = check(tmp_path, capsys, **{f"{SERVE}/{name}": text})
    assert status == 1
    assert expected in output


def test_the_kernels_know_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = check(tmp_path, capsys, **{f"{KERNELS}/ops/norm.py": "from revolta_serve.types import Plan\n"})
    assert status == 1
    assert "sm70kernels imports types (revolta_serve.types); docs/00-map.md lets it import nothing" in output


BROKEN_TABLES = {
    "an arrow that points up": ("| `cache` | the floor |", "| `cache` | `scheduler` |", "arrows point down"),
    "an unknown part": ("| `cache` | the floor |", "| `cache` | `cash` |", "'cash', which is not in the table"),
    "a part twice": ("| `types`,", "| `types`, `cache`,", "'cache' is in the table 2 times"),
    "another word than never": ("| the floor | never | blocks", "| the floor | no | blocks", "write never or leave it empty"),
    "no table": ("| part |", "| parts |", "no table that starts with"),
}


@pytest.mark.parametrize("broken", BROKEN_TABLES)
def test_a_broken_table_is_an_error(broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, expected = BROKEN_TABLES[broken]
    assert old in TABLE
    status, output = check(tmp_path, capsys, **{"docs/00-map.md": TABLE.replace(old, new)})
    assert status == 2
    assert expected in output


def test_the_design_laws_are_in_the_real_table() -> None:
    """Editing the table must not quietly give up the laws it stands for."""
    rows = check_layers.read_table((ROOT / "docs/00-map.md").read_text())
    by_part = {part: row for row in rows for part in row.parts}
    for part in ("scheduler", "cache", "text", "model.model_config"):
        assert by_part[part].torch_free, part
    assert by_part["sm70kernels"].may == frozenset()
    assert not by_part["engine.core"].may & {"engine.worker", "runner", "model", "weights"}
    assert not by_part["engine.worker"].may & {"engine.core", "scheduler", "cache"}
    assert not by_part["scheduler"].may & {"engine", "runner", "model", "api"}


def test_what_never_loads_torch_imports_without_it() -> None:
    """The table's promise, kept by the interpreter: third-party imports count here too."""
    rows = check_layers.read_table((ROOT / "docs/00-map.md").read_text())
    tree = check_layers.Tree(ROOT)
    free = [module for module in tree.files if (found := check_layers.part_of(module, rows)) and found[1].torch_free]
    assert len(free) > 20
    code = f"import sys, importlib\nsys.modules['torch'] = None\nfor name in {free!r}: importlib.import_module(name)\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
