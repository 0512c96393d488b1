"""Responses by their ids, and which session the next one belongs to.

An id is made of its session's and its turn's, so it needs no index: ``resp_<the session's 32 hex><the turn's 32 hex>``.
A session is named ``conv_<32 hex>``, whether it was made as a conversation or stands behind responses only.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from dataclasses import replace

import msgspec

from ..contract import Conflict, ConversationNotFound, NotFound
from ..state.sessions import Begun, History, Moved, SessionKey, Sessions, Turn

_RESPONSE = re.compile(r"resp_([0-9a-f]{32})([0-9a-f]{32})")

#: A session's name -> the caller's own session of that name.
Own = Callable[[str], SessionKey]


class ResponseNotFound(NotFound):
    code = "response_not_found"


def response_id(session: str, turn: str) -> str:
    return f"resp_{session.removeprefix('conv_')}{turn}"


def new_session(*parts: str, idempotency: str) -> str:
    """A name that nobody has; with an idempotency key, the one that the same request finds again."""
    if not idempotency:
        return f"conv_{secrets.token_hex(16)}"
    return f"conv_{hashlib.sha256(msgspec.msgpack.encode((*parts, idempotency))).hexdigest()[:32]}"


def parts(own: Own, id: str) -> tuple[SessionKey, str] | None:
    """A response's session and its turn, if it is an id."""
    found = _RESPONSE.fullmatch(id)
    return (own(f"conv_{found[1]}"), found[2]) if found is not None else None


async def find_response(sessions: Sessions, own: Own, id: str, param: str | None) -> tuple[SessionKey, History, int]:
    """Where it is: its session, with the index of its turn. Raises ResponseNotFound."""
    known = parts(own, id)
    if known is not None:
        key, fence = known
        history = await sessions.history(key)
        for index, turn in enumerate(history.turns):
            if turn.id == fence and turn.about:  # else it was asked for as something else
                return key, history, index
    raise _absent(id, param)


def _absent(id: str, param: str | None) -> ResponseNotFound:
    missing = f"there is no response {id[:80]!r}, or no longer; one that is being answered is there when it is done"
    return ResponseNotFound(missing, param=param)


class Thread:
    """What one request goes on from, and what its response tells of it (``about``, see Turn)."""

    def __init__(
        self, sessions: Sessions, own: Own, about: bytes, *, conversation: str | None, previous: str | None, store: bool
    ) -> None:
        self._sessions = sessions
        self._own = own
        self._about = about
        self._conversation = conversation
        self._previous = previous
        self._store = store
        self._begun: Begun | None = None

    @property
    def line(self) -> bytes:
        """The same for two requests that go on from the same."""
        return msgspec.msgpack.encode((self._own(""), self._conversation, self._previous, self._store))

    def joined(self, begun: Begun) -> None:
        """It is a turn that was begun before."""
        self._begun = begun

    async def begin(self, *, idempotency: str, deadline: float) -> Begun:
        """As Sessions.begin. Without ``store`` only the history is read. Raises NotFound as well."""
        if self._conversation is not None:
            begun = await self._in_conversation(self._own(self._conversation), idempotency, deadline)
        elif self._previous is not None:
            begun = await self._behind(self._previous, idempotency, deadline)
        else:
            begun = await self._anew("", idempotency, deadline)
        self._begun = replace(begun, about=self._about)
        return self._begun

    async def _in_conversation(self, key: SessionKey, idempotency: str, deadline: float) -> Begun:
        if self._store:
            return await self._sessions.begin(key, idempotency=idempotency, deadline=deadline, there=True)
        return Begun(key, "", await conversation(self._sessions, key, "conversation"))

    async def _behind(self, previous: str, idempotency: str, deadline: float) -> Begun:
        key, history, index = await find_response(self._sessions, self._own, previous, "previous_response_id")
        upto = History(history.turns[: index + 1], history.dropped)
        if not self._store:
            return Begun(key, "", upto)
        if history.record is None:  # a conversation gets only what is said in it
            after = history.dropped + index + 1
            # Who goes on from the same response at the same time gets a branch at once; but a retry must not.
            wait = deadline if idempotency else 0
            try:
                return await self._sessions.begin(key, idempotency=idempotency, deadline=wait, after=after)
            except Moved:
                pass
            except ConversationNotFound:  # deleted since it was found
                raise _absent(previous, "previous_response_id") from None
            except Conflict:
                if idempotency:
                    raise
        begun = await self._anew(previous, idempotency, deadline)
        return begun if begun.replay is not None else replace(begun, history=upto, copied=True)

    async def _anew(self, previous: str, idempotency: str, deadline: float) -> Begun:
        key = self._own(new_session("response", previous, idempotency=idempotency))
        return await self._sessions.begin(key, idempotency=idempotency, deadline=deadline)

    def told(self) -> tuple[str, bytes, Turn | None]:
        """The response's id, what it tells of its request, and the turn that it repeats, if it does."""
        begun = self._begun
        if begun is None or (begun.replay is None and not begun.fence):
            return unkept_id(), self._about, None
        if begun.replay is not None:
            return response_id(begun.key.session, begun.replay.id), begun.replay.about, begun.replay
        return response_id(begun.key.session, begun.fence), begun.about, None


def unkept_id() -> str:
    return f"resp_{secrets.token_hex(32)}"


async def conversation(sessions: Sessions, key: SessionKey, param: str | None = None) -> History:
    """Raises ConversationNotFound unless it was made as one."""
    history = await sessions.history(key)
    if history.record is None:
        raise ConversationNotFound(f"there is no conversation {key.session[:64]!r}, or no longer", param=param)
    return history
