"""The way of a request for generated text, the same for every dialect: read, check, submit, answer."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import ASGIApp

from revolta_serve.api.auth import tenant_of
from revolta_serve.api.body import read_fields
from revolta_serve.api.context import Api, api_of
from revolta_serve.api.fields import Fields
from revolta_serve.api.generation import Generation
from revolta_serve.api.options import Options
from revolta_serve.api.prompt import Prompt
from revolta_serve.api.render import Renderer, request_id
from revolta_serve.api.sse import EventStream, WholeAnswer
from revolta_serve.text.reasoning import ThinkTokens


class Plan(Protocol):
    """A checked request."""

    @property
    def options(self) -> Options:
        """What it asks for."""
        ...

    @property
    def prompts(self) -> Sequence[Prompt]:
        """One or more."""
        ...


P = TypeVar("P", bound=Plan)


async def respond(
    request: Request,
    prefix: str,
    read: Callable[[Api, Fields], P],
    render: Callable[[Api, str, P], Renderer],
    think: ThinkTokens | None,
) -> ASGIApp:
    """The response to a request, in the form it asks for. Everything about it is checked before the first byte goes out.

    prefix: of the answer's id. read: checks and encodes, in a thread, for it may take a while. think: None where reasoning is not
    told from content. Raises RequestError and EngineUnavailableError.
    """
    api = api_of(request)
    api.check_ready()
    fields = await read_fields(request, api.config.api.max_request_bytes)
    id = f"{prefix}-{request_id(request, fields)}"
    plan = await run_in_threadpool(read, api, fields)
    generation = Generation(api, id, plan.prompts, plan.options, think, tenant_of(request))
    renderer = render(api, id, plan)
    await generation.start()
    if plan.options.stream:
        return EventStream(generation, renderer, api.config.api.sse_keep_alive)
    return WholeAnswer(generation, renderer)
