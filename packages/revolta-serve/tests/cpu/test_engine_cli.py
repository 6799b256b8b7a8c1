"""The command line with a real tiny checkpoint: errors before loading, one server from start to SIGTERM, one killed, one demo."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from revolta_serve import cli, profile
from revolta_serve.commands import generate
from revolta_serve.commands.doctor import doctor, findings, requirement, satisfies
from revolta_serve.commands.serve import bind, check, url_of
from revolta_serve.config import ApiConfig
from revolta_serve.engine.client import EngineClient
from revolta_serve.errors import ConfigError
from revolta_serve.types import GenerateRequest, SamplingParams
from revolta_serve.weights.tiny import make_tiny

PROGRAM = (sys.executable, "-P", "-m", "revolta_serve.cli")
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny(directory, layers=4, max_positions=1024, seed=5)
    return directory


def run(monkeypatch, capsys, *arguments):
    """The exit code and both outputs of a command run in this process."""
    monkeypatch.setattr(sys, "argv", ["revolta-serve", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return caught.value.code or 0, out, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "nowhere"], "model directory 'nowhere' does not exist"),
        (["serve", "{empty}"], "config.json"),
        (["serve", "{tiny}", "--max-model-len", "99999"], "max_model_len=99999 is more than the checkpoint's 1024"),
        (["serve", "{tiny}", "--set", "cache.num_blokcs=3"], "cache.num_blokcs is not a field of [cache]; did you mean num_blocks?"),
        (["serve", "{tiny}", "--max-num-batched-tokens", "64"], "leaves no prompt chunk of 64"),
        (["serve", "{tiny}", "--tensor-parallel-size", "3"], "tensor parallel size is 3"),
        (["serve", "{tiny}", "--kv-cache-memory-bytes", "5000"], "use at least"),
        (["serve", "{tiny}", "--kv-cache-memory-bytes", "9" * 15], "that are available; lower cache.memory_bytes=999999999999999"),
        (["generate", "{tiny}", "--prompt", "a", "--set", f"cache.memory_bytes={'9' * 15}"], "a cache of 931322.57 GiB in 1 process are"),
        (["serve", "{tiny}", "--dtype", "bfloat16"], "--dtype: model.dtype='bfloat16' is none of float32, float16"),
        (["serve", "{tiny}", "--port", "1", "--dtype", "float32", "--port=2"], "--port is given twice; give it once"),
        (["serve", "{tiny}", "--prefix-caching", "--no-prefix-caching"], "--prefix-caching is given twice; give it once"),
        (["plan", "{tiny}", "--weights", "nvfp4", "--weights", "awq-g32"], "--weights is given twice; give it once"),
        (["serve", "{tiny}", "--profile", "v100"], "profile 'v100' does not exist"),
        (["serve", "{tiny}", "--host", "no.such.host.invalid"], "is no address of this machine"),
        (["serve", "{tiny}", "--port", "{taken}"], "cannot listen on 127.0.0.1 port"),
        (["generate", "{tiny}"], "needs one of --prompt and --token-ids"),
        (["generate", "{tiny}", "--token-ids", "1,x"], "is not a list of numbers"),
        (["generate", "{tiny}", "--token-ids", "1,99999"], "99999 is no token of this model"),
        (["generate", "{tiny}", "--prompt", "a", "--set", "parallel.tensor=2"], "generate runs in one process"),
        (["generate", "{tiny}", "--prompt", "a", "--seed", "9223372036854775808"], "9223372036854775808 must be an integer of 64 bits"),
        (["generate", "{tiny}", "--prompt", "a", "--seed", "-9223372036854775809"], "must be an integer of 64 bits"),
        (["generate", "{tiny}", "--prompt", "a", "--seed", "x"], "'--seed'"),
        (["generate", "{tiny}", "--prompt", "a", "--temperature", "inf"], "--temperature inf must be a number in [0, 1e+06]"),
        (["generate", "{tiny}", "--prompt", "a", "--temperature", "nan"], "--temperature nan must be a number in [0, 1e+06]"),
        (["generate", "{tiny}", "--prompt", "a", "--temperature", "1e7"], "must be a number in [0, 1e+06]"),
        (["generate", "{tiny}", "--prompt", "a", "--temperature", "-1"], "must be a number in [0, 1e+06]"),
        (["generate", "{tiny}", "--prompt", "a", "--max-tokens", "0"], "'--max-tokens'"),
        (["generate", "{tiny}", "--prompt", "a", "--max-tokens", "1024"], "are more than max_model_len=1024; ask for at most 1023 tokens"),
        (["generate", "{tiny}", "--token-ids", ",".join(["1"] * 1024)], "are more than max_model_len=1024; shorten the prompt"),
        (["generate", "{tiny}", "--token-ids", "-1"], "-1 is no token of this model"),
        (["generate", "{tiny}", "--token-ids", "9" * 5000], "is not a list of numbers"),
        (["generate", "{tiny}", "--prompt", "a", "--logits", "{empty}/no/x"], "there is no directory {empty}/no; make it first"),
        (["generate", "{tiny}", "--prompt", "a", "--logits", "{empty}"], "{empty} exists and is no plain file; name another"),
        (["generate", "{tiny}", "--prompt", "a", "--logits", "{pipe}"], "{pipe} exists and is no plain file; name another"),
        (["generate", "{file}", "--prompt", "a"], "does not exist"),
        (["make-tiny", "{empty}", "--set", "layrs=2"], "there is no field 'layrs'; did you mean layers?"),
        (["make-tiny", "{empty}", "--set", "layers"], "--set layers: write FIELD=VALUE"),
        (["make-tiny", "{empty}", "--set", "layers="], "layers is ''; must be an integer in [1, 256]"),
        (["make-tiny", "{empty}", "--set", "layers=0"], "layers is 0; must be an integer in [1, 256]"),
        (["make-tiny", "{empty}", "--set", "layers=4.0"], "layers is 4.0; must be an integer"),
        (["make-tiny", "{empty}", "--set", "interval=0"], "interval is 0; must be an integer"),
        (["make-tiny", "{empty}", "--set", "tokens=10"], "tokens is 10; must be at least 289"),
        (["make-tiny", "{empty}", "--set", "ple_layers=2"], "ple_layers is 2; must be a list of integers"),
        (["make-tiny", "{empty}", "--set", "ple_layers=[[1]]"], "must be a list of integers"),
        (["make-tiny", "{empty}", "--set", "eos_list=5"], "eos_list is 5; must be true or false"),
        (["make-tiny", "{empty}", "--set", "yarn=inf"], "yarn is inf; must be a number in [1, 1024] or none"),
        (["make-tiny", "{empty}", "--set", "output_gate=tanh"], 'output_gate is \'tanh\'; must be "sigmoid" or "silu" or none'),
        (["make-tiny", "{empty}", "--set", "hidden=1979-05-27"], "must be an integer"),
        (["make-tiny", "{empty}", "--set", "hidden={{a=1}}"], "must be an integer"),
        (["make-tiny", "{empty}", "--set", "heads=3"], "num_key_value_heads is 2; must be a divisor"),
        (["make-tiny", "{empty}", "--dtype", "float64"], "dtype is 'float64'; must be one of"),
        (["make-tiny", "{empty}", "--shards", "0"], "'--shards'"),
        (["make-tiny", "{empty}", "--shards", "100000"], "shards is 100000; must be an integer in [1, "),
        (["make-tiny", "{file}"], "is not a directory"),
        (["make-tiny", "{file}/below"], "cannot be written (Not a directory)"),
        (["make-tiny", "{real}"], "holds model.safetensors, which make-tiny did not write; choose another directory, or say --force"),
        (["make-tiny"], "Missing argument 'DIR'"),
        (["make-tiny", "{empty}", "--st", "layers=1"], "No such option"),
        (["server"], "No such command 'server'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2_before_anything_is_loaded(monkeypatch, capsys, tmp_path, tiny, arguments, message):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for name in ("empty", "real"):
            (tmp_path / name).mkdir()
        for path in (tmp_path / "file", tmp_path / "real/model.safetensors"):
            path.write_text("somebody's")
        os.mkfifo(tmp_path / "pipe")
        values = {"tiny": tiny, "taken": other.getsockname()[1], **{name: tmp_path / name for name in ("empty", "real", "file", "pipe")}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("revolta_serve.runner.runner.Runner.load", lambda *_: pytest.fail("the weights were loaded"))
            code, out, err = run(monkeypatch, capsys, *(argument.format(**values) for argument in arguments))
    assert code == 2
    assert out == ""
    assert message.format(**values) in err
    assert not list((tmp_path / "empty").iterdir())
    assert {path.read_text() for path in (tmp_path / "file", tmp_path / "real/model.safetensors")} == {"somebody's"}
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("revolta-serve: error: ")


def test_without_a_command_there_is_help_and_exit_2(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys)
    assert (code, err) == (2, "")
    assert all(re.search(rf"^  {command} ", out, re.MULTILINE) for command in ("serve", "generate", "make-tiny", "demo", "doctor"))
    code, out, err = run(monkeypatch, capsys, "make-tiny", "--help")
    assert (code, err) == (0, "")
    assert "--force" in out


def test_logits_that_cannot_be_written_after_all_are_one_line(monkeypatch, capsys, tiny, tmp_path):
    path, run_engine = tmp_path / "logits", generate._run
    # The place is taken while the tokens are computed.
    monkeypatch.setattr(generate, "_run", lambda *arguments: (path.mkdir(), run_engine(*arguments))[1])
    code, _, err = run(monkeypatch, capsys, "generate", tiny, "--token-ids", "5", "--max-tokens", 1, "--logits", path)
    assert code == 2
    assert re.fullmatch(r"revolta-serve: error: --logits \S+ could not be written \(.*\); choose another place\n", err)


def test_help_is_quick_and_loads_nothing_heavy():
    code = "import sys; from revolta_serve import cli; print([m for m in ('torch', 'starlette', 'uvicorn', 'zmq') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_neither_the_api_process_nor_the_engine_without_its_worker_imports_torch():
    code = "import sys; from revolta_serve.commands import serve; from revolta_serve.engine import process; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_the_key_of_the_environment_is_used_unless_a_flag_gives_one(monkeypatch):
    monkeypatch.setenv("REVOLTA_API_KEY", "sesame")
    loaded = cli._load("cpu", "m", {}, None)
    assert (loaded.config.api.keys, loaded.sources["api.keys"]) == (("sesame",), "REVOLTA_API_KEY")
    assert cli._load("cpu", "m", {"api.keys": ("other",)}, None).config.api.keys == ("other",)
    monkeypatch.setenv("REVOLTA_API_KEY", "")
    with pytest.raises(ConfigError, match=r"api\.keys contains an empty string; remove it \(api\.keys is from REVOLTA_API_KEY\)"):
        cli._load("cpu", "m", {}, None)
    monkeypatch.delenv("REVOLTA_API_KEY")
    assert cli._load("cpu", "m", {}, None).config.api.keys == ()


def test_a_port_of_zero_is_a_free_one_and_ipv6_has_brackets():
    with bind(ApiConfig(port=0)) as listener:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url_of(listener))
        with pytest.raises(ConfigError, match="choose another with --port"):
            bind(ApiConfig(port=listener.getsockname()[1]))
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 0 .*; give an address of this machine with --host"):
        bind(ApiConfig(host="192.0.2.1", port=0))
    with bind(ApiConfig(host="::1", port=0)) as listener:
        assert url_of(listener).startswith("http://[::1]:")


def test_generate_prints_and_writes_logits(monkeypatch, capsys, tiny, tmp_path):
    path = tmp_path / "out.safetensors"
    ids = ",".join(map(str, PROMPT))
    with pytest.MonkeyPatch.context() as patch:
        code, out, err = run(patch, capsys, "generate", tiny, "--token-ids", ids, "--max-tokens", 6, "--ignore-eos", "--logits", path)
    assert code == 0
    tokens = [int(item) for item in out.strip().split(",")]
    saved = load_file(path)
    assert saved["tokens"].tolist() == tokens == saved["logits"].argmax(1).tolist()
    assert saved["prompt"].tolist() == PROMPT
    assert "4 prompt tokens, 6 generated" in err
    code, out, _ = run(monkeypatch, capsys, "generate", tiny, "--prompt", "hello", "--max-tokens", 3, "--temperature", 1, "--seed", 3)
    assert code == 0
    assert out.endswith("\n")


class Server:
    """revolta-serve in a process of its own, with its output in files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.out, self.err = folder / "out", folder / "err"
        with open(self.out, "w") as out, open(self.err, "w") as err:
            self.process = subprocess.Popen([*PROGRAM, *arguments], stdout=out, stderr=err)

    def wait_for(self, pattern: str, seconds: float = 90) -> str:
        """The first group of a pattern that must appear on standard output."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.out.read_text())):
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, "it did not appear in time"
            time.sleep(0.02)
        return found[1]

    def engine(self) -> int:
        """Process id of the engine: the server's only child."""
        (pid,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(pid)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tiny, tmp_path):
    running = Server(tmp_path, "serve", str(tiny), "--port", "0", "--set", "engine.heartbeat_interval=0.1")
    yield running
    running.end()


