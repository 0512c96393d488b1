"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import replace

from fastapi import Request
from starlette.responses import Response

from ...config import Settings
from ...contract import Backend, Busy, ChatRequest, ContextTooLong, EngineUnavailable, Prepared
from ..auth import caller_of
from ..body import read_body
from ..reply import ChatReply
from ..schemas import parse_chat


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
    body = await read_body(request, int(settings.server.max_body))
    call = parse_chat(body, backend.card, settings.server)
    return ChatReply(
        backend,
        state.gate,
        settings.server,
        await _prepare(backend, replace(call.request, salt=caller_of(request.scope).tenant), call.asked_length),
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


async def _prepare(backend: Backend, chat: ChatRequest, asked_length: bool) -> Prepared:
    try:
        return await backend.prepare(chat)
    except ContextTooLong:
        if asked_length:
            raise
    # Only the default length may not fit: then the answer gets what the context leaves, which is less.
    return await backend.prepare(replace(chat, max_tokens=None))
