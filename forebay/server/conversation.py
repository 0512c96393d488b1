"""One turn of a conversation that the server keeps: what its prompt holds, and what is kept of its answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers

from ..contract import (
    Busy,
    Conflict,
    ContextTooLong,
    Delta,
    FinishReason,
    ForebayError,
    InvalidRequest,
    Message,
    Prepared,
    Resume,
    StateFull,
    Usage,
)
from ..state.sessions import RENEWAL, Begun, SessionKey, Sessions, Turn
from .auth import Caller
from .formats import thinking_tokens

log = logging.getLogger("forebay.server")

#: Where a conversation has outgrown its window, so many turns are left out that the rest takes no more than this part
#: of it. Each cut costs a prefill of what is left, and is the dearer the rarer it is; the turns after it are cheap.
KEEP = 0.6
_LONGEST = 256  # characters of a name in a header

#: Messages, and what of them has been a prompt before, to a prompt, counted. Raises ContextTooLong.
Prepare = Callable[[tuple[Message, ...], Resume], Awaitable[Prepared]]


def session_key(headers: Headers, caller: Caller, session: str | None, user: str) -> SessionKey | None:
    """Which conversation a request belongs to: the header ``x-session-id`` or ``session`` of its body; None: to none.

    It is a user's own: of ``x-user-id``, or else of the body's ``user``, or else of the key's owner. Raises
    InvalidRequest.
    """
    named = _header(headers, "x-session-id")
    if named and session and named != session:
        raise InvalidRequest("session_id and the header x-session-id differ; send one", param="session_id")
    session = session or named
    return own_key(headers, caller, session, user) if session else None


def own_key(headers: Headers, caller: Caller, session: str, user: str = "") -> SessionKey:
    """The same where the session is known."""
    return SessionKey(caller.tenant, _header(headers, "x-user-id") or user or f"key:{caller.name}", session)


def idempotency_key(headers: Headers) -> str:
    return _header(headers, "idempotency-key")


def _header(headers: Headers, name: str) -> str:
    value = headers.get(name, "")
    if len(value) > _LONGEST:
        raise InvalidRequest(f"the header {name} is longer than {_LONGEST} characters", param=name)
    return value


def session_header(key: SessionKey) -> dict[str, str]:
    session = key.session
    return {"x-session-id": session} if session.isascii() and session.isprintable() else {}


class Conversation:
    """A turn that was begun, until it is kept or given up: ``close`` is to be called whatever happens.

    ``instructions`` are for this prompt only, in which they come first. ``cut``: turns are left out that were not
    before. ``lost``: when it was to be kept or given up, the session was another turn's, or no more. ``unkept``:
    nothing of it is in the store.
    """

    def __init__(
        self,
        sessions: Sessions,
        begun: Begun,
        said: tuple[Message, ...],
        instructions: tuple[Message, ...] = (),
    ) -> None:
        self._sessions = sessions
        self._begun = begun
        self._said = said
        self._instructions = instructions
        self._instructed = hashlib.sha256(repr(instructions).encode()).digest()[:16] if instructions else b""
        history = begun.history
        self._last = history.turns[-1] if history.turns else None
        self._first = max(history.dropped, self._last.first if self._last else 0)
        self._end = history.dropped + len(history.turns)
        self._created = time.time()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._read = b""
        self._wrote: list[int] = []
        self._usage = Usage(0, 0)
        self._thought = 0
        self._finish: FinishReason | None = None
        self._over = False
        self.cut = False
        self.lost = False
        self.unkept = False

    @property
    def headers(self) -> dict[str, str]:
        """What the reply says of it. Names that no header can hold are left out."""
        return {"x-session-dropped-turns": str(self._first), **session_header(self._begun.key)}

    async def whole(self, lenient: Prepare) -> Prepared:
        """The prompt, with nothing left out of what is kept. Raises ContextTooLong."""
        first = self._begun.history.dropped
        known, self._first = self._known() if first == self._first else Resume(), first
        prepared = await lenient(self._messages(first), known)
        self._read = prepared.resume
        return prepared

    async def fit(self, strict: Prepare, lenient: Prepare, window: int) -> Prepared:
        """The prompt. Where the whole conversation is longer than ``window`` tokens, or has no room for the wished
        answer (``strict``), the oldest turns are left out, whole and many at once, and the answer takes what is left
        (``lenient``). Raises ContextTooLong if the new messages alone do not fit."""
        first = self._first
        prepared = await self._fit(strict, lenient, window)
        self.cut = self._first > first
        self._read = prepared.resume
        return prepared

    async def _fit(self, strict: Prepare, lenient: Prepare, window: int) -> Prepared:
        end = self._end
        try:
            prepared = await strict(self._messages(self._first), self._known())
            if prepared.n_tokens <= window or self._first == end:
                return prepared
        except ContextTooLong:
            if self._first == end:
                return await lenient(self._messages(end), Resume())

        async def fits(first: int) -> bool:
            try:
                return (await lenient(self._messages(first), Resume())).n_tokens <= KEEP * window
            except ContextTooLong:
                return False

        low, high = self._first + 1, end
        while low < high:
            middle = (low + high) // 2
            if await fits(middle):
                high = middle
            else:
                low = middle + 1
        self._first = low
        return await lenient(self._messages(low), Resume())

    def _known(self) -> Resume:
        """The turns before in tokens. Where another turn is the first now, their prompts were about more; under other
        instructions, about something else."""
        if self._last is None or self._last.first != self._first or self._last.instructed != self._instructed:
            return Resume()
        turns = self._begun.history.turns[self._first - self._begun.history.dropped :]
        known = len(self._messages(self._first)) - len(self._said)
        return Resume(known, tuple((turn.read, turn.wrote) for turn in turns))

    def _messages(self, first: int) -> tuple[Message, ...]:
        """The conversation from turn ``first`` on, below instructions and the system messages of what was before."""
        turns = self._begun.history.turns[first - self._begun.history.dropped :]
        known = tuple(message for turn in turns for message in turn.messages())
        return (*self._instructions, *self._system(first), *known, *self._said)

    def _system(self, first: int) -> tuple[Message, ...]:
        """System messages that came before turn ``first``; also those of turns that are no longer kept."""
        turns, dropped = self._begun.history.turns, self._begun.history.dropped
        if first - dropped < len(turns):
            return turns[first - dropped].system
        if self._last is None:
            return ()
        return (*self._last.system, *(message for message in self._last.said if message.role == "system"))

    def tokens(self) -> Resume:
        """All that the model has read and written so far; the last turn is this one."""
        turns = ((turn.read, turn.wrote) for turn in self._begun.history.turns)
        return Resume(turns=(*turns, (self._read, tuple(self._wrote))))

    def saw(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._wrote += delta.ids
        self._thought += thinking_tokens(delta)
        self._usage, self._finish = delta.usage, delta.finish

    async def hold(self) -> None:
        """Keep the session from others, until cancelled."""
        while True:
            await asyncio.sleep(RENEWAL)
            try:
                await self._sessions.renew(self._begun)  # if it is lost, the commit will say so
            except Busy as error:  # the store is gone or full; it may be back for the next
                log.warning("a turn's lease was not renewed: %s", error.message)

    async def keep(self, *, answered: bool = True) -> Turn:
        """Commit what was seen; without ``answered``, what was said only. Raises Conflict, StateUnavailable or
        StateFull: then the client must not take the answer for kept."""
        # The script goes on when the caller is cancelled, and a second one could overtake it.
        self._over = True
        turn = Turn(
            id=self._begun.fence,
            created=self._created,
            said=self._said,
            answer="".join(self._text),
            reasoning="".join(self._reasoning),
            finish=self._finish,
            prompt_tokens=self._usage.prompt_tokens,
            completion_tokens=self._usage.completion_tokens,
            first=self._first,
            system=self._system(self._end),
            read=self._read,
            wrote=tuple(self._wrote),
            instructed=self._instructed,
            about=self._begun.about,
            answered=answered,
            cached_tokens=self._usage.cached_tokens,
            reasoning_tokens=self._thought,
            tier=self._usage.tier,
        )
        try:
            await self._sessions.commit(self._begun, turn)
        except Conflict:
            self.lost = self.unkept = True
            raise
        except StateFull:  # nothing was written: who tries again is not to find the session busy with this turn
            self.unkept = True
            await self._sessions.abort(self._begun)
            raise
        return turn

    async def close(self) -> None:
        """What was said of an answer that broke off is kept as such; a turn without any is as if it had not been."""
        if self._over:
            return
        self._over = True
        try:
            if any(self._text) or any(self._reasoning):
                self._finish = None
                await self.keep()
            else:
                self.unkept = True
                self.lost = not await self._sessions.abort(self._begun)
        except Conflict:
            pass  # somebody took over: its lease had run out, or the session was deleted
        except ForebayError as error:
            log.warning("a turn that broke off was not kept: %s", error.message)


def replayed(turn: Turn) -> Delta:
    """A turn that was kept, as its answer came. OpenAI has no reason for an answer that broke off: it is "length"."""
    usage = Usage(turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens, turn.tier)
    return Delta(turn.answer, turn.completion_tokens, usage, 0.0, turn.finish or "length", turn.reasoning)
