"""Routes for whoever runs the server, with api.operator_routes: pause and resume, reset the prefix cache, look at everything."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import Any, cast, get_args

import msgspec
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from revolta_serve.api.context import api_of
from revolta_serve.api.fields import Fields
from revolta_serve.config import get, options
from revolta_serve.errors import RequestError
from revolta_serve.types import PauseMode

log = logging.getLogger(__name__)

PACKAGES = ("revolta-serve", "sm70kernels", "torch", "tokenizers", "starlette", "uvicorn", "msgspec", "pyzmq", "prometheus-client")
BOOLEANS = ("true", "false")


@dataclass(frozen=True)
class Facts:
    """What a server knows of itself beside its configuration."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Where the value of section.key came from, of all that are no defaults."""
    capacity: Mapping[str, Any] = field(default_factory=dict)
    """The planned pools of one rank."""


async def pause(request: Request) -> Response:
    """POST /pause?mode=abort|wait|keep&clear_cache=true|false: answers once the pause is reached.

    clear_cache is true unless given, but false for keep, whose frozen requests would have to recompute what they hold.
    """
    query = _query(request, "mode", "clear_cache")
    mode = query.choice("mode", get_args(PauseMode), "abort")
    clear = query.choice("clear_cache", BOOLEANS, "false" if mode == "keep" else "true")
    await api_of(request).engine.pause(cast(PauseMode, mode), clear=clear == "true")
    log.info("paused, mode %s, prefix cache %s", mode, "cleared" if clear == "true" else "kept")
    return _json({"status": "paused"})


async def resume(request: Request) -> Response:
    """POST /resume: ends a pause."""
    _query(request)
    await api_of(request).engine.resume()
    log.info("resumed")
    return _json({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """GET /is_paused: whether requests that come now would have to wait for a resume."""
    _query(request)
    return _json({"is_paused": api_of(request).engine.status().paused})


async def reset_prefix_cache(request: Request) -> Response:
    """POST /reset_prefix_cache?reset_running_requests=true|false (false): 200 with what was freed, 409 if blocks stay in use."""
    query = _query(request, "reset_running_requests")
    preempt = query.choice("reset_running_requests", BOOLEANS, "false") == "true"
    reset = await api_of(request).engine.reset_cache(preempt=preempt)
    log.info(
        "prefix cache reset: %d snapshots and %d blocks freed, %d blocks in use", reset.snapshots_freed, reset.blocks_freed,
        reset.blocks_in_use,
    )  # fmt: skip
    if not reset.blocks_in_use:
        return _json(asdict(reset))
    reason = (
        f"running requests hold {reset.blocks_in_use} blocks, and what they computed can be reused again when they end; wait for them, "
        "or say reset_running_requests=true"
    )
    return _json({**asdict(reset), "reason": reason}, 409)


async def server_info(request: Request) -> Response:
    """GET /server_info?config_format=text|json (text): configuration with sources, capacity, phase, versions, counts."""
    shape = _query(request, "config_format").choice("config_format", ("text", "json"), "text")
    info = _info(request)
    if shape == "json":
        return _json(info)
    lines = [f"{path} = {entry['value']} ({entry['source']})" for path, entry in info.pop("config").items()]
    for title, values in info.items():
        lines += [f"{title}.{name} = {value}" for name, value in values.items()] if isinstance(values, dict) else [f"{title} = {values}"]
    return Response("\n".join(lines) + "\n", media_type="text/plain")


ROUTES: tuple[BaseRoute, ...] = (
    Route("/pause", pause, methods=["POST"]),
    Route("/resume", resume, methods=["POST"]),
    Route("/is_paused", is_paused, methods=["GET"]),
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    Route("/server_info", server_info, methods=["GET"]),
)


def _info(request: Request) -> dict[str, Any]:
    api, facts = api_of(request), request.app.state.facts
    assert isinstance(facts, Facts)
    config = {}
    for entry in options():
        value = get(api.config, entry.path)
        shown = f"{len(value)} set" if entry.secret else list(value) if isinstance(value, tuple) else value
        config[entry.path] = {"value": shown, "source": facts.sources.get(entry.path, "default")}
    return {
        "config": config,
        "digest": api.config.digest(),
        "capacity": dict(facts.capacity),
        "phase": api.engine.phase,
        "versions": {"python": python_version(), **{name: found for name in PACKAGES if (found := _version(name))}},
        "engine": asdict(api.engine.status()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # it runs from a source tree
        return None


def _query(request: Request, *known: str) -> Fields:
    """The query parameters. Raises RequestError for one that is unknown or comes twice: to ignore it would do something else."""
    pairs = request.query_params.multi_items()
    for number, (name, _) in enumerate(pairs):
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise RequestError(f"{name[:80]!r} is no parameter of {request.url.path}; {takes}", param=name[:80])
        if name in dict(pairs[:number]):
            raise RequestError(f"{name} is given twice; give it once", param=name)
    return Fields(dict(pairs))


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
