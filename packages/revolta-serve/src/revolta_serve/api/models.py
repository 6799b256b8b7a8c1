"""GET /v1/models and /v1/models/{id}."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from revolta_serve.api.chat_prompt import THINKING_DEFAULT
from revolta_serve.api.context import Api, api_of
from revolta_serve.api.errors import ModelNotFoundError
from revolta_serve.api.shapes import ModelCard, ModelList


async def list_models(request: Request) -> Response:
    """Every served name."""
    api = api_of(request)
    cards = [_card(api, name) for name in api.config.served_names]
    return Response(msgspec.json.encode(ModelList(data=cards)), media_type="application/json")


async def get_model(request: Request) -> Response:
    """One served name, which may contain slashes."""
    api = api_of(request)
    name = request.path_params["id"]
    if name not in api.config.served_names:
        served = ", ".join(api.config.served_names)
        raise ModelNotFoundError(f"model {name[:200]!r} is not served here; there is {served}", param="model")
    return Response(msgspec.json.encode(_card(api, name)), media_type="application/json")


def _card(api: Api, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=int(api.created),
        root=api.name,
        max_model_len=api.engine.max_model_len,
        thinking_default=THINKING_DEFAULT,
    )
