"""The command `plan`, and the options that commands take from the configuration; nothing of it loads torch."""

import json
import re
import sys

import pytest

from revolta_serve import cli
from revolta_serve.config import options
from revolta_serve.profile import Loaded
from support import published


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    small = dict(num_hidden_layers=4, layer_types=None, num_experts=16, ngram_vocab_size_base=5000)
    return published.write(tmp_path_factory.mktemp("model"), **small)


def run(monkeypatch, capsys, *arguments):
    """Exit code, output and error of a command."""
    monkeypatch.setattr(sys, "argv", ["revolta-serve", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, *capsys.readouterr()


def test_plan_prints_lines(monkeypatch, capsys, directory):
    code, out, err = run(monkeypatch, capsys, "plan", directory, "--profile", "v100x4", "--weights", "awq-g32")
    assert (code, err) == (0, "")
    assert all(line.startswith(("plan: ", "cache: ")) for line in out.splitlines())
    assert "state slots" in out
    assert "mtp_k " in out


def test_plan_prints_an_object_with_the_numbers_of_the_lines(monkeypatch, capsys, directory):
    arguments = ("plan", directory, "--profile", "v100x4", "--weights", "nvfp4", "--max-model-len", 200_000)
    _, text, _ = run(monkeypatch, capsys, *arguments)
    code, out, err = run(monkeypatch, capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["max_model_len"] == 200_000
    blocks, tokens, slots = re.search(r"cache: ([\d,]+) blocks of 64 tokens = ([\d,]+) tokens .*?, ([\d,]+) state slots", text).groups()
    assert int(blocks.replace(",", "")) == found["blocks"]["count"]
    assert int(tokens.replace(",", "")) == found["tokens"]
    assert int(slots.replace(",", "")) == found["slots"]["count"]
    assert f"the longest context that fits is {found['largest_context']:,} tokens" in text
    assert "comparison" not in found


def test_flags_of_the_configuration_change_the_plan(monkeypatch, capsys, directory):
    def plan(*arguments):
        code, out, err = run(monkeypatch, capsys, "plan", directory, "--profile", "v100x4", "--weights", "awq-g32", "--json", *arguments)
        assert (code, err) == (0, "")
        return json.loads(out)

    usual = plan()
    assert plan("--speculation", "none")["blocks"]["bytes_each"] == usual["blocks"]["bytes_each"] // 2
    assert plan("--kv-cache-dtype", "float16")["blocks"]["bytes_each"] > usual["blocks"]["bytes_each"]
    assert plan("--gpu-memory-utilization", "0.9")["device"]["planned_bytes"] == 34_057_748_480 * 9 // 10
    assert plan("--set", "cache.index_ranks=1")["blocks"]["bytes_each"] == usual["blocks"]["bytes_each"] + 2 * 8 * 256


def test_the_comparison_is_part_of_both_forms(monkeypatch, capsys, directory):
    arguments = ("plan", directory, "--profile", "v100x4", "--weights", "awq-g32", "--layout", "predecessor")
    _, text, _ = run(monkeypatch, capsys, *arguments)
    _, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    (row,) = json.loads(out)["comparison"]
    assert (row["name"], row["budget"]) == ("this plan", "planned")
    assert f"predecessor: {row['predecessor']['tokens']:,} tokens" in text
    assert f"ours: {row['ours']['tokens']:,} tokens beside {row['ours']['slots']} slots" in text


def test_a_terminal_gets_tables_with_the_same_numbers(monkeypatch, capsys, directory):
    arguments = ("plan", directory, "--profile", "v100x4", "--weights", "awq-g32", "--layout", "predecessor")
    _, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    found = json.loads(out)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    for part in (*found["weights"], *found["work_space_estimated"]):
        assert re.search(rf"{re.escape(part['part'])}.* {part['bytes']:,} ", out), part
    for plane in (*found["blocks"]["planes"], *found["slots"]["planes"]):
        assert re.search(rf"{plane['name']} .*{' x '.join(map(str, plane['shape']))}.* {plane['bytes']:,} ", out), plane
    assert f"{found['blocks']['bytes']:,}" in out
    assert f"{found['slots']['bytes']:,}" in out
    assert f"{found['device']['left_bytes']:,}" in out
    assert f"{found['comparison'][0]['ours']['tokens']:,}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}", "--weights", "q4"], "--weights 'q4' is none of checkpoint, dense, awq-g32, nvfp4, fp4-local"),
        (["{model}", "--layout", "theirs"], "--layout 'theirs' is none of ours, predecessor"),
        (["{model}/nowhere"], "/nowhere' does not exist; give the directory that holds config.json"),
        (["{empty}"], "config.json: no such file"),
        (["{model}", "--profile", "v100x4", "--set", "cache.device_bytes=1000000000"], "0 remain of the 950,000,000 planned"),
        (["{model}", "--speculation", "eagle"], "speculate.method='eagle' is none of none, mtp, dflash"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(monkeypatch, capsys, tmp_path, directory, arguments, message):
    values = {"model": directory, "empty": tmp_path}
    code, out, err = run(monkeypatch, capsys, "plan", *(argument.format(**values) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


BOOLEANS = [entry for entry in options() if entry.kind is bool and entry.flag]


def test_there_are_boolean_flags_of_both_defaults():
    assert {entry.default for entry in BOOLEANS} == {True, False}


@pytest.mark.parametrize("entry", BOOLEANS, ids=lambda entry: entry.flag)
def test_boolean_fields_can_be_turned_on_and_off(monkeypatch, capsys, directory, entry):
    seen = []

    def capture(profile_name, model, flags, sets):
        seen.append(flags)
        return load(profile_name, model, flags, sets)

    load = cli._load
    monkeypatch.setattr(cli, "_load", capture)
    loaded = []
    for argument in ([entry.flag], [f"--no-{entry.flag[2:]}"], []):
        monkeypatch.setattr("revolta_serve.commands.plan.plan", lambda config, **_: loaded.append(config) or 0)
        assert run(monkeypatch, capsys, "plan", directory, *argument)[0] == 0
    assert seen == [{entry.path: True}, {entry.path: False}, {}]
    section, key = entry.path.split(".")
    assert [getattr(getattr(config, section), key) for config in loaded] == [True, False, entry.default]


def test_the_source_of_a_boolean_is_its_flag(directory):
    loaded = cli._load("cpu", str(directory), {"cache.prefix": False}, None)
    assert isinstance(loaded, Loaded)
    assert loaded.sources["cache.prefix"] == "--prefix-caching"


def test_help_shows_both_forms_and_the_default(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(monkeypatch, capsys, "serve", "--help")
    text = " ".join(out.split())
    assert "--prefix-caching / --no-prefix-caching reuse what earlier requests computed for the same beginning of a prompt [on]" in text
    assert "--enable-log-requests / --no-enable-log-requests log one line for every ended request [off]" in text


def test_plan_says_when_this_machine_cannot_serve_it(monkeypatch, capsys, directory):
    """Without a device the machine is the one it runs on; with one it is another."""
    arguments = ("plan", directory, "--weights", "dense", "--max-model-len", 4096, "--kv-cache-memory-bytes", 10**15)
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert re.search(r"warning: this machine cannot serve it: weights of .* and a cache of .* are more than the", err)
    _, out, _ = run(monkeypatch, capsys, *arguments, "--json")
    assert json.loads(out)["refused_here"].startswith("weights of ")
    _, out, _ = run(monkeypatch, capsys, "plan", directory, "--profile", "v100x4", "--weights", "awq-g32", "--json")
    assert json.loads(out)["refused_here"] is None
