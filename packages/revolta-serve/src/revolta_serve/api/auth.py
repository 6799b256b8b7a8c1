"""API keys. With any key configured every route needs one, but for /health, /ready and /version."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from revolta_serve.api.errors import error_response
from revolta_serve.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})


class KeyGuard:
    """ASGI middleware that answers 401 to requests without an accepted key.

    A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Digests are compared, all of them and in constant time, so that
    the time taken tells nothing about the keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = tuple(_digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = _presented(Headers(scope=scope))
        if key is not None and self._accepts(key):
            scope.setdefault("state", {})["tenant"] = _tenant(key)
            await self._app(scope, receive, send)
            return
        message = "no API key: send Authorization: Bearer KEY or x-api-key: KEY" if key is None else "this API key is not accepted"
        response = error_response(AuthenticationError(message), {"www-authenticate": "Bearer"})
        await response(scope, receive, send)

    def _accepts(self, key: str) -> bool:
        presented = _digest(key.encode("latin-1"))
        # A sum, so that every digest is compared whichever of them matches.
        return sum(hmac.compare_digest(presented, digest) for digest in self._digests) > 0


def tenant_of(request: Request) -> str:
    """Whose request it is: a name for the key that it came with, which tells nothing of the key; "" where none is needed."""
    return str(getattr(request.state, "tenant", ""))


def _tenant(key: str) -> str:
    return hashlib.blake2b(key.encode("latin-1"), digest_size=6, person=b"revolta-tenant").hexdigest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _presented(headers: Headers) -> str | None:
    """The key of a request. Headers are latin-1 text; a UTF-8 key survives the round trip."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip() or None
