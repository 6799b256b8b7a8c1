"""Stop strings end to end: the text, the reason, the counts, and the engine told to stop."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.script_engine import ScriptEngine, Server, data_lines, wait_for
from support.text import byte_tokens, tokenizer

END = tokenizer().added["<|im_end|>"]


@pytest.mark.parametrize("group", [1, 2, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_a_match_cuts_text_tokens_and_counts(serve: Callable[..., Server], group: int, stream: bool) -> None:
    script = [*byte_tokens("xABy" + "z" * 50), END]
    server = serve(ScriptEngine(script, group=group, delay=0.002))
    fields: dict[str, Any] = {"stop": ["B", "AB"], "return_token_ids": True, "max_tokens": 100}
    response = server.complete(**fields, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    if stream:
        chunks = [json.loads(line) for line in data_lines(response.text)[:-1]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(choice["text"] for choice in choices)
        tokens = [token for choice in choices for token in choice["token_ids"]]
        last, usage = choices[-1], chunks[-1]["usage"]
    else:
        last, usage = response.json()["choices"][0], response.json()["usage"]
        text, tokens = last["text"], last["token_ids"]
    assert (text, last["finish_reason"], last["stop_reason"]) == ("x", "stop", "AB")
    assert tokens == script[:3]
    assert usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    if group < 100:
        wait_for(lambda: server.engine.aborted == [server.engine.requests[0].id])
    assert not server.engine.running


def test_variants(serve: Callable[..., Server]) -> None:
    server = serve(ScriptEngine([*byte_tokens("x🙂By"), END]))
    kept = server.complete(stop="🙂B", include_stop_str_in_output=True).json()["choices"][0]
    assert (kept["text"], kept["stop_reason"]) == ("x🙂B", "🙂B")
    last = server.complete(stop="B", max_tokens=6).json()["choices"][0]
    assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("x🙂", "stop", "B")
    partial = server.complete(stop="Byz").json()["choices"][0]
    assert (partial["text"], partial["finish_reason"], partial["stop_reason"]) == ("x🙂By", "stop", None)
    cut = server.complete(stop="Byz", max_tokens=6).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("x🙂B", "length")
    token = byte_tokens("B")[0]
    by_id = server.complete(stop_token_ids=[token]).json()["choices"][0]
    assert (by_id["text"], by_id["finish_reason"], by_id["stop_reason"]) == ("x🙂", "stop", token)


def test_only_the_matching_choice_ends(serve: Callable[..., Server]) -> None:
    scripts = iter([[*byte_tokens("aSTOPb"), END], [*byte_tokens("cd"), END]])
    answer = serve(ScriptEngine(lambda request: next(scripts))).complete(n=2, stop="STOP").json()
    assert [(choice["text"], choice["stop_reason"]) for choice in answer["choices"]] == [("a", "STOP"), ("cd", None)]
    assert answer["usage"]["completion_tokens"] == 5 + 3
