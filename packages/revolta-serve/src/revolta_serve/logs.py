"""Log lines of every process of a server: as text, or as one JSON object a line. Never a word of a prompt or an answer.

A line may carry values of its own, `log.info("...", extra={"fields": {...}})`: they are fields of the JSON object.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import asdict

from revolta_serve.config import ApiConfig
from revolta_serve.types import FinishReason, GenerateRequest, RequestRecord, SamplingParams

CHATTY = ("httpx", "httpcore", "uvicorn.error")
"""Libraries whose ordinary messages tell an operator nothing."""

console = logging.getLogger("revolta_serve.console")
"""For whoever started the server: what it does on standard output, why it ends (an error) on standard error. Whatever the log level."""

ALWAYS = ("temperature", "seed")
"""Sampling parameters that a line about a request always tells."""

_requests = logging.getLogger("revolta_serve.requests")


def configure(api: ApiConfig, process: str) -> None:
    """Set up every logger of this process, libraries' included. process: its name in the lines, such as `api` or `engine[0]`."""
    structured = api.log_format == "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLine(process) if structured else logging.Formatter(f"%(levelname)s %(asctime)s {process} %(name)s: %(message)s")
    )
    logging.basicConfig(level=api.log_level.upper(), handlers=[handler])
    logging.captureWarnings(structured)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    spoken = _Spoken()
    spoken.setFormatter(JsonLine(process) if structured else _PlainLine())
    console.handlers, console.propagate = [spoken], False
    console.setLevel(logging.INFO)


def parameters(request: GenerateRequest) -> dict[str, Any]:
    """What a request asks for, as far as it is a number that is not the usual one: no ids, which may be words of somebody's."""
    sampling = request.sampling
    asked = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    usual = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    return {
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        **{name: value for name, value in asked.items() if isinstance(value, int | float) and (value != usual[name] or name in ALWAYS)},
    }


def request_ended(id: str, finish: FinishReason, prompt_tokens: int, asked: Mapping[str, Any], record: RequestRecord | None) -> None:
    """One line about an ended request and what it asked for (`parameters`); without a record it never started."""
    fields: dict[str, Any] = {"request": id, "finish": finish, "started": record is not None, "prompt_tokens": prompt_tokens, **asked}
    if record is not None:
        fields |= asdict(record)
    shown = " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if name != "request")
    _requests.info("request %s ended: %s", id, shown, extra={"fields": fields})


class JsonLine(logging.Formatter):
    """time (UTC), level, logger, process, message, then the record's own fields; a trace in `exception`. ASCII, one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        entry = {**fields, **entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry, default=str)


class _PlainLine(logging.Formatter):
    """The message alone; an error says whose it is, as the command line's own errors do."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = "revolta-serve: error: " if record.levelno >= logging.ERROR else ""
        return f"{prefix}{record.getMessage()}"


class _Spoken(logging.Handler):
    """Prints: errors to standard error, all else to standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr if record.levelno >= logging.ERROR else sys.stdout, flush=True)


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
