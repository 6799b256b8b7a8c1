"""The application: routes, guards and the mapping of errors."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from revolta_serve.api import chat, completions, models, operator, ops, tokenizer
from revolta_serve.api.auth import KeyGuard
from revolta_serve.api.context import Api
from revolta_serve.api.engine_port import EnginePort
from revolta_serve.api.errors import on_client_disconnect, on_http_exception, on_revolta_error, on_unexpected
from revolta_serve.api.operator import Facts
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
    Route("/ready", ops.ready, methods=["GET"]),
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
    facts: Facts | None = None,
) -> Starlette:
    """The ASGI application over an engine, which may still be starting. `lifespan` starts and ends what the caller owns.

    facts: what /server_info shows beside the configuration. Raises CheckpointError when the vocabulary has no <think> and </think>.
    """
    routes = [*ROUTES, *(operator.ROUTES if config.api.operator_routes else ())]
    metrics = Metrics(config.served_names[0], engine.status, _cache_info(config), map(_template, routes))
    engine.observe(metrics.step)
    middleware = [Middleware(HttpMetrics, metrics=metrics, routes=routes), Middleware(KeyGuard, keys=config.api.keys)]
    handlers = {
        RevoltaError: on_revolta_error,
        HTTPException: on_http_exception,
        ClientDisconnect: on_client_disconnect,
        Exception: on_unexpected,
    }
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.state.facts = facts or Facts()
    app.state.api = Api(config, engine, tokenizer, template, defaults, ThinkTokens(tokenizer), metrics)
    return app


class HttpMetrics:
    """ASGI middleware that counts responses by route and status, and measures them.

    An exception that no handler knows is answered outside of this, by starlette, with a 500.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[BaseRoute]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        status, route, began = 0, self._route(scope), time.monotonic()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status >= 400:
                    self._metrics.http_error(route, status)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception:
            if not status:
                status = 500
                self._metrics.http_error(route, status)
            raise
        finally:
            if status:
                self._metrics.http_response(route, status, time.monotonic() - began)

    def _route(self, scope: Scope) -> str:
        """The route of a request: a closed set, whatever paths clients invent."""
        return next((_template(route) for route in self._routes if route.matches(scope)[0] != Match.NONE), "unknown")


def _template(route: BaseRoute) -> str:
    """The path of a route as metrics show it."""
    assert isinstance(route, Route)
    return route.path.replace(":path}", "}")


def _cache_info(config: ServeConfig) -> dict[str, str]:
    """Labels of cache_config_info."""
    cache = config.cache
    return {
        "memory_bytes": str(cache.memory_bytes),
        "max_model_len": str(config.schedule.max_model_len),
        "prefix": str(cache.prefix).lower(),
        "generated": str(cache.generated).lower(),
    }
