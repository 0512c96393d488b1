"""Single flight: one generation, and everybody who asked for just it.

A flight belongs to none of its members. It is a task of its own that waits at the gate, runs, and records what is
said; members read the record from its beginning, each at its own pace. So a member's deadline, its leaving or its slow
reading is nobody else's affair. When the last has left, the flight is cancelled.

A flight stands in the queue where the member would that may wait longest: first the one who opened it, and when that
one's time there is over, the last who joined, if there is one whose time is not. All members are of one tenant, because
a tenant's questions are equal only to its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import groupby
from math import inf
from typing import Generic, TypeVar

from ..admission.ask import Ask
from ..contract import DeadlineExceeded, Delta, EngineFailure, EngineUnavailable, ForebayError
from . import errors
from .asks import deadline
from .source import Source

#: Flights that are listed behind their end, beside those in the air: each holds its whole answer.
MOST_LISTED = 1024
#: Gives a flight's source, which asks it for what the gate and the backend are to be asked.
Make = Callable[["Flight"], Source]
#: Of a flight that all have left before it came to the gate: it need not go through.
_NOBODYS = Ask(arrival=0.0, patience=0.0)
_L = TypeVar("_L")


class Flight:
    """``too_late`` is the error of a member that waited too long. ``finished`` is called with the whole answer before
    anybody is told its end, and ``landed`` once when all is over, in whatever way. ``linger``: seconds that it goes on
    without members."""

    def __init__(
        self,
        make: Make,
        too_late: Callable[[], DeadlineExceeded],
        finished: Callable[[tuple[Delta, ...]], None],
        landed: Callable[[Flight], None],
        linger: float = 0.0,
    ) -> None:
        self._source = make(self)
        self._finished = finished
        self._landed = landed
        self._linger = linger
        self._alone: asyncio.TimerHandle | None = None
        self._asked = inf  # the deadline of the member that the gate or the backend was last asked for
        self._members: set[Member] = set()
        self.too_late = too_late
        self.deltas: list[Delta] = []
        self.running = False  # it is through the gate
        self.open = True  # to be joined
        self.error: ForebayError | None = None
        self.news = asyncio.Event()  # another one for each piece of news
        self.task = asyncio.create_task(self._fly())
        self.task.add_done_callback(self._over)

    @property
    def whole(self) -> bool:
        """All is said."""
        return bool(self.deltas) and self.deltas[-1].finish is not None

    def join(self, member: Member) -> None:
        self._members.add(member)
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    def leave(self, member: Member) -> None:
        self._members.discard(member)
        if self._members or self._alone is not None:
            return
        if self._linger:
            self._alone = asyncio.get_running_loop().call_later(self._linger, self.give_up)
        else:
            self.give_up()

    def hurry(self) -> None:
        """Nobody will come any more."""
        self._linger = 0.0
        if self._alone is not None:
            self._alone.cancel()
            self.give_up()

    def give_up(self) -> None:
        if self.whole:
            return  # there is nothing left to cancel
        self.open = False
        # Not at once: a task that is cancelled before its first step never runs what it would do at its end.
        asyncio.get_running_loop().call_soon(self.task.cancel)

    @property
    def predicted(self) -> float | None:
        return self._source.predicted

    def ask(self) -> Ask:
        """For the gate."""
        last = self._last()
        self._asked = last.deadline if last else inf
        return last.ask if last else _NOBODYS

    def start_by(self) -> float:
        """For the backend."""
        last = self._last()
        self._asked = last.deadline if last else inf
        return last.deadline if last else 0.0

    def _last(self) -> Member | None:
        return max(self._members, key=lambda member: member.deadline, default=None)

    async def _fly(self) -> None:
        try:
            await self._generate()
        finally:
            await self._source.close()

    async def _generate(self) -> None:
        while True:
            self._asked = inf
            try:
                async with self._source.open() as (deltas,):
                    self.running = True
                    self._tell()
                    return await self._record(deltas)
            except DeadlineExceeded:
                if not self._somebody_has_time():
                    raise
            self.running = False
            self._tell()

    def _somebody_has_time(self) -> bool:
        """Gate or backend gave up for those who were there when it was asked, and others are there now."""
        last = self._last()
        return not self.deltas and last is not None and last.deadline > self._asked

    async def _record(self, deltas: AsyncIterator[Delta]) -> None:
        async for delta in deltas:
            self.deltas.append(delta)
            if delta.finish is not None:
                self._finished(merged(self.deltas))
            self._tell()
            if delta.finish is not None:
                return
        raise EngineFailure("the answer broke off")

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def _over(self, task: asyncio.Task[None]) -> None:
        self.open = self.whole
        if task.cancelled():
            self.error = EngineUnavailable("the server is shutting down", retry_after=5)
        elif (error := task.exception()) is not None:
            self.error = errors.from_exception(error)
        self._tell()
        self._landed(self)


class Flights(Generic[_L]):
    """Flights by key, each with a label; and their life, which ends with this one's ``close``."""

    def __init__(self) -> None:
        self._listed: dict[bytes, tuple[_L, Flight]] = {}
        self._flying: set[Flight] = set()  # those too that are listed no more

    def find(self, key: bytes) -> tuple[_L, Flight] | None:
        """One that may be joined."""
        found = self._listed.get(key)
        return found if found is not None and found[1].open else None

    def pick(self, which: Callable[[_L], bool]) -> tuple[_L, Flight] | None:
        """The same by its label."""
        return next((found for found in self._listed.values() if found[1].open and which(found[0])), None)

    def begin(
        self,
        key: bytes,
        label: _L,
        make: Make,
        too_late: Callable[[], DeadlineExceeded],
        finished: Callable[[tuple[Delta, ...]], None] = lambda _: None,
        linger: float = 0.0,
    ) -> Flight:
        """``finished`` is not called for one that was forgotten. With ``linger`` (seconds) it is listed so long behind
        its end, too. Otherwise as Flight has it."""

        def listed() -> bool:
            found = self._listed.get(key)
            return found is not None and found[1] is flight

        def unlist() -> None:
            if listed():
                del self._listed[key]

        def done(whole: tuple[Delta, ...]) -> None:
            if listed():
                finished(whole)

        def landed(flight: Flight) -> None:
            self._flying.discard(flight)
            if flight.whole and linger and len(self._listed) <= MOST_LISTED:
                asyncio.get_running_loop().call_later(linger, unlist)
            else:
                unlist()

        flight = Flight(make, too_late, done, landed, linger)
        self._listed[key] = label, flight
        self._flying.add(flight)
        return flight

    def forget(self, which: Callable[[_L], bool]) -> None:
        """Those go on for the members that they have, and nobody joins them any more."""
        gone = [key for key, (label, _) in self._listed.items() if which(label)]
        for key in gone:
            self._listed.pop(key)[1].hurry()

    async def close(self) -> None:
        for flight in self._flying:
            flight.give_up()
        if self._flying:
            await asyncio.wait([flight.task for flight in self._flying])


