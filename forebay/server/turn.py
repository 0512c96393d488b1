"""A request for an answer as a use case: let in, read, and answered, alone or as a turn of a conversation."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from ..config import Settings
from ..contract import (
    Backend,
    Busy,
    ContextTooLong,
    EngineUnavailable,
    GenRequest,
    InvalidRequest,
    Message,
    Prepared,
    Resume,
)
from ..state.sessions import Begun, History, Sessions
from .answers import Answers, Form, Shortcut, shareable, wish
from .auth import caller_of
from .body import read_body
from .conversation import Conversation, idempotency_key, session_header
from .flight import Member
from .formats import Format
from .metrics import Result
from .replay import replay
from .reply import Reply
from .running import Label, Owner, last_event
from .sampling import Call
from .sharing import digest_of, is_small, share
from .source import Choice, Generation, Kept, Source

_NONE: Mapping[str, str] = MappingProxyType({})
_REPLAYED = {"x-idempotent-replay": "true"}


class Begin(Protocol):
    """Begins a turn; as Sessions.begin does where its session is known. Raises the same, and NotFound."""

    async def __call__(self, *, idempotency: str, deadline: float) -> Begun: ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that was let in. ``arrival`` is in seconds on time.monotonic(). ``digest`` stands for all of it that
    decides the reply, if it is none of a conversation. ``known``: the reply, where it could be looked up by that."""

    request: Request
    arrival: float
    body: bytes
    digest: bytes | None = None
    known: Reply | None = None


async def let_in(request: Request, *, look_up: bool = False) -> Arrived:
    """The request with its body. Raises Busy where it would be refused whatever it says, and BodyTooLarge.

    With ``look_up``, for requests of which nothing but the answer is kept, one whose answer is known is never refused
    for want of room.
    """
    arrival = time.monotonic()
    state = request.app.state
    busy: Busy | None = None
    try:
        if state.draining:
            raise EngineUnavailable("the server is shutting down", retry_after=5)
        try:
            _check_ready(state.backend)
            state.gate.check()
        except Busy as error:
            if not look_up or not is_small(request):
                raise
            busy = error
    except Busy as error:
        state.metrics.rejected(error)
        raise
    body = await read_body(request, int(state.settings.server.max_body))
    digest = digest_of(request, body) if look_up else None
    known = await _known(request, arrival, digest) if digest is not None else None
    if busy is not None and known is None:
        state.metrics.rejected(busy)
        raise busy
    return Arrived(request, arrival, body, digest, known)


async def _known(request: Request, arrival: float, digest: bytes) -> Reply | None:
    state = request.app.state
    shortcut: Shortcut | None = state.answers.known(digest)
    if shortcut is None:
        return None
    form = await shortcut.form()
    found = state.answers.find(shortcut.key, arrival + state.settings.admission.queue_timeout)
    return reply_of(state, found, form, arrival, stream=shortcut.stream) if found is not None else None


def reply_of(
    state: Any,
    found: tuple[Source, Result],
    form: Format,
    arrival: float,
    *,
    stream: bool,
    headers: Mapping[str, str] = _NONE,
    at: Member | None = None,
) -> Reply:
    """``state`` is the application's. ``arrival`` and ``at``: see Reply."""
    source, result = found
    turn = state.metrics.turn(arrival, len(source.numbers), result)
    headers = {"x-cache": result, **headers}
    return Reply(state.settings.server, source, form, turn, arrival=arrival, stream=stream, headers=headers, at=at)


async def answer(
    arrived: Arrived,
    call: Call,
    form: Form,
    begin: Begin | None = None,
    *,
    line: bytes = b"",
    joined: Callable[[Begun], None] | None = None,
) -> Response:
    """The reply to ``call``; with ``begin``, as the next turn of a conversation.

    ``line`` stands for what the client goes on from: under one Idempotency-Key there is one turn of it, and while that
    runs here the same key joins it. ``joined`` is then called with it, before ``form``; a form that wants to know it
    tells an answer only from its beginning, others also from a Last-Event-ID.
    """
    once = idempotency_key(arrived.request.headers)
    after = last_event(arrived.request.headers)
    if after is not None and (joined is not None or begin is None or not once or not call.stream):
        raise InvalidRequest(
            "Last-Event-ID: only for a stream of a session's turn with an Idempotency-Key", param="last-event-id"
        )
    asking = _Asking(arrived, call, form, resumable=joined is None)
    if begin is None:
        return await asking.alone()
    if call.n > 1:
        raise InvalidRequest("n: a conversation goes on from one answer", param="n")
    if not line or not once:
        return await asking.turn(begin, once)
    name = hashlib.sha256(msgspec.msgpack.encode((arrived.request.scope["path"], line, once))).digest()
    turns = asking.answers.turns
    async with turns.beginning(name):
        running = turns.join(name, asking.deadline, after)
        if running is None:
            return await asking.turn(begin, once, name)
    member, label = running
    try:
        if joined is not None:
            joined(label.begun)
        return asking.follow((member, "coalesced"), await form(), {**label.headers, **_REPLAYED})
    except BaseException:
        await member.close()
        raise


