"""POST /v1/chat/completions and /v1/completions; /v1/embeddings, which is refused."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from fastapi import Request
from starlette.responses import Response

from ...config import ServerSettings, Settings
from ...contract import (
    Backend,
    Busy,
    ContextTooLong,
    EngineUnavailable,
    GenRequest,
    InvalidRequest,
    Message,
    ModelCard,
    Prepared,
)
from ...state.sessions import Sessions, Turn
from .. import sse
from ..auth import caller_of
from ..body import read_body
from ..completions import parse_completion
from ..conversation import Conversation, idempotency_key, replayed, session_key
from ..formats import ChatFormat, Collected, CompletionFormat, Format
from ..reply import Choice, Reply
from ..sampling import Call
from ..schemas import parse_chat

_Parse = Callable[[bytes, ModelCard, ServerSettings], Call]
#: From a call and the model's name.
_Form = Callable[[Call, str], Awaitable[Format]]
_REPLAYED = {"x-idempotent-replay": "true"}


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as one JSON object or, with `stream: true`, token by token."""

    async def form(call: Call, model: str) -> Format:
        wanted = call.requests[0].logprobs is not None
        return ChatFormat(model, include_usage=call.include_usage, logprobs=wanted)

    return await _generate(request, parse_chat, form)


async def create_completion(request: Request) -> Response:
    """Go on from one or more prompts, as one JSON object or, with `stream: true`, token by token."""
    backend: Backend = request.app.state.backend

    async def form(call: Call, model: str) -> Format:
        texts = [await _echo(backend, one) if call.echo else "" for one in call.requests]
        echoes = [text for text in texts for _ in range(call.n)]
        wanted = call.requests[0].logprobs is not None
        return CompletionFormat(model, echoes, include_usage=call.include_usage, logprobs=wanted)

    return await _generate(request, parse_completion, form)


async def create_embedding(request: Request) -> Response:
    """Refused: a chat model has no embeddings worth the name."""
    model = request.app.state.backend.card.id
    raise InvalidRequest(f"{model!r} is a chat model; it gives no embeddings", param="model")


async def _generate(request: Request, parse: _Parse, form: _Form) -> Response:
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
    call = parse(body, backend.card, settings.server)
    caller = caller_of(request.scope)
    asked = [replace(one, salt=caller.tenant) for one in call.requests]
    deadline = arrival + settings.admission.queue_timeout

    async def reply(prepared: list[Prepared], conversation: Conversation | None) -> Response:
        choices = [Choice(one, number) for one in prepared for number in range(call.n)]
        return Reply(
            backend,
            state.gate,
            settings.server,
            choices,
            await form(call, backend.card.id),
            state.metrics.turn(arrival, sum(one.n_tokens for one in prepared), len(choices)),
            arrival=arrival,
            deadline=deadline,
            stream=call.stream,
            conversation=conversation,
        )

    key = session_key(request.headers, caller, call.session, call.user) if asked[0].prompt is None else None
    if key is None:
        return await reply([await _prepare(backend, one, call.asked_length) for one in asked], None)
    sessions: Sessions | None = state.sessions
    if sessions is None:
        raise InvalidRequest("session_id: this server keeps no conversations (--state-url off)", param="session_id")
    if call.n > 1:
        raise InvalidRequest("n: a conversation goes on from one answer", param="n")
    try:
        begun = await sessions.begin(key, idempotency=idempotency_key(request.headers), deadline=deadline)
    except Busy as error:
        state.metrics.rejected(error)
        raise
    if begun.replay is not None:
        return _replay(begun.replay, call, await form(call, backend.card.id))
    conversation = Conversation(sessions, begun, asked[0].messages)
    try:

        async def strict(messages: tuple[Message, ...]) -> Prepared:
            return await backend.prepare(replace(asked[0], messages=messages))

        async def lenient(messages: tuple[Message, ...]) -> Prepared:
            return await _prepare(backend, replace(asked[0], messages=messages), call.asked_length)

        return await reply([await conversation.fit(strict, lenient, backend.card.max_context)], conversation)
    except BaseException:
        await conversation.close()
        raise


def _replay(turn: Turn, call: Call, form: Format) -> Response:
    """The answer that an idempotency key has had already."""
    delta = replayed(turn)
    if not call.stream:
        whole = Collected()
        whole.add(delta)
        return Response(form.whole([whole], delta.usage), media_type="application/json", headers=_REPLAYED)
    frames = [form.opening(0), form.delta(0, delta), form.finish(0, turn.finish or "length")]
    body = b"".join([*frames, form.usage(delta.usage), sse.DONE])
    own = {name.decode(): value.decode() for name, value in sse.HEADERS}
    return Response(body, headers={**own, **_REPLAYED})


def _check_open(backend: Backend, *, draining: bool) -> None:
    if draining:
        raise EngineUnavailable("the server is shutting down", retry_after=5)
    load = backend.load()
    if not load.ready:
        raise EngineUnavailable(f"the engine is not ready: {load.state}", retry_after=2)


async def _prepare(backend: Backend, asked: GenRequest, asked_length: bool) -> Prepared:
    try:
        return await backend.prepare(asked)
    except ContextTooLong:
        if asked_length:
            raise
    # Only the default length may not fit: then the answer gets what the context leaves, which is less.
    return await backend.prepare(replace(asked, max_tokens=None))


async def _echo(backend: Backend, asked: GenRequest) -> str:
    return await backend.detokenize(asked.prompt) if isinstance(asked.prompt, tuple) else asked.prompt or ""
