"""Log lines: one JSON object a line whatever is logged, and the same set-up in every process."""

import json
import logging
import subprocess
import sys

import pytest

from revolta_serve.logs import JsonLine, parameters
from revolta_serve.types import GenerateRequest, SamplingParams

PROGRAM = """
import logging, sys, warnings
from revolta_serve.config import ApiConfig
from revolta_serve.logs import configure, console, request_ended
from revolta_serve.types import RequestRecord
configure(ApiConfig(log_format=sys.argv[1], log_level=sys.argv[2]), "engine[3]")
log = logging.getLogger("revolta_serve.somewhere")
log.debug("too quiet")
log.info("two\\nlines of %s", "text", extra={"fields": {"steps": 3, "message": "no"}})
logging.getLogger("uvicorn.error").info("a library's chatter")
logging.getLogger("uvicorn.error").warning("a library's warning")
console.info("ready")
console.error("it ends")
warnings.warn("careful")
try:
    {}["missing"]
except KeyError:
    log.exception("failed")
request_ended("a-1", "stop", 10, {"max_tokens": 7}, RequestRecord(
    prompt_tokens=10, generated_tokens=4, cached_tokens=0, seamless=True, miss="cold",
    queue_seconds=0.5, prefill_seconds=0.25, decode_seconds=1.0, preemptions=2, slices=1))
request_ended("a-2", "abort", 11, {}, None)
"""


def run(form, level):
    done = subprocess.run([sys.executable, "-c", PROGRAM, form, level], capture_output=True, text=True, check=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_json_is_one_object_a_line_on_both_streams():
    out, err = run("json", "info")
    (ready,) = map(json.loads, out)
    assert (ready["message"], ready["level"], ready["process"]) == ("ready", "info", "engine[3]")
    lines = [json.loads(line) for line in err]
    assert all({"time", "level", "logger", "process", "message"} <= set(line) for line in lines)
    text, library, ends, warned, failed, first, second = lines
    assert (text["message"], text["steps"], text["logger"]) == ("two\nlines of text", 3, "revolta_serve.somewhere")
    assert library["message"] == "a library's warning"
    assert (ends["message"], ends["level"]) == ("it ends", "error")
    assert "careful" in warned["message"]
    assert failed["exception"].endswith("KeyError: 'missing'")
    assert first["time"] >= failed["time"] > "2026"
    assert first["time"].endswith("+00:00")
    expected = {
        "request": "a-1", "finish": "stop", "started": True, "prompt_tokens": 10, "max_tokens": 7, "cached_tokens": 0, "seamless": True,
        "miss": "cold", "generated_tokens": 4, "queue_seconds": 0.5, "prefill_seconds": 0.25, "decode_seconds": 1.0, "preemptions": 2,
        "slices": 1,
    }  # fmt: skip
    assert expected.items() <= first.items()
    assert (second["request"], second["finish"], second["started"]) == ("a-2", "abort", False)


def test_text_is_for_people():
    out, err = run("text", "info")
    assert out == ["ready"]
    assert err[0].startswith("INFO ")
    assert " engine[3] revolta_serve.somewhere: two" in err[0]
    assert "revolta-serve: error: it ends" in err
    assert any(line.endswith("request a-2 ended: finish=abort started=false prompt_tokens=11") for line in err)
    assert any(
        "finish=stop started=true prompt_tokens=10 max_tokens=7 generated_tokens=4 cached_tokens=0 seamless=true miss=cold" in line
        for line in err
    )


def test_the_level_holds_for_all_but_the_console():
    out, err = run("json", "error")
    assert [json.loads(line)["message"] for line in out] == ["ready"]
    assert [json.loads(line)["message"] for line in err] == ["it ends", "failed"]


@pytest.mark.parametrize("message", ["plain", 'tab\tquote" back\\slash', "two\nlines", "umlaut ü", "half \udcff", "\x00\x1b[31m"])
def test_any_text_is_one_ascii_line(message):
    line = JsonLine("api").format(logging.LogRecord("name", logging.INFO, "file", 1, message, (), None))
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line)["message"] == message


def test_a_line_about_a_request_tells_its_numbers_and_no_ids():
    sampling = SamplingParams(temperature=0.5, top_k=3, seed=9, logit_bias=((7, 1.0),), allowed_tokens=(7,), bad_words=((7,),))
    request = GenerateRequest(id="a", prompt=(7,), max_tokens=5, sampling=sampling, stop_token_ids=(7,))
    assert parameters(request) == {"max_tokens": 5, "priority": 0, "temperature": 0.5, "top_k": 3, "seed": 9}