class _Asking:
    """One request on its way to its reply. ``deadline`` is in seconds on time.monotonic()."""

    def __init__(self, arrived: Arrived, call: Call, form: Form, *, resumable: bool) -> None:
        request = arrived.request
        self._arrived = arrived
        self._call = call
        self._form = form
        self._resumable = resumable
        self._state = request.app.state
        self._backend: Backend = self._state.backend
        settings: Settings = self._state.settings
        self.answers: Answers = self._state.answers
        self.deadline = arrived.arrival + settings.admission.queue_timeout
        self._tenant = caller_of(request.scope).tenant
        asked = [replace(one, salt=self._tenant) for one in call.requests]
        self._shared = shareable(call, wish(request.headers)) and self.answers.limit > 0
        if self._shared and asked[0].temperature > 0 and asked[0].seed is None:
            asked = [replace(asked[0], seed=0)]  # the client wants what is not to differ
        self._asked = asked

    async def alone(self) -> Response:
        call, prepared = self._call, []
        for one in self._asked:
            asked = replace(one, messages=(*call.instructions, *one.messages))
            prepared.append(await _prepare(self._backend, asked, call.asked_length))
        form = await self._form()
        found = self._found(prepared, Owner(self._tenant))
        if self._shared and self._arrived.digest is not None and not call.echo:  # whose form holds the prompt as well
            shortcut = Shortcut(prepared[0].key, self._form, call.stream)
            self.answers.remember(self._arrived.digest, Owner(self._tenant), shortcut, len(self._arrived.body))
        return reply_of(self._state, found, form, self._arrived.arrival, stream=call.stream)

    async def turn(self, begin: Begin, once: str, name: bytes | None = None) -> Response:
        """``once``: the idempotency key, or nothing. ``name``: under which it is to be joined."""
        call = self._call
        try:
            begun = await begin(idempotency=once, deadline=self.deadline)
        except Busy as error:
            self._state.metrics.rejected(error)
            raise
        if begun.replay is not None:
            if not begun.replay.answered:
                raise InvalidRequest("Idempotency-Key: it stands for something else already", param="idempotency-key")
            headers = {**session_header(begun.key), **_REPLAYED}
            return replay(begun.replay, await self._form(), stream=call.stream, headers=headers)
        if not begun.fence:  # its answer is not to be found where the conversation's are forgotten
            self._shared = False
        conversation = Conversation(self._state.sessions, begun, self._asked[0].messages, call.instructions)
        try:
            prepared = await self._fit(conversation, kept=bool(begun.fence))
            form = await self._form()
            owner = Owner(self._tenant, begun.key.digest())
            source, result = self._found([prepared], owner)
        except BaseException:
            await conversation.close()
            raise
        if begun.fence:

            async def unkept() -> None:
                """A conversation that is no more may have been deleted before there was anything of this turn."""
                if conversation.lost:
                    self.answers.forget(lambda made_for: made_for == owner)
                tokens = conversation.tokens()
                await self._backend.forget(self._tenant, tokens, 0 if conversation.lost else len(tokens.turns) - 1)

            source = Kept(source, conversation, unkept)
            if name is not None:
                label = Label(owner, replace(begun, history=History((), 0)), conversation.headers)
                too_late = self._state.gate.too_late
                source = self.answers.turns.begin(name, label, source, self.deadline, too_late)
        return self.follow((source, result), form, conversation.headers if begun.fence else _NONE)

    def follow(self, found: tuple[Source, Result], form: Format, headers: Mapping[str, str]) -> Response:
        source, stream = found[0], self._call.stream
        at = source if self._resumable and isinstance(source, Member) else None
        return reply_of(self._state, found, form, self._arrived.arrival, stream=stream, headers=headers, at=at)

    async def _fit(self, conversation: Conversation, *, kept: bool) -> Prepared:
        backend, call = self._backend, self._call
        asked = replace(self._asked[0], ttl=self._state.settings.state.session_ttl if kept else 0.0)

        async def strict(messages: tuple[Message, ...], known: Resume) -> Prepared:
            return await backend.prepare(replace(asked, messages=messages), known)

        async def lenient(messages: tuple[Message, ...], known: Resume) -> Prepared:
            return await _prepare(backend, replace(asked, messages=messages), call.asked_length, known)

        if call.truncate:
            return await conversation.fit(strict, lenient, backend.card.max_context)
        return await conversation.whole(lenient)

    def _found(self, prepared: list[Prepared], owner: Owner) -> tuple[Source, Result]:
        state = self._state
        if self._shared:
            return share(state, prepared[0], owner, self.deadline)
        choices = [Choice(one, number) for one in prepared for number in range(self._call.n)]
        saw = state.metrics.generation(sum(one.n_tokens for one in prepared))
        return Generation(self._backend, state.gate, choices, saw, self.deadline), "bypass"


@contextmanager
def naming(field: str) -> Iterator[None]:
    """The backend speaks of messages; to who sent them as ``field``, its errors speak of that."""
    try:
        yield
    except InvalidRequest as error:
        if error.param == "messages":
            error.param = field
            error.message = error.message.replace("messages", field, 1)
        raise


def sessions_of(request: Request, param: str | None = "session_id") -> Sessions:
    """Raises InvalidRequest, naming the field ``param``, if this server keeps no conversations."""
    sessions: Sessions | None = request.app.state.sessions
    if sessions is None:
        named = f"{param}: " if param else ""
        raise InvalidRequest(f"{named}this server keeps no conversations (--state-url off)", param=param)
    return sessions


def _check_ready(backend: Backend) -> None:
    load = backend.load()
    if not load.ready:
        raise EngineUnavailable(f"the engine is not ready: {load.state}", retry_after=2)


async def _prepare(backend: Backend, asked: GenRequest, asked_length: bool, known: Resume | None = None) -> Prepared:
    try:
        return await backend.prepare(asked, known)
    except ContextTooLong:
        if asked_length:
            raise
    # Only the default length may not fit: then the answer gets what the context leaves, which is less.
    return await backend.prepare(replace(asked, max_tokens=None), known)
