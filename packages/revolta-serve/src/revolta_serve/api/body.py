"""Reading request bodies: the media type, the size limit, and JSON."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from revolta_serve.api.fields import Fields, parse_body
from revolta_serve.errors import PayloadTooLargeError, RequestError, UnsupportedMediaTypeError

INLINE_BYTES = 1 << 16
"""Larger bodies are decoded in a thread: a smaller one takes less time than to ask for one."""


async def read_fields(request: Request, limit: int) -> Fields:
    """The JSON object in the body of at most `limit` bytes. Other clients do not wait for it.

    Raises UnsupportedMediaTypeError, PayloadTooLargeError (without reading on) or RequestError.
    """
    media_type = request.headers.get("content-type", "")
    if media_type.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaTypeError(f"content-type: expected application/json, got {media_type[:200] or 'nothing'!r}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaTypeError(f"content-encoding: {encoding[:200]!r} is not read; send the body as it is")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > limit:
        raise _too_large(int(length), limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(size, limit)
        chunks.append(chunk)
    body = b"".join(chunks)
    if not body:
        raise RequestError("the request body is empty; send a JSON object")
    return parse_body(body) if len(body) <= INLINE_BYTES else await run_in_threadpool(parse_body, body)


def _too_large(size: int, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body has at least {size} bytes; at most {limit} are read (api.max_request_bytes)")
