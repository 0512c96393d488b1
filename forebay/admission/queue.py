"""Who waits, in which order, and who is refused at once: decisions only, no waiting (that is gate.py's).

A newcomer is refused where a wall is reached (too many wait, or too many prompt tokens), where its user has had its
part, or where its first token would come later than promised. One that was let in keeps its promise: those who come
before it by rank or by what their users have had go ahead of it only while it can still be kept.

Order: turns of live conversations, then first turns, then batch work; among them who has had least (fairness.py); then
arrival.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TypeVar

from ..config import AdmissionSettings
from ..contract import Busy, DeadlineExceeded, Load, RateLimited, TryLater
from .ask import Ask, Rank, Ticket
from .brownout import Brownout, Level
from .estimate import Capacity, Density, Factor, Lengths, Meter, Outlook
from .fairness import Keys, Users

_OUTPUT = 2  # what a token of an answer costs, in tokens of a prompt
_FIRST_GUESS = 0.1  # seconds between two departures, until some were measured
_SMOOTHING = 0.2  # weight of the newest interval
_SHORTEST, _LONGEST = 1.0, 30.0  # of Retry-After, in seconds
#: Part of the promised time that a queue may stand before all get less.
_STANDING = 0.25
_MOMENT = 0.05  # seconds
#: Of what the engine can do, so much is given out without asking who has had how much. The rest is for those who have
#: not had their part, while there are any: they find room when they come.
_SHARED = 0.8
_MIX = 0.05  # weight of the newest prompt in what is usual
_E = TypeVar("_E", bound=TryLater)


class Queue:
    """``load()`` is asked at every decision and must be cheap. ``draw()``: evenly between 0 and 1. All times are on one
    clock, in seconds."""

    def __init__(
        self,
        settings: AdmissionSettings,
        max_queue: int,
        max_tokens: int,
        load: Callable[[], Load],
        draw: Callable[[], float],
        now: float,
    ) -> None:
        self._settings = settings
        self._max_queue = max_queue
        self._max_tokens = max_tokens
        self._load = load
        self._draw = draw
        self._line: list[Ticket] = []
        self.waiting = 0  # places
        self.queued_tokens = 0
        self._granted: set[Ticket] = set()  # and the backend's numbers do not show it yet
        self._running: set[Ticket] = set()
        self._rests: list[int] | None = None  # of what runs, as of the last look
        self._users = Users(settings.user_share, settings.user_concurrency, settings.user_tokens, self._limit, now)
        self._keys = Keys()
        self._brownout = Brownout(_STANDING * (settings.slo_ttft or settings.queue_timeout))
        self._lengths = {rank: Lengths() for rank in Rank}
        self._all_lengths = Lengths()
        self._density = Density()
        self._prompt: float | None = None
        self._factor = Factor()
        self._offered, self._let_in, self._asked_for = Meter(now), Meter(now), Meter(now)
        self._interval = _FIRST_GUESS
        self._since = now  # the last departure, or when the queue last became non-empty
        self._back = now  # when those who were refused so far have come back

    # ---- who is refused

    def check_rate(self, now: float, key: str, rate: float) -> None:
        """Count a request of a key that may have ``rate`` a second. Raises RateLimited."""
        if missing := self._keys.missing(key, rate, now):
            raise self._limit("this key sends more requests than it may", "key_rate", missing)

    def check(self, now: float, rank: Rank, places: int) -> None:
        """Raises Busy where a newcomer would be refused whatever it asks for."""
        self._check(now, rank, places, 0, self._load())

    def _check(self, now: float, rank: Rank, places: int, prompt: int, load: Load) -> None:
        if not self._waits(load):
            return
        if self.waiting + places > self._max_queue:
            raise self._refuse(Busy, now, "too many requests are waiting", "queue_full")
        if self._line and self.queued_tokens + max(prompt, 1) > self._most_tokens(load):
            raise self._refuse(Busy, now, "the prompts that wait are long", "queued_tokens")
        if rank is Rank.BATCH and self.level >= Level.NO_BATCH:
            raise self._refuse(Busy, now, "batch work has to wait for quieter hours", "shed_batch")

    def check_wait(self, now: float, ask: Ask) -> None:
        """Raises Busy if even the shortest prompt that is usual for its size would be too late."""
        load = self._load()
        outlook = self._outlook(load)
        if outlook is None:
            return
        shortest = replace(ask, prompt=self._density.least(ask.size))
        ticket = Ticket(shortest, now, 1, 1.0, self._users.tag(ask.user), ask.arrival + ask.patience)
        try:
            self._promise(now, ticket, outlook, *self._position(now, ticket, outlook)[1:])
        except Busy:
            self._offered.add(1, now)  # it will not come to enter
            raise

    def enter(self, now: float, ask: Ask) -> Ticket:
        """Take a newcomer in: it waits, until ``next`` grants it. Raises RateLimited, Busy or DeadlineExceeded."""
        self._offered.add(1, now)
        self._density.add(ask.prompt, ask.size)
        if ask.arrival + min(ask.patience, ask.slo if ask.strict else inf) <= now:
            raise self.too_late(now)
        expected = self._lengths[ask.rank].expected(ask.most)
        cost = float(ask.prompt + _OUTPUT * expected * ask.places)
        load = self._load()
        self._users.check(ask.user, ask.places, cost, now)
        self._check(now, ask.rank, ask.places, ask.prompt, load)
        outlook = self._outlook(load)
        if outlook is not None or self._waits(load):
            self._users.check_share(ask.user, cost, now, self._rate(outlook))
        ticket = Ticket(ask, now, expected, cost, self._users.tag(ask.user), ask.arrival + ask.patience)
        at, places, prompts = self._position(now, ticket, outlook)
        if outlook is not None:
            self._promise(now, ticket, outlook, places, prompts)
            self._asked_for.add(outlook.work(ask.prompt, expected * ask.places), now)
        if not self._line:
            self._since = now
        self._line.insert(at, ticket)
        self.waiting += ask.places
        self.queued_tokens += ask.prompt
        self._users.enter(ask.user, ask.places, cost, now)
        self._let_in.add(1, now)
        self._prompt = ask.prompt if self._prompt is None else self._prompt + _MIX * (ask.prompt - self._prompt)
        return ticket

    def _position(self, now: float, new: Ticket, outlook: Outlook | None) -> tuple[int, int, int]:
        """Where it would stand, and how many places and prompt tokens are before it: before those who come after it in
        the order, unless their promise would be broken."""
        at = len(self._line)
        places = self.waiting + sum(ticket.ask.places for ticket in self._granted)
        prompts = self.queued_tokens + sum(ticket.ask.prompt for ticket in self._granted)
        factor = self._factor.value * self._factor.spread
        while at and _precedence(new) < _precedence(other := self._line[at - 1]):
            places -= other.ask.places
            prompts -= other.ask.prompt
            if outlook is not None and other.due < inf:
                then = outlook.first_token(places + new.ask.places, prompts + new.ask.prompt, other.ask.prompt)
                if now + then * factor > other.due:
                    return at, places + other.ask.places, prompts + other.ask.prompt
            at -= 1
        return at, places, prompts

    def _promise(self, now: float, ticket: Ticket, outlook: Outlook, places: int, prompts: int) -> None:
        """Predict when its first token comes, and promise it. Raises Busy if that is later than it may be."""
        ask, spent = ticket.ask, now - ticket.ask.arrival
        ticket.modelled = outlook.first_token(places, prompts, ask.prompt)
        ticket.predicted = spent + ticket.modelled * self._factor.value
        risk = self._factor.value * self._factor.spread
        likely = spent + ticket.modelled * risk
        wait = spent + outlook.first_token(places, prompts, 1) * risk  # whatever it asks for itself
        # A prompt that takes longer than the promise by itself is promised not to wait for long.
        slo = ask.slo if ask.strict else max(ask.slo, likely - wait + ask.slo / 2)
        busy = places > 0 or outlook.free < outlook.slots
        if likely > slo and (busy or ask.strict):
            why = f"the first token would come after {ticket.predicted:.1f} s"
            raise self._refuse(Busy, now, why, "predicted_wait")
        if self.level >= Level.FEW_NEW and ask.rank is Rank.FIRST and busy and likely > slo / 2:
            raise self._refuse(Busy, now, "conversations that go on come first", "shed_new")
        ticket.due = ask.arrival + slo
        # Who was long on its way, and is let in all the same, may at least take a turn that is free.
        latest = max(ticket.due - min(outlook.granted(ask.prompt), slo / 2), now + _MOMENT)
        ticket.until = min(ticket.until, latest)

    def _outlook(self, load: Load) -> Outlook | None:
        if load.pace is None:
            return None
        if self._rests is None:
            self._rests = sorted(ticket.rest for ticket in self._running for _ in range(ticket.ask.places))
        mean = self._all_lengths.mean
        return Outlook.of(load, self._rests, float(self._all_lengths.expected(10**9)) if mean is None else mean)

    def _rate(self, outlook: Outlook | None) -> float:
        """What the users can have between them, in tokens of cost per second; 0: not known."""
        if outlook is None or self._prompt is None:
            return 0.0
        seconds = outlook.work(self._prompt, outlook.length)
        return _SHARED * (self._prompt + _OUTPUT * outlook.length) / max(seconds, 1e-9)

    def _waits(self, load: Load) -> bool:
        return bool(self._line) or self._room(load) <= 0

    def _room(self, load: Load) -> int:
        return load.credits - sum(ticket.ask.places for ticket in self._granted)

    def _most_tokens(self, load: Load) -> int:
        """Prompt tokens that may wait: no more than the whole KV cache could hold."""
        pool = sum(load.pages.values()) * load.page_size
        return min(self._max_tokens, pool) if pool else self._max_tokens

    # ---- whose turn it is

    def next(self, now: float) -> Ticket | None:
        """The next one, if the backend has room for it. ``submitted`` is to be called when it has its order, or
        ``drop`` if it will not come. Who is overdue is not granted."""
        if not self._line or self._room(self._load()) <= 0:
            return None
        ticket = next((one for one in self._line if one.until > now), None)
        if ticket is None:
            return None
        self._remove(ticket)
        ticket.granted = True
        self._granted.add(ticket)
        if ticket.ask.rank is not Rank.BATCH:
            self._brownout.waited(now - ticket.ask.arrival)
        return ticket

    def overdue(self, now: float) -> list[Ticket]:
        """Who has waited as long as it may, and is to be dropped."""
        return [ticket for ticket in self._line if ticket.until <= now]

    @property
    def granted(self) -> int:
        """Whose turn it is, and who has not taken it yet."""
        return len(self._granted)

    def submitted(self, ticket: Ticket) -> None:
        self._granted.discard(ticket)
        self._running.add(ticket)
        if self._rests is not None:
            for _ in range(ticket.ask.places):
                insort(self._rests, ticket.rest)

    def drop(self, ticket: Ticket, now: float) -> None:
        """It waits no longer, or was granted and did not come."""
        waited = not ticket.granted
        if waited:
            self._remove(ticket)
        if waited and now >= ticket.until and ticket.due < inf:
            # It would have come later still: those who are not served are a lesson too, or all seems well.
            self._factor.learn(ticket.modelled, max(now - ticket.asked, ticket.modelled * self._factor.value), now)
        self._granted.discard(ticket)
        self._users.leave(ticket.ask.user, ticket.ask.places, ticket.cost, ticket.asked, now)

    def saw(self, ticket: Ticket, tokens: int, now: float) -> None:
        """So many tokens of its answers came."""
        if ticket.first is None and tokens > 0:
            ticket.first = now
            if ticket.predicted is not None:
                self._factor.learn(ticket.modelled, now - ticket.asked, now)
        ticket.tokens += tokens

    def leave(self, ticket: Ticket, now: float) -> None:
        """Its answers are over, in whatever way."""
        self._running.discard(ticket)
        took = ticket.ask.prompt * (ticket.first is not None) + _OUTPUT * ticket.tokens
        self._users.leave(ticket.ask.user, ticket.ask.places, ticket.cost - took, ticket.asked, now)
        if ticket.tokens:
            length = ticket.tokens // ticket.ask.places
            self._lengths[ticket.ask.rank].add(length)
            self._all_lengths.add(length)
        if self._line:  # only departures under load tell how fast a queue drains
            self._interval += _SMOOTHING * ((now - self._since) / ticket.ask.places - self._interval)
            self._since = now

    def look(self, now: float) -> Level:
        """To be called whenever the backend has news, and now and then without."""
        self._rests = None
        if not self._settings.brownout:
            return self._brownout.level
        arrivals = (ticket.ask.arrival for ticket in self._line if ticket.ask.rank is not Rank.BATCH)
        first = min(arrivals, default=None)
        return self._brownout.look(now, None if first is None else now - first)

    @property
    def level(self) -> Level:
        return self._brownout.level

    @property
    def usual(self) -> int | None:
        return self._all_lengths.usual

    def _remove(self, ticket: Ticket) -> None:
        self._line.remove(ticket)
        self.waiting -= ticket.ask.places
        self.queued_tokens -= ticket.ask.prompt

    # ---- what they are told

    def too_late(self, now: float) -> DeadlineExceeded:
        """The error of a request whose time has passed while it waited."""
        return self._refuse(DeadlineExceeded, now, "the request waited longer than it may", "deadline_exceeded")

    def _refuse(self, kind: type[_E], now: float, why: str, code: str) -> _E:
        """Who is refused comes back when the queue has drained, and each a little after the one before: else all would
        come at once, and be refused again. Half of the places are for those who come then for the first time."""
        self._back = max(self._back + 2 * self._interval, now + self._drain())
        wait = self._back - now
        if wait > _LONGEST:  # then at least not all in the same second
            self._back = now + _LONGEST
            wait = _LONGEST * (1 + self._draw()) / 2
        return kind(self._text(why), retry_after=max(_SHORTEST, wait), code=code)

    def _limit(self, why: str, code: str, wait: float) -> RateLimited:
        wait = min(_LONGEST, max(_SHORTEST, wait * (1 + 0.1 * self._draw())))
        return RateLimited(self._text(why), retry_after=wait, code=code)

    def _text(self, why: str) -> str:
        parts = (self._settings.busy_text, self._settings.busy_hint, f"({why})")
        return " ".join(part for part in parts if part)

    def _drain(self) -> float:
        """Seconds until all who wait now, and one more, have had their turn."""
        return self._interval * (self.waiting + 1)

    def capacity(self, now: float) -> Capacity:
        load = self._load()
        outlook = self._outlook(load)
        pace, prompt, length = load.pace, self._prompt, self._all_lengths.mean
        rate = prefill = decode = headroom = predicted = None
        if outlook is not None and pace is not None:
            prefill = 1 / pace.prefill if pace.prefill else None
            decode = outlook.slots / (pace.base + pace.decode * outlook.slots)
            headroom = max(0.0, 1 - self._asked_for.rate(now))
            if prompt is not None and length is not None:
                rate = 1 / max(outlook.work(prompt, length), 1e-9)
                ahead = self.waiting, self.queued_tokens
                predicted = outlook.first_token(*ahead, round(prompt)) * self._factor.value
        return Capacity(
            prefill_tokens_per_second=prefill,
            decode_tokens_per_second=decode,
            prompt_tokens=prompt,
            completion_tokens=length,
            requests_per_second=rate,
            offered_per_second=self._offered.rate(now),
            admitted_per_second=self._let_in.rate(now),
            headroom=headroom,
            predicted_ttft=predicted,
            running=load.running,
            slots=load.slots,
            waiting=self.waiting,
            max_queue=self._max_queue,
            queued_tokens=self.queued_tokens,
            max_queued_tokens=self._most_tokens(load),
            brownout_level=self.level,
        )


def _precedence(ticket: Ticket) -> tuple[Rank, float]:
    return ticket.ask.rank, ticket.tag
