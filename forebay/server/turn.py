"""A request for an answer as a use case: answered alone, or as a turn of a conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from ..contract import (
    Backend,
    Busy,
    ContextTooLong,
    GenRequest,
    InvalidRequest,
    Message,
    Prepared,
    Resume,
)
from ..state.sessions import Begun, History, Sessions
from .answers import Answers, Form, Shortcut, shareable, wish
from .asks import deadline, going_on, of_call
from .auth import caller_of
from .conversation import Conversation, idempotency_key, session_header
from .entrance import Arrived, reply_of
from .flight import Member
from .formats import Format
from .metrics import Result
from .replay import replay
from .running import Label, Owner, last_event
from .sampling import Call
from .savings import Savings, degraded
from .sharing import share
from .source import Choice, Generation, Kept, Source

_REPLAYED = {"x-idempotent-replay": "true"}


class Begin(Protocol):
    """Begins a turn; as Sessions.begin does where its session is known. Raises the same, and NotFound."""

    async def __call__(self, *, idempotency: str, deadline: float) -> Begun: ...


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
        running = turns.join(name, asking.ask, after)
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
    """One request on its way to its reply. ``ask``: see priced, which adds what it costs."""

    def __init__(self, arrived: Arrived, call: Call, form: Form, *, resumable: bool) -> None:
        request = arrived.request
        self._arrived = arrived
        self._call = call
        self._form = form
        self._resumable = resumable
        self._state = request.app.state
        self._backend: Backend = self._state.backend
        self.answers: Answers = self._state.answers
        self.ask = of_call(arrived.ask, request, call)
        self._savings = Savings(self._state.gate)
        self._tenant = caller_of(request.scope).tenant
        asked = [self._savings.shorten(replace(one, salt=self._tenant)) for one in call.requests]
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
            shortcut = Shortcut(prepared[0].key, self._form, call.stream, tuple(self._savings.made))
            self.answers.remember(self._arrived.digest, Owner(self._tenant), shortcut, len(self._arrived.body))
        headers = degraded(self._savings.made, found[1])
        return reply_of(self._state, found, form, self.ask.arrival, stream=call.stream, headers=headers)

    async def turn(self, begin: Begin, once: str, name: bytes | None = None) -> Response:
        """``once``: the idempotency key, or nothing. ``name``: under which it is to be joined."""
        call = self._call
        try:
            begun = await begin(idempotency=once, deadline=deadline(self.ask))
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
        if begun.history.turns or begun.history.dropped:
            self.ask = going_on(self.ask)
        conversation = Conversation(self._state.sessions, begun, self._asked[0].messages, call.instructions)
        try:
            prepared = await self._fit(conversation, kept=bool(begun.fence))
            form = await self._form()
            owner = Owner(self._tenant, begun.key.digest())
            source, result = self._found([prepared], owner)
            headers = degraded(self._savings.made, result)
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

            source, headers = Kept(source, conversation, unkept), {**conversation.headers, **headers}
            if name is not None:
                label = Label(owner, replace(begun, history=History((), 0)), headers)
                too_late = self._state.gate.too_late
                source = self.answers.turns.begin(name, label, source, self.ask, too_late)
        return self.follow((source, result), form, headers)

    def follow(self, found: tuple[Source, Result], form: Format, headers: Mapping[str, str]) -> Response:
        source, stream = found[0], self._call.stream
        at = source if self._resumable and isinstance(source, Member) else None
        return reply_of(self._state, found, form, self.ask.arrival, stream=stream, headers=headers, at=at)

    async def _fit(self, conversation: Conversation, *, kept: bool) -> Prepared:
        backend, call = self._backend, self._call
        asked = replace(self._asked[0], ttl=self._state.settings.state.session_ttl if kept else 0.0)

        async def strict(messages: tuple[Message, ...], known: Resume) -> Prepared:
            return await backend.prepare(replace(asked, messages=messages), known)

        async def lenient(messages: tuple[Message, ...], known: Resume) -> Prepared:
            return await _prepare(backend, replace(asked, messages=messages), call.asked_length, known)

        if call.truncate:
            prepared = await conversation.fit(strict, lenient, self._savings.window(backend.card.max_context))
            if conversation.cut and self._savings.lean:
                self._savings.made.append("history")
            return prepared
        return await conversation.whole(lenient)

    def _found(self, prepared: list[Prepared], owner: Owner) -> tuple[Source, Result]:
        state, ask = self._state, self.ask
        if self._shared:
            return share(state, prepared[0], owner, ask, stale=self._savings.lean)
        choices = [Choice(one, number) for one in prepared for number in range(self._call.n)]
        made = Generation(self._backend, state.gate, state.metrics, choices, lambda: ask, lambda: deadline(ask))
        return made, "bypass"


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


async def _prepare(backend: Backend, asked: GenRequest, asked_length: bool, known: Resume | None = None) -> Prepared:
    try:
        return await backend.prepare(asked, known)
    except ContextTooLong:
        if asked_length:
            raise
    # Only the default length may not fit: then the answer gets what the context leaves, which is less.
    return await backend.prepare(replace(asked, max_tokens=None), known)