class Member:
    """One who follows a flight, from its making until ``close``. ``ask`` is what it would ask of the gate alone; at its
    ``deadline`` it waits for the gate no longer, and behind it the backend holds the deadline. ``told``: so many of the
    flight's deltas it has been given; may begin with those that there are and that it needs no more."""

    numbers = (0,)

    def __init__(self, flight: Flight, ask: Ask, told: int = 0) -> None:
        self._flight = flight
        self.ask = ask
        self.deadline = deadline(ask)
        self.told = told
        flight.join(self)

    @property
    def predicted(self) -> float | None:
        return self._flight.predicted

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[AsyncIterator[Delta]]]:
        async with aclosing(self._follow()) as deltas:
            yield [deltas]

    async def close(self) -> None:
        """The last one waits until the flight has left the backend."""
        self._flight.leave(self)
        if not self._flight.open:
            await asyncio.wait([self._flight.task])

    async def _follow(self) -> AsyncGenerator[Delta]:
        """What came while this one did not read comes as few as can be."""
        flight = self._flight
        if flight.whole and self.told == len(flight.deltas):  # only its end is news
            yield replace(flight.deltas[-1], text="", reasoning="", n_tokens=0, logprobs=(), ids=())
            return
        while True:
            if len(flight.deltas) > self.told:
                for run in _runs(flight.deltas[self.told :]):
                    self.told += len(run)
                    yield _joined(run)
                if flight.whole and self.told == len(flight.deltas):
                    return
            elif flight.error is not None:
                raise flight.error.with_traceback(None)  # it is raised for each member, and would grow
            else:
                await self._news()

    async def _news(self) -> None:
        flight = self._flight
        try:
            async with asyncio.timeout(None if flight.running else self.deadline - time.monotonic()):
                await flight.news.wait()
        except TimeoutError:
            if not flight.running:
                raise flight.too_late() from None


def merged(deltas: Sequence[Delta]) -> tuple[Delta, ...]:
    """As few as say the same, at least one. Thinking stays apart from text, in its order and with its tokens."""
    return tuple(map(_joined, _runs(deltas)))


def _runs(deltas: Sequence[Delta]) -> list[list[Delta]]:
    def kind(numbered: tuple[int, Delta]) -> tuple[bool, int]:
        number, delta = numbered
        return bool(delta.reasoning), number if delta.reasoning and delta.text else -1

    return [[delta for _, delta in run] for _, run in groupby(enumerate(deltas), kind)]


def _joined(deltas: Sequence[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        n_tokens=sum(delta.n_tokens for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        ids=tuple(id for delta in deltas for id in delta.ids),
    )
