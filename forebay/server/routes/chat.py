"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...config import Settings
from ...contract import Backend, BodyTooLarge, Busy, ContextTooLong, EngineUnavailable, Prepared
from ..reply import ChatReply
from ..schemas import ChatCall, ChatCompletionRequest, parse_chat

SCHEMA_REF = "#/components/schemas/{model}"
OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": SCHEMA_REF.format(model=ChatCompletionRequest.__name__)}}},
    }
}


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as one JSON object or, with `stream: true`, token by token."""
    arrival = time.monotonic()
    state = request.app.state
    backend: Backend = state.backend
    settings: Settings = state.settings
    try:
        _check_open(backend, draining=state.draining)
        state.gate.check()
    except Busy as error:
        state.metrics.rejected(error)
        raise
    body = await _read_body(request, int(settings.server.max_body))
    call = parse_chat(body, backend.card, settings.server)
    return ChatReply(
        backend,
        state.gate,
        settings.server,
        await _prepare(backend, call),
        state.metrics.turn(arrival),
        arrival=arrival,
        deadline=arrival + settings.admission.queue_timeout,
        stream=call.stream,
        include_usage=call.include_usage,
    )


def _check_open(backend: Backend, *, draining: bool) -> None:
    if draining:
        raise EngineUnavailable("the server is shutting down", retry_after=5)
    load = backend.load()
    if not load.ready:
        raise EngineUnavailable(f"the engine is not ready: {load.state}", retry_after=2)


async def _read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it is known to be longer than ``limit`` bytes."""
    error = BodyTooLarge(f"the body is longer than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise error
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise error
    return bytes(body)


async def _prepare(backend: Backend, call: ChatCall) -> Prepared:
    try:
        return await backend.prepare(call.request)
    except ContextTooLong:
        if call.asked_length:
            raise
    # Only the default length may not fit: then the answer gets what the context leaves, which is less.
    return await backend.prepare(replace(call.request, max_tokens=None))
