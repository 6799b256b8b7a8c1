"""Routes for whoever watches the server: /health, /ready, /version, /metrics."""

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from revolta_serve.api.context import VERSION, Api, api_of
from revolta_serve.metrics import CONTENT_TYPE

NOT_READY = {
    "starting": "the model is still loading",
    "draining": "the server is shutting down",
    "dead": "the engine has stopped",
    "ready": "the engine is paused: requests wait for POST /resume",
}
"""Why no request is computed, by phase."""


async def health(request: Request) -> Response:
    """200 without a body while the engine serves or is paused; else 503 with phase, reason and the seconds since the start."""
    api = api_of(request)
    return Response(status_code=200) if api.engine.phase == "ready" else _unavailable(api)


async def ready(request: Request) -> Response:
    """200 without a body while a request would be computed at once; 503, as /health and also during a pause, while it would not."""
    api = api_of(request)
    return Response(status_code=200) if api.engine.phase == "ready" and not api.engine.status().paused else _unavailable(api)


async def version(request: Request) -> Response:
    """The version of the package."""
    return Response(msgspec.json.encode({"version": VERSION}), media_type="application/json")


async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    return Response(api_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


def _unavailable(api: Api) -> Response:
    phase = api.engine.phase
    body = {"phase": phase, "reason": NOT_READY[phase], "elapsed": round(time.time() - api.created, 3)}
    return Response(msgspec.json.encode(body), 503, media_type="application/json")
