"""POST /tokenize and /detokenize: what a prompt looks like to the model."""

import msgspec
from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from revolta_serve.api.body import read_fields
from revolta_serve.api.chat_prompt import read_chat_prompt
from revolta_serve.api.context import Api, api_of
from revolta_serve.api.fields import Fields
from revolta_serve.api.sampling import check_token_ids
from revolta_serve.api.shapes import Tokens
from revolta_serve.errors import RequestError


async def tokenize(request: Request) -> Response:
    """{prompt} as /v1/completions encodes it, or {messages, ...} as /v1/chat/completions does."""
    api = api_of(request)
    fields = await read_fields(request, api.config.api.max_request_bytes)
    return Response(await run_in_threadpool(_tokenize, api, fields), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """{tokens} to {prompt}; special tokens are spelled out."""
    api = api_of(request)
    fields = await read_fields(request, api.config.api.max_request_bytes)
    return Response(await run_in_threadpool(_detokenize, api, fields), media_type="application/json")


def _tokenize(api: Api, fields: Fields) -> bytes:
    api.check_model(fields)
    strings = fields.boolean("return_token_strs", False)
    if fields.has("messages") and fields.has("prompt"):
        raise RequestError("prompt and messages exclude each other; send one", param="prompt")
    if fields.has("messages"):
        ids = api.tokenizer.encode_pieces(read_chat_prompt(fields).render(api.template))
    else:
        text = fields.string("prompt", None)
        if text is None:
            raise fields.fail("prompt", "a string (or messages)")
        ids = api.tokenizer.encode(text, add_special_tokens=fields.boolean("add_special_tokens", True))
    answer = Tokens(
        count=len(ids),
        max_model_len=api.engine.max_model_len,
        tokens=ids,
        token_strs=[api.tokenizer.decode([token]) for token in ids] if strings else UNSET,
    )
    return msgspec.json.encode(answer)


def _detokenize(api: Api, fields: Fields) -> bytes:
    api.check_model(fields)
    tokens = fields.array("tokens")
    if tokens is None:
        raise fields.fail("tokens", "a list of token ids")
    check_token_ids(tokens, "tokens", api.tokenizer.size)
    return msgspec.json.encode({"prompt": api.tokenizer.decode(tokens)})
