"""check_size finds long files and uses of the environment, however they are spelled, and counts what it says it counts."""

from pathlib import Path

import pytest

import check_size

SERVE = "packages/revolta-serve/src/revolta_serve"


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str, **files: str) -> tuple[int, str]:
    """Write files (path: text), check them, return status and output."""
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    status = check_size.main(["--root", str(tmp_path), *arguments])
    return status, capsys.readouterr().out


COUNTED = [f"{SERVE}/api/app.py", "packages/sm70kernels/src/sm70kernels/ops/norm.cu", "docs/01-long.md", "ci/x.py", "Makefile"]


@pytest.mark.parametrize("name", COUNTED)
def test_the_401st_line_is_one_too_many(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, capsys, **{name: "x\n" * 400})[0] == 0
    status, output = check(tmp_path, capsys, **{name: "x\n" * 401})
    assert status == 1
    assert f"{name}: 401 > 400 lines" in output


def test_results_caches_and_hidden_files_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x\n" * 500
    names = ("bench/results/notes.md", "packages/a/__pycache__/b.py", ".venv/lib/c.py", "packages/a.egg-info/d.md", "docs/e.json")
    status, output = check(tmp_path, capsys, **dict.fromkeys(names, long))
    assert (status, "0 files" in output) == (0, True), output


READS = {
    "subscript": "import os\nx = os.environ['HOME']\n",
    "get": "import os\nx = os.environ.get('HOME', '')\n",
    "getenv": "import os\nx = os.getenv('HOME')\n",
    "alias of os": "import os as system\nx = system.environ['HOME']\n",
    "from os": "from os import environ\nx = environ['HOME']\n",
    "from os, renamed": "from os import getenv as look\nx = look('HOME')\n",
    "membership": "import os\nx = 'HOME' in os.environ\n",
    "a command's option": "import typer\nx = typer.Option('', envvar='HOME')\n",
}


@pytest.mark.parametrize("spelling", READS)
def test_a_read_is_found_in_any_spelling(spelling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = check(tmp_path, capsys, **{f"{SERVE}/engine/core.py": READS[spelling]})
    assert status == 1
    assert "core.py:2: reads environment variable HOME: make it a field of ServeConfig" in output


@pytest.mark.parametrize("text", ["import os\nx = dict(os.environ)\n", "import os\nname = 'A'\nx = os.environ[name]\n"])
def test_a_read_without_a_literal_name_is_found(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = check(tmp_path, capsys, **{f"{SERVE}/cli.py": text})
    assert status == 1
    assert "reads environment variable *, not REVOLTA_API_KEY" in output


def test_cli_may_read_its_one_variable_and_set_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import os\nkey = os.environ.get('REVOLTA_API_KEY', '')\nos.environ['OMP_NUM_THREADS'] = '1'\nos.environ.setdefault('A', 'b')\n"
    status, output = check(tmp_path, capsys, "--table", **{f"{SERVE}/cli.py": text})
    assert status == 0, output
    assert "environment: 1 reads, 2 writes" in output


def test_cli_may_read_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = check(tmp_path, capsys, **{f"{SERVE}/cli.py": "import os\nx = os.environ['REVOLTA_PORT']\n"})
    assert status == 1
    assert "cli.py:2: reads environment variable REVOLTA_PORT, not REVOLTA_API_KEY" in output


@pytest.mark.parametrize("statement", ["os.environ['A'] = 'b'", "os.putenv('A', 'b')", "del os.environ['A']"])
def test_nobody_else_may_write(statement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = check(tmp_path, capsys, **{"packages/sm70kernels/src/sm70kernels/cuda.py": f"import os\n{statement}\n"})
    assert status == 1
    assert "cuda.py:2: writes environment variable A" in output


def test_config_fields_are_the_leaves_of_the_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "class Api:\n    '''Doc.'''\n    host: str = 'a'\n    keys: tuple[str, ...] = ()\n    LIMIT: ClassVar[int] = 3\n"
        "class Unused:\n    x: int = 1\n"
        "class ServeConfig:\n    api: Api = field(default_factory=Api)\n    port: int = 1\n    def validate(self) -> None: ...\n"
    )
    status, output = check(tmp_path, capsys, "--table", **{f"{SERVE}/config.py": text})
    assert status == 0
    assert check_size.config_fields(tmp_path) == ["api.host", "api.keys", "port"]
    assert "config fields: 3  api 2  port 1" in output
