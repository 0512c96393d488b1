"""The waiting queue of the front: bounded, first come first served.

Who may run is decided by the backend's *credits*. Between a grant and the moment the granted request has
submitted its work, the backend's number does not show it yet; ``_granted`` counts exactly those.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from ..contract import Busy, DeadlineExceeded

_FIRST_GUESS = 0.1  # seconds between two departures, until some were measured
_SMOOTHING = 0.2  # weight of the newest interval


class _Wish(NamedTuple):
    deadline: float
    places: int


class Gate:
    """Admits requests in order of arrival while the backend has credits.

    ``credits()`` is read on every decision and must be cheap. Call ``pump()`` whenever it may have grown.
    ``clock`` gives seconds; deadlines are on it.
    """

    def __init__(self, max_queue: int, credits: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._max_queue = max_queue
        self._credits = credits
        self._clock = clock
        self._queue: dict[asyncio.Future[None], _Wish] = {}  # in order of arrival
        self._granted = 0
        self._interval = _FIRST_GUESS
        self._since = clock()  # the last departure, or when the queue last became non-empty

    @property
    def waiting(self) -> int:
        return sum(wish.places for wish in self._queue.values())

    @asynccontextmanager
    async def admit(self, deadline: float, places: int = 1) -> AsyncIterator[None]:
        """Wait for a turn. The body must submit its work, ``places`` orders, before it first suspends.

        Several places are granted together as soon as there is room for one: what has none yet waits in the backend,
        and nobody else is let in meanwhile. Raises Busy at once when the queue is full, DeadlineExceeded when
        ``deadline`` passes first.
        """
        await self._enter(deadline, places)
        try:
            yield
        finally:
            self._leave()

    def check(self, places: int = 1) -> None:
        """Raises Busy if a newcomer would be refused now. Cheap, so that it can be asked before a body is read."""
        room = not self._queue and self._room() > 0
        if not room and self.waiting + places > self._max_queue:
            raise Busy("too many requests are waiting", retry_after=self._retry_after())

    def pump(self) -> None:
        """Grant as many turns as there are credits."""
        while self._queue and self._room() > 0:
            waiter = next(iter(self._queue))
            wish = self._queue.pop(waiter)
            if wish.deadline <= self._clock():
                self._expire(waiter)
            elif not waiter.done():  # a cancelled waiter has not been resumed yet to take itself out
                self._granted += wish.places
                waiter.set_result(None)

    def _room(self) -> int:
        return self._credits() - self._granted

    async def _enter(self, deadline: float, places: int) -> None:
        now = self._clock()
        if deadline <= now:
            raise self.too_late()
        self.check(places)
        if not self._queue and self._room() > 0 and not self._granted:
            return
        if not self._queue:
            self._since = now
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._queue[waiter] = _Wish(deadline, places)
        timer = loop.call_later(deadline - now, self._expire, waiter)
        self.pump()
        try:
            if waiter.done():  # room for both the newcomer and one granted but not yet resumed, who goes first
                await asyncio.sleep(0)
            await waiter
        except asyncio.CancelledError:
            self._queue.pop(waiter, None)
            if not waiter.cancelled() and waiter.exception() is None:
                # Granted, then cancelled before it ran: the turn goes to the next.
                self._granted -= places
                self.pump()
            raise
        finally:
            timer.cancel()
        self._granted -= places

    def _expire(self, waiter: asyncio.Future[None]) -> None:
        self._queue.pop(waiter, None)
        if not waiter.done():
            waiter.set_exception(self.too_late())

    def _leave(self) -> None:
        if self._queue:  # only departures under load tell how fast a queue drains
            now = self._clock()
            self._interval += _SMOOTHING * (now - self._since - self._interval)
            self._since = now
        self.pump()

    def too_late(self) -> DeadlineExceeded:
        """The error of a request whose deadline has passed while it waited."""
        return DeadlineExceeded("the request waited longer than it may", retry_after=self._retry_after())

    def _retry_after(self) -> float:
        """Seconds until a queue as long as this one has drained, kept within 1..30."""
        return min(30.0, max(1.0, self._interval * (len(self._queue) + 1)))
