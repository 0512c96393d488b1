"""Turns that their clients can come back to: those with an Idempotency-Key, while they are answered in this process.

Such a turn is a flight of its own. The same key joins it instead of being told that it runs, and for a window (seconds)
it goes on without a client, and can be heard again behind its end. Later, its answer is in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple
from weakref import WeakValueDictionary

from starlette.datastructures import Headers

from ..admission.ask import Ask
from ..contract import DeadlineExceeded, InvalidRequest
from ..state.sessions import Begun, SessionKey
from .flight import Flights, Member
from .source import Source


class Owner(NamedTuple):
    """Whose an answer is, and (if there is one) the digest of the conversation that it was made for."""

    tenant: str
    tag: bytes | None = None


class Label(NamedTuple):
    """What a running turn is (``begun`` without its history), and what its replies say of it in their headers."""

    owner: Owner
    begun: Begun
    headers: Mapping[str, str]


class RunningTurns:
    def __init__(self, window: float) -> None:
        self._window = window
        self._flights = Flights[Label]()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def beginning(self, name: bytes) -> asyncio.Lock:
        """To be held from looking for a turn until it has begun: a second request may come in between."""
        return self._locks.setdefault(name, asyncio.Lock())

    def join(self, name: bytes, ask: Ask, told: int | None) -> tuple[Member, Label] | None:
        """See Member. Raises InvalidRequest if somebody wants to go on with what is no more here."""
        found = self._flights.find(name)
        if found is not None and (told or 0) <= len(found[1].deltas):
            return Member(found[1], ask, told or 0), found[0]
        if told is not None:
            raise InvalidRequest(
                "Last-Event-ID: the stream is no longer here to go on with; without it, all is told again",
                param="last-event-id",
            )
        return None

    def rejoin(self, key: SessionKey, fence: str, ask: Ask) -> tuple[Member, Label] | None:
        """The turn of a session that has this fence, from its beginning; if its door wants to know it later."""

        def it(label: Label) -> bool:
            return (label.begun.key, label.begun.fence) == (key, fence) and label.begun.about != b""

        found = self._flights.pick(it)
        return (Member(found[1], ask), found[0]) if found is not None else None

    def begin(
        self, name: bytes, label: Label, source: Source, ask: Ask, too_late: Callable[[], DeadlineExceeded]
    ) -> Member:
        flight = self._flights.begin(name, label, lambda _: source, too_late, linger=self._window)
        return Member(flight, ask)

    def forget(self, which: Callable[[Owner], bool]) -> None:
        self._flights.forget(lambda label: which(label.owner))

    async def close(self) -> None:
        """Answers that are being made are cut, and kept as far as they came."""
        await self._flights.close()


def last_event(headers: Headers) -> int | None:
    """The header ``Last-Event-ID``. Raises InvalidRequest unless it is a number of ours."""
    sent = headers.get("last-event-id")
    if sent is None:
        return None
    return event_number(sent, "the header Last-Event-ID must be the id of an event that was sent", "last-event-id")


def event_number(sent: str, fault: str, param: str) -> int:
    """Raises InvalidRequest with ``fault`` and ``param`` unless it can be one of ours."""
    if not (sent.isascii() and sent.isdecimal() and len(sent) < 10):
        raise InvalidRequest(fault, param=param)
    return int(sent)
