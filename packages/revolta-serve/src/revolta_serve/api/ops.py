"""Routes for whoever runs the server: /health, /ready, /version, /metrics."""

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from revolta_serve.api.context import VERSION, api_of
from revolta_serve.metrics import CONTENT_TYPE


async def health(request: Request) -> Response:
    """200 without a body while the engine serves; else 503 with its phase and the seconds since the start."""
    api = api_of(request)
    if api.engine.phase == "ready":
        return Response(status_code=200)
    body = {"phase": api.engine.phase, "elapsed": round(time.time() - api.created, 3)}
    return Response(msgspec.json.encode(body), 503, media_type="application/json")


async def version(request: Request) -> Response:
    """The version of the package."""
    return Response(msgspec.json.encode({"version": VERSION}), media_type="application/json")


async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    return Response(api_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})
