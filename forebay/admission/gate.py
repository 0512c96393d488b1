"""The gate before the backend: queue.py decides, and here requests wait for it.

Who may run is decided by the backend's *credits*. Between a grant and the moment the granted request has submitted its
work, the backend's number does not show it yet; the queue counts exactly those.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ..config import AdmissionSettings
from ..contract import DeadlineExceeded, Load
from .ask import Ask, Rank, Ticket
from .brownout import Level
from .estimate import Capacity
from .queue import Queue

log = logging.getLogger("forebay.admission")


class Gate:
    """``load()`` is read at every decision and must be cheap. Call ``pump()`` whenever it may have changed. ``clock``
    gives seconds, those of an Ask too; ``draw`` a number between 0 and 1, so that those who are refused do not come
    back all at once."""

    def __init__(
        self,
        settings: AdmissionSettings,
        max_queue: int,
        max_tokens: int,
        load: Callable[[], Load],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._queue = Queue(settings, max_queue, max_tokens, load, draw, clock())
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        """Places that are asked for."""
        return self._queue.waiting

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of those who wait."""
        return self._queue.queued_tokens

    @property
    def level(self) -> Level:
        return self._queue.level

    def usual(self) -> int | None:
        """Tokens that three of four answers did not exceed lately; None: too few were seen."""
        return self._queue.usual

    def capacity(self) -> Capacity:
        return self._queue.capacity(self._clock())

    def check_rate(self, key: str, rate: float) -> None:
        """Count a request of a key that may have ``rate`` a second; 0: as many as it likes. Raises RateLimited."""
        self._queue.check_rate(self._clock(), key, rate)

    def check(self, rank: Rank = Rank.FIRST, places: int = 1) -> None:
        """Raises Busy if a newcomer would be refused now whatever it asks for: before its body is read."""
        self._queue.check(self._clock(), rank, places)

    def check_wait(self, ask: Ask) -> None:
        """Raises Busy if even the shortest prompt usual for its size would be too late: before its own is looked at."""
        self._queue.check_wait(self._clock(), ask)

    @asynccontextmanager
    async def admit(self, ask: Ask) -> AsyncIterator[Ticket]:
        """Wait for a turn. The body must submit its work, ``ask.places`` orders, before it first suspends, and tell
        ``saw`` what comes of it.

        Several places are granted together as soon as there is room for one: what has none yet waits in the backend,
        and nobody else is let in meanwhile. Raises RateLimited or Busy at once where it is refused, DeadlineExceeded
        when it has waited as long as it may.
        """
        ticket = self._queue.enter(self._clock(), ask)
        await self._turn(ticket)
        # The backend's numbers show what the body submits, at the latest when this is next asked.
        self._queue.submitted(ticket)
        try:
            yield ticket
        finally:
            self._queue.leave(ticket, self._clock())
            self.pump()

    def saw(self, ticket: Ticket, tokens: int) -> None:
        self._queue.saw(ticket, tokens, self._clock())

    def pump(self) -> None:
        """Grant as many turns as there are credits."""
        now, before = self._clock(), self.level
        if self._queue.look(now) is not before:
            log.warning("brownout: %s, after %s", self.level.name.lower(), before.name.lower())
        for ticket in self._queue.overdue(now):
            if waiter := self._waiters.get(ticket):
                self._expire(waiter)
        self._grant(now)

    def _grant(self, now: float) -> None:
        while (ticket := self._queue.next(now)) is not None:
            waiter = self._waiters.pop(ticket, None)
            if waiter is None or waiter.done():  # one that was cancelled and has not taken itself out yet
                self._queue.drop(ticket, now)
            else:
                waiter.set_result(None)

    async def _turn(self, ticket: Ticket) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiters[ticket] = loop.create_future()
        timer = None
        now = self._clock()
        self._grant(now)
        try:
            if waiter.done():
                if self._queue.granted > 1:  # one that was granted before and is not resumed yet goes first
                    await asyncio.sleep(0)
            else:
                timer = loop.call_later(max(0.0, ticket.until - now), self._expire, waiter)
                await waiter
        except (asyncio.CancelledError, DeadlineExceeded):
            picked = self._waiters.pop(ticket, None) is None
            if not picked or (not waiter.cancelled() and waiter.exception() is None):
                self._queue.drop(ticket, self._clock())
                self._grant(self._clock())  # what was granted and not taken goes to the next
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self, waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_exception(self.too_late())

    def too_late(self) -> DeadlineExceeded:
        """The error of a request whose time has passed while it waited."""
        return self._queue.too_late(self._clock())
