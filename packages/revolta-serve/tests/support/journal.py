"""What a server with api.log_format json and api.log_requests has written: how every request ended, and what went wrong."""

import json
from collections import Counter
from typing import Any

from revolta_serve.testing import RunningServer

SETTINGS = {"api.log_format": "json", "api.log_requests": True}


def ended(server: RunningServer) -> dict[str, list[dict[str, Any]]]:
    """The lines about ended requests of the engine, by the request_id that their client sent."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for text in server.log().splitlines():
        line = json.loads(text)
        if line["logger"] == "revolta_serve.requests":
            lines.setdefault(line["request"].split("-")[1], []).append(line)
    return lines


def troubles(server: RunningServer) -> list[str]:
    """Lines of warnings and errors, and those that are no log lines at all, such as traces of C code."""
    return [text for text in server.log().splitlines() if not text.startswith("{") or json.loads(text)["level"] not in ("debug", "info")]


def places(lines: dict[str, list[dict[str, Any]]]) -> Counter[str]:
    """Where requests were when they were given up: in the queue, in their prompt, in their answer."""
    aborted = [line for each in lines.values() for line in each if line["finish"] == "abort"]
    return Counter("queue" if not line["started"] else "answer" if line["generated_tokens"] else "prompt" for line in aborted)