def stream(url, **fields):
    body = {"prompt": PROMPT, "max_tokens": 900, "stream": True, "ignore_eos": True, **fields}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60)


def test_a_server_from_start_to_sigterm(server, tiny, capsys):
    url = server.wait_for(r"listening on (http://\S+)")
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()["phase"]) == (503, "starting"), "answers while the model loads"
    server.wait_for(r"(ready after) ")
    assert httpx.get(f"{url}/ready").status_code == 200
    assert "state slots" in server.out.read_text()

    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    choice = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    with pytest.MonkeyPatch.context() as patch:
        _, out, _ = run(
            patch, capsys, "generate", tiny, "--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", 6, "--ignore-eos"
        )  # fmt: skip
    assert choice["token_ids"] == [int(item) for item in out.strip().split(",")], "the server and the command line say the same"

    with stream(url) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait(15) == 0


def test_kill_9_of_the_engine_ends_the_server_with_an_error(server):
    url = server.wait_for(r"listening on (http://\S+)")
    server.wait_for(r"(ready after) ")
    engine = server.engine()
    with stream(url) as response:
        lines = response.iter_lines()
        next(lines)
        began = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert time.monotonic() - began < 5
    assert rest[-1] == "data: [DONE]"
    assert "SIGKILL" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
    assert server.process.wait(10) == 1
    assert "the server ends" in server.err.read_text()


