"""A request for an answer as a use case: let in, read, and answered, alone or as a turn of a conversation."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from fastapi import Request
from starlette.responses import Response

from ..config import Settings
from ..contract import Backend, Busy, ContextTooLong, EngineUnavailable, GenRequest, InvalidRequest, Message, Prepared
from ..state.sessions import SessionKey, Sessions, Turn
from . import sse
from .auth import caller_of
from .body import read_body
from .conversation import Conversation, idempotency_key, replayed
from .formats import Collected, Format
from .reply import Choice, Reply
from .sampling import Call

#: The answer's form, made when nothing can refuse the request any more.
Form = Callable[[], Awaitable[Format]]
_REPLAYED = {"x-idempotent-replay": "true"}


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that was let in. ``arrival`` is in seconds on time.monotonic()."""

    request: Request
    arrival: float
    body: bytes


async def let_in(request: Request) -> Arrived:
    """The request with its body. Raises Busy where it would be refused whatever it says, and BodyTooLarge."""
    arrival = time.monotonic()
    state = request.app.state
    try:
        _check_open(state.backend, draining=state.draining)
        state.gate.check()
    except Busy as error:
        state.metrics.rejected(error)
        raise
    return Arrived(request, arrival, await read_body(request, int(state.settings.server.max_body)))


async def answer(arrived: Arrived, call: Call, form: Form, key: SessionKey | None) -> Response:
    """The reply to ``call``; as the next turn of the conversation ``key``, if there is one."""
    request, state = arrived.request, arrived.request.app.state
    backend: Backend = state.backend
    settings: Settings = state.settings
    asked = [replace(one, salt=caller_of(request.scope).tenant) for one in call.requests]
    deadline = arrived.arrival + settings.admission.queue_timeout

    async def reply(prepared: list[Prepared], conversation: Conversation | None) -> Response:
        choices = [Choice(one, number) for one in prepared for number in range(call.n)]
        return Reply(
            backend,
            state.gate,
            settings.server,
            choices,
            await form(),
            state.metrics.turn(arrived.arrival, sum(one.n_tokens for one in prepared), len(choices)),
            arrival=arrived.arrival,
            deadline=deadline,
            stream=call.stream,
            conversation=conversation,
        )

    if key is None:
        return await reply([await _prepare(backend, one, call.asked_length) for one in asked], None)
    sessions = sessions_of(request)
    if call.n > 1:
        raise InvalidRequest("n: a conversation goes on from one answer", param="n")
    try:
        begun = await sessions.begin(key, idempotency=idempotency_key(request.headers), deadline=deadline)
    except Busy as error:
        state.metrics.rejected(error)
        raise
    if begun.replay is not None:
        return _replay(begun.replay, call, await form())
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


def sessions_of(request: Request) -> Sessions:
    """Raises InvalidRequest if this server keeps no conversations."""
    sessions: Sessions | None = request.app.state.sessions
    if sessions is None:
        raise InvalidRequest("session_id: this server keeps no conversations (--state-url off)", param="session_id")
    return sessions


def _replay(turn: Turn, call: Call, form: Format) -> Response:
    """The answer that an idempotency key has had already."""
    delta = replayed(turn)
    if not call.stream:
        whole = Collected()
        whole.add(delta)
        return Response(form.whole([whole], delta.usage), media_type="application/json", headers=_REPLAYED)
    frames = [form.opening(0), form.delta(0, delta), form.finish(0, turn.finish or "length")]
    body = b"".join([*frames, form.ending(delta.usage)])
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
