"""Exceptions to responses, in the OpenAI error shape.

{"error": {"message", "type", "param", "code"}}: `code` is OpenAI's string where it defines one, else the HTTP status.
"""

import logging
import re
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from revolta_serve.errors import EngineError, EngineUnavailableError, NotFoundError, QueueFullError, RequestError, RevoltaError

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_INSIDE = re.compile(r"(the engine failed in a step|the engine is dead): [A-Za-z_]\w*: .*", re.DOTALL)
"""What the engine says of an exception that is none of ours: `Type: text`. Its own words, such as `rank 1 ended`, look different."""
RETRY_SECONDS = "1"


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served."""

    code = "model_not_found"


class UnsupportedParameterError(RequestError):
    """A field of the OpenAI API that would change the answer and that this server cannot honour."""

    code = "unsupported_parameter"


class MethodNotAllowedError(RequestError):
    """The route exists, but not for this method."""

    status = 405


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


def error_body(error: RevoltaError) -> dict[str, Any]:
    """The OpenAI error object."""
    message = _ADDRESS.sub("", error.message)
    if isinstance(error, EngineError):
        message = _INSIDE.sub(r"\1; the server's log has the reason", message)
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code or error.status}}


def error_response(error: RevoltaError, headers: dict[str, str] | None = None) -> Response:
    """The whole response to a request that failed before anything was sent."""
    headers = dict(headers or {})
    if isinstance(error, QueueFullError | EngineUnavailableError):
        headers.setdefault("retry-after", RETRY_SECONDS)
    return Response(msgspec.json.encode(error_body(error)), error.status, headers, media_type="application/json")


def known(error: Exception) -> RevoltaError:
    """The error itself if it is one of ours; anything else is logged and becomes a server error that tells nothing of the inside."""
    if isinstance(error, RevoltaError):
        return error
    log.error("unexpected error", exc_info=error)
    return EngineError("internal error; the server's log has the details")


async def on_revolta_error(request: Request, error: Exception) -> Response:
    """Handler of every error of the tree."""
    return error_response(known(error))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler of what the router itself raises: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 404:
        return error_response(NotFoundError(f"no such route: {place}"))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return error_response(MethodNotAllowedError(f"{place}: use {allowed}"), dict(error.headers or {}))
    return error_response(known(error))


async def on_client_disconnect(request: Request, error: Exception) -> Response:
    """Handler of a connection that closed while the body was read; nobody sees this response but the access log."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=499)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Handler of everything else; the server logs the trace."""
    return error_response(EngineError("internal error; the server's log has the details"))