def test_a_checkpoint_that_cannot_be_loaded_exits_5(tmp_path):
    directory = tmp_path / "broken"
    make_tiny(directory, layers=4)
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"][3, 5] = float("nan")  # found only when it is read
    save_file(tensors, weights)
    server = Server(tmp_path, "serve", str(directory), "--port", "0")
    try:
        assert server.process.wait(60) == 5
    finally:
        server.end()
    error = server.err.read_text()
    assert "not finite" in error
    assert "Traceback" not in error


def test_two_ranks_answer_like_one(tiny):
    """The real runner behind real channels: both ranks get every plan, and the tokens are those of one rank."""

    async def answer(tensor):
        checked = check(profile.load("cpu", {"model.path": str(tiny), "parallel.tensor": tensor}).config)
        client = EngineClient(checked.config)
        await client.start()
        try:
            assert [report.rank for report in await client.ready()] == list(range(tensor))
            request = GenerateRequest(id="a", prompt=tuple(range(100)), max_tokens=8, sampling=SamplingParams(temperature=0.0))
            (stream,) = await client.submit([request])
            return [token async for output in stream for token in output.tokens]
        finally:
            await client.close()

    assert asyncio.run(answer(2)) == asyncio.run(answer(1))


def test_the_demo_shows_an_answer_and_its_numbers(tmp_path):
    server = Server(tmp_path, "demo", "--max-tokens", "8")
    try:
        assert server.process.wait(120) == 0, server.err.read_text()
    finally:
        server.end()
    out = server.out.read_text()
    assert "question: What does a V100 do all day?" in out
    assert re.search(r"load [\d.]+ s \| first token \d+ ms \| \d+ tokens/s \| [\d.]+ ms/step \| 8 tokens, finish length", out)
    assert "Random weights print noise" in out


