"""How a request for an answer comes in: past the walls that need only its head, and what is known by its bytes.

This is done before the router is asked: at the peak most are refused, and the way through it costs more than a refusal.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ..admission.ask import Ask
from ..admission.brownout import Level
from ..contract import Busy, EngineUnavailable, RateLimited
from .answers import Shortcut
from .asks import ask_of, of_head
from .auth import caller_of
from .body import read_body
from .flight import Member
from .formats import Format
from .metrics import Result
from .reply import Reply
from .savings import degraded
from .sharing import digest_of, is_small
from .source import Source

_NONE: Mapping[str, str] = MappingProxyType({})
_ARRIVED = "forebay.arrived"
#: Where answers are asked for. True: a request may be known by its bytes.
DOORS = {"/v1/chat/completions": True, "/v1/completions": True, "/v1/responses": False, "/chat": False}
#: What in a body says whose it is, or that it goes on with something: then it is read before it can be judged. (A text
#: that holds the like is read too; to be judged by its head in spite of it takes odd spelling, and harms who does it.)
_MORE_TO_SAY = re.compile(rb'"user(_id)?"\s*:|"assistant"|"session_id"')


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that was let in. ``ask``: of the gate, as far as its headers say. ``digest`` stands for all of it that
    decides the reply, if it is none of a conversation. ``known``: the reply, where it could be looked up by that."""

    request: Request
    ask: Ask
    body: bytes
    digest: bytes | None = None
    known: Reply | None = None


class Entrance:
    """ASGI middleware, inside the keys'. Its errors leave as those of the routes do."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            look_up = DOORS.get(scope["path"])
            if look_up is not None:
                scope[_ARRIVED] = await _let_in(Request(scope, receive), look_up=look_up)
        await self.app(scope, receive, send)


def arrived_of(request: Request) -> Arrived:
    """To be asked behind one of the DOORS."""
    arrived: Arrived = request.scope[_ARRIVED]
    return replace(arrived, request=request)


async def _let_in(request: Request, *, look_up: bool) -> Arrived:
    """The request with its body. Raises RateLimited or Busy where it would be refused whatever it says, BodyTooLarge,
    and InvalidRequest where its headers are wrong.

    With ``look_up``, for requests of which nothing but the answer is kept, one whose answer is known is never refused
    for want of room.
    """
    arrival = time.monotonic()
    state, caller = request.app.state, caller_of(request.scope)
    try:
        state.gate.check_rate(caller.name, caller.rate)
        if state.draining:
            raise EngineUnavailable("the server is shutting down", retry_after=5)
        ask = ask_of(request, arrival)
        small = look_up and is_small(request)
        if not small:
            _check_room(state, ask)
        body = await read_body(request, int(state.settings.server.max_body))
        digest = digest_of(request, body) if look_up else None
        known = await _known(state, ask, digest) if digest is not None else None
        if small and known is None:
            _check_room(state, ask)
            ask = replace(ask, size=len(body))
            if "x-session-id" not in request.headers and not _MORE_TO_SAY.search(body):
                state.gate.check_wait(of_head(ask, request))
    except (Busy, RateLimited) as error:
        state.metrics.rejected(error)
        raise
    return Arrived(request, ask, body, digest, known)


def _check_room(state: Any, ask: Ask) -> None:
    load = state.backend.load()
    if not load.ready:
        raise EngineUnavailable(f"the engine is not ready: {load.state}", retry_after=2)
    state.gate.check(ask.rank)


async def _known(state: Any, ask: Ask, digest: bytes) -> Reply | None:
    level = state.gate.level
    shortcut: Shortcut | None = state.answers.known(digest, stale=level >= Level.LEAN)
    if shortcut is None or (shortcut.made and level < Level.SHORT):
        return None
    form = await shortcut.form()
    found = state.answers.find(shortcut.key, ask, stale=level >= Level.LEAN)
    if found is None:
        return None
    headers = degraded(shortcut.made, found[1])
    return reply_of(state, found, form, ask.arrival, stream=shortcut.stream, headers=headers)


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
