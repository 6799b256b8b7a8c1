"""The application: routes, guards and the mapping of errors."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from revolta_serve.api import chat, completions, models, ops, tokenizer
from revolta_serve.api.auth import KeyGuard
from revolta_serve.api.context import Api
from revolta_serve.api.engine_port import EnginePort
from revolta_serve.api.errors import on_client_disconnect, on_http_exception, on_revolta_error, on_unexpected
from revolta_serve.config import ServeConfig
from revolta_serve.errors import RevoltaError
from revolta_serve.metrics import Metrics
from revolta_serve.text.chat_template import ChatTemplate
from revolta_serve.text.defaults import GenerationDefaults
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.text.tokenizer import Tokenizer

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]

ROUTES: tuple[BaseRoute, ...] = (
    Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
    Route("/v1/completions", completions.completions, methods=["POST"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{id:path}", models.get_model, methods=["GET"]),
    Route("/tokenize", tokenizer.tokenize, methods=["POST"]),
    Route("/detokenize", tokenizer.detokenize, methods=["POST"]),
    Route("/health", ops.health, methods=["GET"]),
    Route("/ready", ops.health, methods=["GET"]),
    Route("/version", ops.version, methods=["GET"]),
    Route("/metrics", ops.metrics, methods=["GET"]),
)


def create_app(
    config: ServeConfig,
    engine: EnginePort,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    defaults: GenerationDefaults,
    *,
    lifespan: Lifespan | None = None,
) -> Starlette:
    """The ASGI application over an engine, which may still be starting. `lifespan` starts and ends what the caller owns.

    Raises CheckpointError when the vocabulary has no <think> and </think>.
    """
    metrics = Metrics(config.served_names[0], engine.status)
    middleware = [Middleware(ErrorCount, metrics=metrics), Middleware(KeyGuard, keys=config.api.keys)]
    handlers = {
        RevoltaError: on_revolta_error,
        HTTPException: on_http_exception,
        ClientDisconnect: on_client_disconnect,
        Exception: on_unexpected,
    }
    app = Starlette(routes=list(ROUTES), middleware=middleware, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.api = Api(config, engine, tokenizer, template, defaults, ThinkTokens(tokenizer), metrics)
    return app


class ErrorCount:
    """ASGI middleware that counts responses with an error status by route.

    An exception that no handler knows is answered outside of this, by starlette, with a 500.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if message["status"] >= 400:
                    self._metrics.http_error(_route(scope["path"]), message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not started:
                self._metrics.http_error(_route(scope["path"]), 500)
            raise


def _route(path: str) -> str:
    """The route of a path: a closed set, whatever paths clients invent."""
    if path.startswith("/v1/models/"):
        return "/v1/models/{id}"
    return path if any(isinstance(route, Route) and route.path == path for route in ROUTES) else "unknown"