def test_doctor_reports_every_area_and_its_exit_code_says_if_one_fails(capsys):
    found = list(findings())
    assert {finding.name for finding in found} >= {"python", "packages", "processes", "sockets", "torch", "rows", "gpu", "nvrtc"}
    assert all(finding.fix for finding in found if finding.state != "ok")
    assert doctor() == (3 if any(finding.state == "FAIL" for finding in found) else 0)
    assert "matrix products are independent" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "ranges", "fine"),
    [
        ("2.13.0+cpu", [">=2.10", "<2.14"], True),
        ("2.9", [">=2.10"], False),
        ("2.14.0", ["<2.14"], False),
        ("4.1.0", [">=3", "<4"], False),
        ("3.0", ["==3"], True),
        ("1.0rc1", [">=1"], True),
        ("1.5", ["!=1.5"], False),
        ("1.5", ["!=1.4", ">1.2"], True),
        ("1.5", ["~=1.2"], False),
        ("1.0", ["===1.0"], False),
        ("1.5", ["==1.*"], False),
    ],
)
def test_version_ranges(version, ranges, fine):
    assert satisfies(version, ranges) == fine


def test_requirements_are_split():
    assert requirement("torch<2.14,>=2.10") == ("torch", ["<2.14", ">=2.10"])
    assert requirement("sm70kernels") == ("sm70kernels", [])
