"""Who waits, in which order, and who is refused: decisions only, on a clock that stands still unless it is moved."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from math import exp, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.admission import fairness
from forebay.admission.ask import Ask, Rank, Ticket
from forebay.admission.brownout import DOWN, UP, Level
from forebay.admission.queue import Queue
from forebay.config import AdmissionSettings
from forebay.contract import Busy, DeadlineExceeded, Load, Pace, RateLimited, TryLater

PACE = Pace(base=0.004, decode=0.002, prefill=0.001, chunk=60)


class World:
    """A queue before a made-up backend of so many ``slots``, which takes ``ahead`` more. ``draw`` is 0."""

    def __init__(
        self,
        slots: int = 4,
        *,
        ahead: int = 0,
        max_queue: int = 20,
        max_tokens: int = 10**6,
        pace: Pace | None = PACE,
        **names: object,
    ) -> None:
        self.now = 100.0
        self.slots, self.ahead, self.pace = slots, ahead, pace
        self.places = 0
        self.pages: dict[str, int] = {}
        self.drawn = 0.0
        self.settings = AdmissionSettings.model_validate({"user_share": 0.0, **names})
        self.queue = Queue(self.settings, max_queue, max_tokens, self.load, lambda: self.drawn, self.now)

    def load(self) -> Load:
        return Load(
            ready=True,
            state="ready",
            running=min(self.places, self.slots),
            waiting=max(0, self.places - self.slots),
            credits=self.slots + self.ahead - self.places,
            pages=self.pages,
            page_size=16,
            slots=self.slots,
            pace=self.pace,
        )

    def enter(self, user: str = "", rank: Rank = Rank.FIRST, *, age: float = 0.0, **names: object) -> Ticket:
        ask = dataclasses.replace(Ask(self.now - age, ("", user), rank, prompt=10, most=100), **names)
        return self.queue.enter(self.now, ask)

    def refused(self, user: str = "", rank: Rank = Rank.FIRST, *, age: float = 0.0, **names: object) -> TryLater:
        before = (self.queue.waiting, self.queue.queued_tokens, list(self.queue._line), self.queue._users.open)
        with pytest.raises(TryLater) as error:
            self.enter(user, rank, age=age, **names)
        assert (self.queue.waiting, self.queue.queued_tokens, self.queue._line, self.queue._users.open) == before
        return error.value

    def start(self, ticket: Ticket | None = None) -> Ticket:
        """Its turn, if it has one, or whose turn it is else."""
        got = self.queue.next(self.now)
        assert got is not None
        assert ticket in (None, got)
        self.queue.submitted(got)
        self.places += got.ask.places
        return got

    def run(self, user: str = "", **names: object) -> Ticket:
        """One that is let in at once."""
        return self.start(self.enter(user, **names))

    def fill(self, user: str = "runs") -> list[Ticket]:
        return [self.run(user) for _ in range(self.slots + self.ahead)]

    def end(self, ticket: Ticket, tokens: int = 0) -> None:
        if tokens:
            self.queue.saw(ticket, tokens, self.now)
        self.places -= ticket.ask.places
        self.queue.leave(ticket, self.now)
        self.queue.look(self.now)

    def attempt(self, user: str = "", rank: Rank = Rank.FIRST, **names: object) -> Ticket | TryLater:
        """Let in, or why not."""
        try:
            return self.enter(user, rank, **names)
        except TryLater as error:
            return error

    def settle(self) -> None:
        """For long, all came when it was predicted."""
        for _ in range(200):
            self.now += 1.0
            self.queue._factor.learn(2.0, 2.0, self.now)

    def at(self, level: Level) -> None:
        self.queue._brownout.level = level

    def likely(self, places: int, queued: int, prompt: int) -> float:
        """Seconds until the first token of who has so much ahead, as the queue is careful to reckon."""
        outlook = self.queue._outlook(self.load())
        assert outlook is not None
        factor = self.queue._factor
        return outlook.first_token(places, queued, prompt) * factor.value * factor.spread

    def served(self) -> list[Ticket]:
        """All who wait, in the order of their turns, if each ends before the next begins."""
        order = []
        self.ahead = 1000
        while (ticket := self.queue.next(self.now)) is not None:
            order.append(ticket)
            self.queue.drop(ticket, self.now)
        return order


def precedence(ticket: Ticket) -> tuple[int, float]:
    return ticket.ask.rank, ticket.tag


# ---- histories


def check_place(world: World, before: list[Ticket], new: Ticket) -> None:
    """A newcomer goes ahead of all that come after it in the order, back to the first that would get its first token
    too late if it did; and the others keep their order."""
    line, granted = world.queue._line, world.queue._granted
    at = line.index(new)
    assert [*line[:at], *line[at + 1 :]] == before

    def keeps(ticket: Ticket, ahead: list[Ticket]) -> bool:
        if ticket.due == inf or world.pace is None:
            return True
        all_ahead = [*ahead, *granted]
        places = sum(one.ask.places for one in all_ahead)
        queued = sum(one.ask.prompt for one in all_ahead)
        return world.now + world.likely(places, queued, ticket.ask.prompt) <= ticket.due

    for behind in range(at + 1, len(line)):
        assert precedence(new) < precedence(line[behind])
        assert keeps(line[behind], line[:behind]), "overtaken, and its promise is broken"
    if at:
        other = line[at - 1]
        passes = precedence(new) < precedence(other) and keeps(other, [*line[: at - 1], new])
        assert not passes, "stands behind one that it could have gone ahead of"


class Histories(RuleBasedStateMachine):
    """Everything that can happen to a queue, in any order."""

    @initialize(
        slots=st.integers(1, 4),
        ahead=st.integers(0, 2),
        max_queue=st.integers(0, 9),
        max_tokens=st.sampled_from([50, 2000, 10**6]),
        pace=st.sampled_from([PACE, PACE, None]),
        share=st.sampled_from([0.0, 1.0, 2.0]),
        concurrency=st.sampled_from([0, 0, 6]),
    )
    def begin(
        self,
        slots: int,
        ahead: int,
        max_queue: int,
        max_tokens: int,
        pace: Pace | None,
        share: float,
        concurrency: int,
    ) -> None:
        self.max_queue = max_queue
        self.world = World(
            slots,
            ahead=ahead,
            max_queue=max_queue,
            max_tokens=max_tokens,
            pace=pace,
            user_share=share,
            user_concurrency=concurrency,
            user_tokens=50.0 * concurrency,
        )
        self.waiting: set[Ticket] = set()
        self.granted: list[Ticket] = []
        self.running: list[Ticket] = []
        self.came: dict[Ticket, int] = {}
        self.ended: set[Ticket] = set()

    @rule(
        user=st.sampled_from("abc"),
        rank=st.sampled_from(list(Rank)),
        prompt=st.sampled_from([0, 1, 30, 100, 900]),
        most=st.sampled_from([1, 40, 300]),
        places=st.sampled_from([1, 1, 1, 2, 3]),
        slo=st.sampled_from([inf, 0.4, 2.0, 4.0]),
        strict=st.booleans(),
        patience=st.sampled_from([inf, 3.0, 60.0]),
        age=st.sampled_from([0.0, 0.1]),
    )
    def enter(
        self,
        user: str,
        rank: Rank,
        prompt: int,
        most: int,
        places: int,
        slo: float,
        strict: bool,
        patience: float,
        age: float,
    ) -> None:
        queue = self.world.queue
        before = list(queue._line)
        open_before = queue._users.open
        ticket = self.world.attempt(
            user, rank, age=age, prompt=prompt, most=most, places=places, slo=slo, strict=strict, patience=patience
        )
        if isinstance(ticket, TryLater):
            assert 1.0 <= ticket.retry_after <= 30.0
            assert ticket.code
            assert (queue._line, queue._users.open) == (before, open_before)
            return
        self.came[ticket] = len(self.came)
        self.waiting.add(ticket)
        check_place(self.world, before, ticket)
        self.grant()

    def grant(self) -> None:
        queue = self.world.queue
        while True:
            line = [ticket for ticket in queue._line if ticket.until > self.world.now]
            ticket = queue.next(self.world.now)
            if ticket is None:
                assert not line or self.world.load().credits <= sum(one.ask.places for one in self.granted)
                return
            assert ticket is line[0]
            assert self.world.load().credits > sum(one.ask.places for one in self.granted)
            self.waiting.remove(ticket)
            self.granted.append(ticket)

    def pump(self) -> None:
        self.world.queue.look(self.world.now)
        for ticket in self.world.queue.overdue(self.world.now):
            assert ticket.until <= self.world.now
            self.world.queue.drop(ticket, self.world.now)
            self.waiting.remove(ticket)
            self.end(ticket)
        self.grant()

    def end(self, ticket: Ticket) -> None:
        assert ticket not in self.ended, "ended twice"
        self.ended.add(ticket)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        ticket = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        self.world.queue.submitted(ticket)
        self.world.places += ticket.ask.places
        self.running.append(ticket)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        ticket = self.granted.pop(data.draw(st.integers(0, len(self.granted) - 1)))
        self.world.queue.drop(ticket, self.world.now)
        self.end(ticket)
        self.grant()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = sorted(self.waiting, key=self.came.__getitem__)[data.draw(st.integers(0, len(self.waiting) - 1))]
        self.waiting.remove(ticket)
        self.world.queue.drop(ticket, self.world.now)
        self.end(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 50))
    def answer(self, data: st.DataObject, tokens: int) -> None:
        self.world.queue.saw(data.draw(st.sampled_from(self.running)), tokens, self.world.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.world.places -= ticket.ask.places
        self.world.queue.leave(ticket, self.world.now)
        self.end(ticket)
        self.pump()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.5]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.pump()

    @rule(ahead=st.integers(-2, 3))
    def change(self, ahead: int) -> None:
        self.world.ahead = ahead
        self.pump()

    @invariant()
    def adds_up(self) -> None:
        queue = self.world.queue
        line = queue._line
        assert set(line) == self.waiting
        assert len(line) == len(self.waiting)
        assert queue.waiting == sum(ticket.ask.places for ticket in line) <= self.max_queue
        assert queue.queued_tokens == sum(ticket.ask.prompt for ticket in line)
        assert queue._granted == set(self.granted)
        assert queue.granted == len(self.granted)
        assert queue._running == set(self.running)
        assert queue._users.open == sum(ticket.ask.places for ticket in [*line, *self.granted, *self.running])
        assert queue.level in range(6)

    @invariant()
    def first_come_first_served_within_a_user(self) -> None:
        for user in "abc":
            for rank in Rank:
                own = [
                    self.came[ticket]
                    for ticket in self.world.queue._line
                    if ticket.ask.user == ("", user) and ticket.ask.rank is rank
                ]
                assert own == sorted(own)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        queue = self.world.queue
        while self.granted or self.running or self.waiting:
            self.world.now += 1.0
            for ticket in self.granted:
                queue.submitted(ticket)
                self.world.places += ticket.ask.places
                self.running.append(ticket)
            self.granted.clear()
            for ticket in self.running:
                self.world.places -= ticket.ask.places
                queue.leave(ticket, self.world.now)
                self.end(ticket)
            self.running.clear()
            self.world.ahead = 1
            self.pump()
        assert self.ended == set(self.came)
        assert (queue._line, queue._granted, queue._running) == ([], set(), set())
        assert (queue.waiting, queue.queued_tokens, queue._users.open) == (0, 0, 0)
        queue.look(self.world.now)
        assert queue._outlook(self.world.load()) is None or queue._rests == []


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


Newcomers = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.sampled_from(list(Rank)), st.sampled_from([1, 50, 400]), st.sampled_from([1, 2])
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(Newcomers, st.sampled_from([1.0, 2.0, 4.0]))
def test_order_never_breaks_a_promise(newcomers: list[tuple[str, Rank, int, int]], slo: float) -> None:
    """Whoever comes, and goes ahead: all who wait would still get their first tokens in time, were it to stay so."""
    world = World(max_queue=100)
    for ticket in world.fill():
        world.queue.saw(ticket, 60, world.now)
    world.queue.look(world.now)
    for user, rank, prompt, places in newcomers:
        ticket = world.attempt(user, rank, prompt=prompt, places=places, slo=slo)
        assert isinstance(ticket, Ticket) or ticket.code == "predicted_wait"
        ahead = queued = 0
        for ticket in world.queue._line:
            assert ticket.due == world.now + slo
            assert world.likely(ahead, queued, ticket.ask.prompt) <= slo
            ahead, queued = ahead + ticket.ask.places, queued + ticket.ask.prompt


@settings(max_examples=100, deadline=None)
@given(Newcomers)
def test_without_promises_the_order_is_rank_then_use_then_arrival(
    newcomers: list[tuple[str, Rank, int, int]],
) -> None:
    world = World(max_queue=100)
    world.fill()
    came = [world.enter(user, rank, prompt=prompt, places=places) for user, rank, prompt, places in newcomers]
    order = world.served()
    assert order == sorted(came, key=lambda ticket: (*precedence(ticket), came.index(ticket)))


# ---- order


def test_live_turns_then_first_turns_then_batch_work() -> None:
    world = World()
    world.fill()
    ranks = [Rank.BATCH, Rank.FIRST, Rank.LIVE, Rank.FIRST, Rank.BATCH, Rank.LIVE]
    tickets = [world.enter(str(number), rank) for number, rank in enumerate(ranks)]
    assert world.served() == [tickets[at] for at in (2, 5, 1, 3, 0, 4)]


def test_who_has_had_least_comes_first() -> None:
    world = World()
    world.fill()
    heavy = [world.enter("heavy") for _ in range(3)]
    light = [world.enter("light"), world.enter("other")]
    assert world.served() == [heavy[0], *light, *heavy[1:]]


def test_nobody_goes_ahead_of_who_would_then_come_too_late() -> None:
    world = World(slots=1)
    world.fill()
    behind = world.likely(1, 40, 40)
    first = world.enter("a", Rank.BATCH, prompt=40, slo=behind * 1.01)
    one = world.enter("b", Rank.LIVE, prompt=40)
    other = world.enter("c", Rank.LIVE, prompt=40)  # one may go ahead of the first, not two
    assert world.queue._line == [one, first, other]
    assert world.served() == [one, first, other]


def test_one_that_may_not_go_ahead_of_all_goes_ahead_of_those_it_may() -> None:
    world = World(slots=1)
    world.fill()
    tight = world.enter("a", Rank.FIRST, prompt=40, slo=world.likely(0, 0, 40) * 1.01)
    patient = world.enter("b", Rank.FIRST, prompt=40)
    live = world.enter("c", Rank.LIVE, prompt=40)
    assert world.queue._line == [tight, live, patient]


def test_those_whose_turn_has_come_count_as_ahead() -> None:
    """Also while the backend does not know of them yet."""
    world = World(slots=4)
    alone = world.enter(prompt=500, slo=100.0)
    assert world.queue.next(world.now) is alone
    second = world.enter(prompt=500, slo=100.0)
    assert second.modelled > alone.modelled + 0.5
    assert second.predicted is not None


# ---- walls


def test_no_more_wait_than_may() -> None:
    world = World(max_queue=3)
    world.fill()
    world.enter(places=2)
    assert world.refused(places=2).code == "queue_full"
    world.enter()
    error = world.refused(rank=Rank.LIVE)
    assert isinstance(error, Busy)
    assert (error.status, error.code) == (503, "queue_full")
    with pytest.raises(Busy):
        world.queue.check(world.now, Rank.LIVE, 1)


def test_who_need_not_wait_needs_no_room_in_the_queue() -> None:
    world = World(max_queue=0, max_tokens=0)
    for _ in range(4):
        world.queue.check(world.now, Rank.BATCH, 3)
        world.run(prompt=1000)
    assert world.refused().code == "queue_full"
    with pytest.raises(Busy, match="too many"):
        world.queue.check(world.now, Rank.FIRST, 1)


def test_a_turn_on_its_way_takes_room() -> None:
    world = World(slots=3, max_queue=0)
    ticket = world.enter(places=3)
    assert world.queue.next(world.now) is ticket
    assert world.refused().code == "queue_full"
    world.queue.drop(ticket, world.now)
    world.enter()


def test_no_more_prompt_tokens_wait_than_may() -> None:
    world = World(max_tokens=100)
    world.fill()
    world.enter(prompt=60)
    assert world.refused(prompt=41).code == "queued_tokens"
    world.queue.check(world.now, Rank.FIRST, 1)
    world.enter(prompt=40)
    assert world.refused(prompt=0).code == "queued_tokens"
    with pytest.raises(Busy, match="long"):
        world.queue.check(world.now, Rank.FIRST, 1)


def test_one_long_prompt_may_wait_alone() -> None:
    world = World(max_tokens=100)
    world.fill()
    world.enter(prompt=5000)
    assert world.refused(prompt=1).code == "queued_tokens"


def test_no_more_prompt_tokens_wait_than_the_cache_can_hold() -> None:
    world = World(max_tokens=100)
    world.pages = {"free": 1, "running": 2}
    world.fill()
    world.enter(prompt=30)
    assert world.refused(prompt=19).code == "queued_tokens"
    world.enter(prompt=18)  # 3 pages of 16


def test_batch_work_is_shed_at_its_level_only_and_only_where_it_would_wait() -> None:
    world = World(max_queue=100)
    idle = World()
    world.fill()
    for level in Level:
        world.at(level)
        idle.at(level)
        idle.queue.check(world.now, Rank.BATCH, 1)
        world.enter(rank=Rank.LIVE)
        if level < Level.NO_BATCH:
            world.enter(rank=Rank.BATCH)
        else:
            assert world.refused(rank=Rank.BATCH).code == "shed_batch"
            with pytest.raises(Busy):
                world.queue.check(world.now, Rank.BATCH, 1)
            world.queue.check(world.now, Rank.FIRST, 1)


def test_new_conversations_are_shed_at_the_last_level_where_they_would_wait_for_long() -> None:
    world = World(max_queue=100)
    world.fill()
    likely = world.likely(0, 0, 10)
    for level in Level:
        world.at(level)
        for rank in (Rank.LIVE, Rank.FIRST):
            ticket = world.enter("x", rank, slo=likely * 2.02)
            world.queue.drop(ticket, world.now)
            if level is Level.FEW_NEW and rank is Rank.FIRST:
                assert world.refused("x", rank, slo=likely * 1.98).code == "shed_new"
            else:
                world.queue.drop(world.enter("x", rank, slo=likely * 1.98), world.now)
    idle = World()
    idle.at(Level.FEW_NEW)
    idle.run(slo=0.001)


# ---- parts of users and keys


def test_429s_come_before_what_all_are_refused_for() -> None:
    world = World(max_queue=0, user_concurrency=4)
    world.fill("one")
    assert world.refused("one").status == 429
    assert world.refused("other").status == 503


def test_a_user_has_no_more_open_than_it_may() -> None:
    world = World(user_concurrency=5)
    world.fill("one")
    waits = world.enter("one")
    error = world.refused("one")
    assert isinstance(error, RateLimited)
    assert (error.status, error.code) == (429, "user_concurrency")
    world.enter("other")
    world.queue.drop(waits, world.now)
    world.enter("one")


def test_one_user_may_take_the_whole_queue() -> None:
    world = World(max_queue=10, user_share=2.0)
    world.fill("one")
    for _ in range(10):
        world.enter("one")
    assert world.refused("one").code == "queue_full"


def test_among_others_it_may_have_so_many_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "_YOUNG", 0.0)  # nothing that the others leave over
    world = World(max_queue=100, user_share=2.0)
    world.fill("first")
    for number in range(9):
        world.enter(str(number))
    let_in = 0
    for _ in range(50):
        ticket = world.attempt("heavy")
        if not isinstance(ticket, Ticket):
            assert ticket.code == "user_share"
            break
        let_in += 1
    # Eleven are here: 13 requests of the others, so that 3 are less than two parts of 16 / 11, and 4 would be more.
    assert let_in == 3
    world.enter("newcomer")
    world.enter("1")


def test_who_has_had_its_part_is_served_where_nobody_waits() -> None:
    world = World(user_share=2.0)
    for number in range(9):
        world.end(world.run(str(number)), 10)
    for _ in range(3):
        world.run("heavy", slo=4.0)
    assert world.queue.waiting == 0


def test_who_has_had_its_part_is_served_where_its_long_prompt_delays_nobody() -> None:
    world = World(slots=16, user_share=2.0, slo_ttft=4.0)
    for number in range(9):
        world.end(world.run(str(number)), 10)
    world.run("heavy", prompt=1000, slo=4.0)
    world.run("heavy", prompt=1000, slo=4.0)  # 14 of 16 places are free, and nobody waits


def test_a_user_is_held_to_what_the_others_leave_over_before_anybody_waits() -> None:
    """Four fifths of what the engine does in ten seconds, at first."""
    world = World(slots=16, user_share=1.0)
    for name in "abc":
        world.end(world.run(name), 100)  # 210 tokens each
    let_in = 0
    while let_in < 100 and isinstance(ticket := world.attempt("heavy"), Ticket):
        world.end(world.start(ticket), 100)
        let_in += 1
    assert world.refused("heavy").code == "user_share"
    # 0.235 s of the engine for 210 tokens: 0.8 x 9.6 s of it are 6859, of which 630 are the others'.
    assert let_in == 30
    world.run("a")


@pytest.mark.parametrize("leaves", ["the queue", "with an answer"])
def test_what_is_given_back_has_faded_like_what_was_taken(leaves: str) -> None:
    world = World(slots=1, pace=None, max_queue=9)
    first = world.run("other")
    earlier = world.enter("one", prompt=1000)
    ticket = world.enter("one", prompt=5000)
    world.now += 60.0
    if leaves == "the queue":
        world.queue.drop(ticket, world.now)
    else:
        world.end(first)
        world.end(world.start(earlier), 100)
        world.end(world.start(ticket))  # nothing came of it
    left = world.queue._users._accounts[("", "one")]
    assert left.used == pytest.approx(1200.0 * exp(-60.0 / fairness.FADING))


def test_tokens_of_a_user() -> None:
    world = World(user_tokens=10.0, max_queue=100)
    world.enter("one", prompt=400, most=100)  # 600: all that a minute has
    error = world.refused("one", prompt=0, most=10)
    assert (error.status, error.code, error.retry_after) == (429, "user_tokens", 2.0)
    world.enter("other", prompt=400)
    world.now += 2.0
    world.enter("one", prompt=0, most=10)


def test_a_key_sends_no_more_than_its_rate() -> None:
    world = World()
    for _ in range(20):
        world.queue.check_rate(world.now, "key", 2.0)
    world.drawn = 1.0
    with pytest.raises(RateLimited) as limited:
        world.queue.check_rate(world.now, "key", 2.0)
    assert (limited.value.code, limited.value.retry_after) == ("key_rate", 1.0)
    world.queue.check_rate(world.now, "other", 2.0)
    world.queue.check_rate(world.now, "free", 0.0)
    world.now += 0.5
    world.queue.check_rate(world.now, "key", 2.0)


def test_a_slow_key_is_told_when_to_come_again_and_not_all_at_once() -> None:
    world = World()
    waits = []
    for rate, drawn in ((0.1, 0.0), (0.1, 1.0), (0.01, 1.0)):
        world.drawn = drawn
        key = f"{rate} {drawn}"
        world.queue.check_rate(world.now, key, rate)
        with pytest.raises(RateLimited) as limited:
            world.queue.check_rate(world.now, key, rate)
        waits.append(limited.value.retry_after)
    assert waits == pytest.approx([10.0, 11.0, 30.0])


# ---- promises


def test_an_idle_server_takes_whatever_comes_unless_the_client_named_the_time() -> None:
    world = World()
    ticket = world.enter(prompt=5000, slo=1.0)
    assert ticket.predicted == pytest.approx(5.004)
    world.queue.drop(ticket, world.now)
    assert world.refused(prompt=5000, slo=1.0, strict=True).code == "predicted_wait"
    world.run(prompt=5000, slo=10.0, strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_who_would_come_too_late_is_refused(strict: bool) -> None:
    world = World()
    for number, ticket in enumerate(world.fill()):
        ticket.tokens = 20 * number
    world.queue.look(world.now)
    likely = world.likely(0, 0, 10)
    error = world.refused(slo=likely * 0.99, strict=strict)
    assert (error.status, error.code) == (503, "predicted_wait")
    assert "first token" in error.message
    ticket = world.enter(slo=likely * 1.01, strict=strict)
    assert ticket.due == world.now + likely * 1.01
    assert ticket.predicted == pytest.approx(likely / world.queue._factor.spread)
    # The second has the first before it.
    assert world.refused(slo=likely * 1.01, strict=strict).code == "predicted_wait"
    world.enter(slo=world.likely(1, 10, 10) * 1.01, strict=strict)


def test_time_that_has_passed_since_it_came_counts() -> None:
    world = World()
    world.fill()
    likely = world.likely(0, 0, 10)
    assert world.refused(age=0.1, slo=likely + 0.09).code == "predicted_wait"
    ticket = world.enter(age=0.1, slo=likely + 0.11)
    assert ticket.predicted == pytest.approx(0.1 + likely / world.queue._factor.spread)
    assert ticket.due == world.now + likely + 0.01


def test_without_a_promise_or_a_pace_nobody_is_refused_for_the_time() -> None:
    world = World(max_queue=50)
    world.fill()
    assert all(world.enter().due == inf for _ in range(50))
    unknown = World(max_queue=50, pace=None)
    unknown.fill()
    tickets = [unknown.enter(slo=0.01) for _ in range(50)]
    assert {(ticket.due, ticket.predicted) for ticket in tickets} == {(inf, None)}


def test_a_prompt_that_takes_longer_than_promised_may_wait_for_half_of_the_promise() -> None:
    """Where nothing runs beside it."""
    world = World()
    world.settle()
    granted = world.enter(prompt=10, slo=4.0)
    assert world.queue.next(world.now) is granted
    long = world.enter(prompt=2500, slo=2.0)
    careful = world.likely(1, 10, 2500) - world.likely(1, 10, 1)
    assert long.due == pytest.approx(world.now + careful + 1.0)
    world = World(slots=1)
    world.settle()
    world.run(most=300)
    assert world.refused(prompt=2500, slo=1.0).code == "predicted_wait"


@pytest.mark.parametrize("prompt", [4100, 8000, 16000])
def test_a_long_prompt_is_let_in_where_half_of_the_places_are_free(prompt: int) -> None:
    """It need not wait at all, will never come sooner, and would be refused for ever."""
    world = World(slots=16)
    world.settle()
    for _ in range(8):
        world.run()
    world.enter(prompt=prompt, slo=4.0)


def test_who_came_too_late_is_refused_at_once() -> None:
    world = World()
    for names in ({"patience": 3.0}, {"slo": 3.0, "strict": True}):
        error = world.refused(age=3.0, **names)
        assert isinstance(error, DeadlineExceeded)
        assert (error.status, error.code) == (503, "deadline_exceeded")
        world.queue.drop(world.enter(age=2.9, prompt=1, **names), world.now)


def test_an_idle_server_serves_one_that_was_long_on_its_way() -> None:
    """A body that took five seconds to come. There is no promise to be kept any more, and nobody who waits."""
    world = World()
    world.run(age=5.0, slo=4.0, patience=60.0)


def test_one_that_is_predicted_to_come_in_time_gets_the_turn_that_is_free() -> None:
    world = World(slots=16)
    world.settle()
    world.run()
    ticket = world.enter(age=3.3, prompt=500, slo=4.0)
    assert ticket.predicted is not None
    assert ticket.predicted < 4.0
    world.start(ticket)


def test_who_is_overdue_gets_no_turn() -> None:
    world = World(pace=None)
    running = world.fill()
    soon, later = world.enter("a", patience=2.0), world.enter("b", patience=5.0)
    world.now += 1.99
    assert world.queue.overdue(world.now) == []
    world.now += 0.01
    assert world.queue.overdue(world.now) == [soon]
    world.end(running[0])
    assert world.queue.waiting == 2
    world.start(later)
    world.queue.drop(soon, world.now)
    assert world.queue.waiting == 0


def test_who_is_promised_a_time_waits_no_longer_than_it_may_to_be_in_time() -> None:
    world = World()
    world.fill()
    outlook = world.queue._outlook(world.load())
    assert outlook is not None
    for prompt in (10, 300, 1000, 3000):
        ticket = world.enter(prompt=prompt, slo=10.0, patience=60.0)
        assert ticket.until == ticket.due - min(outlook.granted(prompt), 5.0)
        world.queue.drop(ticket, world.now)
    assert world.enter(slo=10.0, patience=1.0).until == world.now + 1.0


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 6),
    st.lists(st.sampled_from([1, 50, 400]), max_size=8),
    st.sampled_from(list(Rank)),
    st.sampled_from([0.4, 1.0, 2.0, 4.0, inf]),
    st.booleans(),
    st.sampled_from(list(Level)),
    st.integers(1, 3000),
)
def test_who_is_refused_unread_would_be_refused_anyway(
    runs: int, waits: list[int], rank: Rank, slo: float, strict: bool, level: Level, prompt: int
) -> None:
    """Who has as many tokens as prompts of its size have at least, or more; and nothing is changed by looking."""
    world = World(ahead=2)
    for _ in range(runs):
        world.run("runs")
    for waiting in waits:
        world.enter(prompt=waiting, slo=20.0)
    for _ in range(20):
        world.queue._density.add(10, 100)
    world.at(level)
    ask = Ask(world.now, ("", "x"), rank, most=100, slo=slo, strict=strict, size=500)
    before = list(world.queue._line)
    offered = world.queue.capacity(world.now).offered_per_second
    try:
        world.queue.check_wait(world.now, ask)
        refused = False
    except Busy:
        refused = True
    more = world.queue.capacity(world.now).offered_per_second > offered
    assert more == refused  # who is refused will not be counted again
    assert (world.queue._line, world.queue._users.open) == (before, runs + len(waits))
    sheds = rank is Rank.BATCH and level >= Level.NO_BATCH
    names = {"slo": slo, "strict": strict, "size": 500}
    if refused:
        world.refused("x", rank, prompt=max(50, prompt), **names)
    elif not sheds:
        world.enter("x", rank, prompt=50, **names)


# ---- what is learned


def test_lengths_of_answers_are_learned_by_rank() -> None:
    world = World(slots=20)
    for _ in range(8):
        world.end(world.run(rank=Rank.LIVE, most=500), 40)
    assert world.run(rank=Rank.LIVE, most=500).expected == 40
    assert world.run(rank=Rank.LIVE, most=30).expected == 30
    assert world.run(rank=Rank.FIRST, most=500).expected == 128
    assert world.queue.usual == 40
    two = world.run(rank=Rank.BATCH, places=2)
    world.end(two, 20)
    assert world.queue._lengths[Rank.BATCH].mean == 10


def test_rest_of_an_answer() -> None:
    world = World(slots=10)
    ticket = world.run(most=100)
    assert (ticket.expected, ticket.rest) == (100, 100)
    world.queue.saw(ticket, 60, world.now)
    assert ticket.rest == 40
    world.queue.saw(ticket, 39, world.now)
    assert ticket.rest == 1
    two = world.run(most=1000, places=2)
    assert (two.expected, two.rest) == (128, 128)
    world.queue.saw(two, 100, world.now)
    assert two.rest == 78
    world.queue.saw(two, 100, world.now)
    assert two.rest == 32  # a quarter of what was expected, again and again
    world.queue.saw(two, 1798, world.now)
    assert two.rest == 1


def test_what_comes_later_than_predicted_is_predicted_later() -> None:
    world = World(slots=1)
    for _ in range(40):
        running = world.run(prompt=1000, slo=60.0)
        assert running.predicted is not None
        world.now += 3 * running.modelled
        world.queue.saw(running, 1, world.now)
        world.queue.saw(running, 1, world.now + 100)  # only the first token teaches
        world.end(running)
    ticket = world.run(prompt=1000, slo=60.0)
    assert ticket.predicted == pytest.approx(3 * ticket.modelled, rel=0.1)


def test_who_was_not_served_in_time_teaches_too() -> None:
    world = World(max_queue=100)
    world.fill()
    world.queue._factor.learn(2.0, 2.0, world.now - 10)
    for _ in range(30):
        ticket = world.attempt(slo=4.0)
        if not isinstance(ticket, Ticket):
            break
        world.now = ticket.until
        assert world.queue.overdue(world.now) == [ticket]
        world.queue.drop(ticket, world.now)
    assert world.queue._factor.value > 1.3
    assert world.refused(slo=4.0).code == "predicted_wait"


def test_who_left_early_teaches_nothing() -> None:
    world = World(max_queue=100)
    world.fill()
    for _ in range(30):
        ticket = world.enter(slo=4.0)
        world.now += 1.0
        world.queue.drop(ticket, world.now)
    assert world.queue._factor.value == 1.0


def test_who_waited_and_left_is_given_its_tokens_back() -> None:
    world = World(user_tokens=100.0, max_queue=100)
    world.fill("other")
    first = world.enter("one", prompt=1000)
    second = world.enter("one", prompt=3000)
    used = second.tag - world.now / fairness.FADING
    assert exp(used) == pytest.approx(1200.0)
    assert world.refused("one", prompt=3000).code == "user_tokens"
    world.queue.drop(second, world.now)
    third = world.enter("one", prompt=3000)
    assert third.tag == second.tag
    world.queue.drop(third, world.now)
    world.queue.drop(first, world.now)
    assert world.enter("one", prompt=5000).tag <= second.tag


def test_what_an_answer_took_is_set_right_at_its_end() -> None:
    world = World(max_queue=100)
    ticket = world.run("one", prompt=100, most=100)
    unseen = world.run("other", prompt=100, most=100)
    assert world.queue._users._accounts[("", "one")].used == pytest.approx(300.0)
    world.end(ticket, 10)
    world.end(unseen)  # it left before anything came
    assert world.queue._users._accounts[("", "one")].used == pytest.approx(120.0)
    assert world.queue._users._accounts[("", "other")].used == pytest.approx(0.0)


# ---- what the refused are told


def settled(interval: float, max_queue: int = 4) -> World:
    """One whose queue is full, and from which one departs every ``interval`` seconds."""
    world = World(slots=1, max_queue=max_queue, pace=None)
    running = world.run()
    for _ in range(max_queue):
        world.enter()
    for _ in range(60):
        world.now += interval
        world.end(running)
        running = world.start()
        world.enter()
    return world


def test_retry_after_is_the_time_until_the_queue_has_drained() -> None:
    assert settled(0.05).refused().retry_after == 1.0
    assert settled(0.5).refused().retry_after == pytest.approx(2.5, rel=0.01)
    assert settled(2.0).refused().retry_after == pytest.approx(10.0, rel=0.01)
    assert settled(2.0, max_queue=9).refused().retry_after == pytest.approx(20.0, rel=0.01)


def test_one_that_leaves_several_places_is_several_departures() -> None:
    world = World(slots=4, max_queue=4, pace=None)
    running = [world.run(places=2) for _ in range(2)]
    for _ in range(2):
        world.enter(places=2)
    for _ in range(60):
        world.now += 2.0
        world.end(running.pop(0))
        running.append(world.start())
        world.enter(places=2)
    assert world.refused().retry_after == pytest.approx(5.0, rel=0.01)


def test_who_is_refused_later_is_told_to_come_later() -> None:
    """Half as many at a time as there will be room for."""
    world = settled(0.5)
    waits = [world.refused().retry_after for _ in range(20)]
    assert waits == pytest.approx([2.5 + number for number in range(20)], rel=0.01)
    world.now += 10.0
    assert world.refused().retry_after == pytest.approx(12.5, rel=0.02)  # behind those who were told so far
    world.now += 100.0
    assert world.refused().retry_after == pytest.approx(2.5, rel=0.01)  # all have come back


def test_nobody_is_told_more_than_30_seconds_nor_all_the_same() -> None:
    world = settled(0.5)
    while world.refused().retry_after < 29.0:
        pass
    waits = []
    for drawn in (0.0, 0.25, 0.5, 1.0) * 20:
        world.drawn = drawn
        waits.append(world.refused().retry_after)
    assert waits[4:] == pytest.approx([15.0, 18.75, 22.5, 30.0] * 19)
    world.drawn = 0.0
    world.now += 5.0
    assert world.refused().retry_after == pytest.approx(26.0)


def test_departures_while_nobody_waits_tell_nothing() -> None:
    world = World(slots=2, max_queue=0)
    for _ in range(50):
        running = world.run()
        world.now += 20.0
        world.end(running, 5)
    world.fill()
    assert world.refused().retry_after == 1.0


def test_the_message() -> None:
    world = World(max_queue=0, busy_text="系统繁忙", busy_hint="转人工")
    world.fill()
    assert world.refused().message == "系统繁忙 转人工 (too many requests are waiting)"
    bare = World(max_queue=0, busy_text="", busy_hint="")
    bare.fill()
    assert bare.refused().message == "(too many requests are waiting)"
    assert "系统繁忙，请稍后再试" in World().refused(age=1.0, patience=1.0).message
    limited = World(user_concurrency=1, busy_hint="转人工")
    limited.run("one")
    assert "转人工" in limited.refused("one").message


# ---- brownout, capacity


def test_brownout_by_what_waits() -> None:
    world = World(max_queue=100)
    world.queue.look(world.now)
    world.fill()
    world.enter()
    for _ in range(40):
        world.now += 0.5
        world.queue.look(world.now)
    assert world.queue.level is Level.FEW_NEW
    while (ticket := next(iter(world.queue._line), None)) is not None:
        world.queue.drop(ticket, world.now)
    for _ in range(6):
        world.now += 0.5
        world.queue.look(world.now)
    assert world.queue.level is Level.NORMAL


def test_brownout_rises_by_what_got_turns_and_not_by_batch_work() -> None:
    for rank, level in ((Rank.FIRST, Level.NO_SPECULATION), (Rank.BATCH, Level.NORMAL)):
        world = World(max_queue=100)
        world.queue.look(world.now)
        running = world.fill()
        for _ in range(6):
            world.enter(rank=rank)
        for _ in range(round(UP / 0.5) + 2):
            world.now += 0.5
            if world.now > 101.0:
                world.end(running.pop(0))
                running.append(world.start())
            world.queue.look(world.now)
        assert world.queue.level is level, rank


def test_batch_work_that_came_at_a_good_moment_does_not_hide_how_long_the_others_wait() -> None:
    world = World(max_queue=100)
    running = world.fill()
    world.queue.look(world.now)
    world.now += DOWN
    world.queue.look(world.now)  # a while begins
    waits = world.enter()
    world.now += UP - 0.1
    world.end(running[0])
    world.end(running[1])
    world.start(waits)
    world.start(world.enter(rank=Rank.BATCH))
    world.enter(age=1.5)
    world.now += UP
    assert world.queue.look(world.now) is Level.NO_SPECULATION


def test_brownout_is_off_by_a_setting() -> None:
    world = World(max_queue=100, brownout=False)
    world.fill()
    world.enter()
    for _ in range(40):
        world.now += 0.5
        world.queue.look(world.now)
    assert world.queue.level is Level.NORMAL


def test_capacity() -> None:
    world = World(slots=4, max_queue=7, max_tokens=500)
    for _ in range(20):
        world.now += 1.0
        world.end(world.run(prompt=200), 50)
    world.fill()
    world.enter(prompt=300)
    told = world.queue.capacity(world.now)
    assert told.prefill_tokens_per_second == pytest.approx(1000.0)
    assert told.decode_tokens_per_second == pytest.approx(4 / 0.012)
    assert told.completion_tokens == 50
    assert (told.running, told.slots, told.waiting, told.max_queue) == (4, 4, 1, 7)
    assert (told.queued_tokens, told.max_queued_tokens, told.brownout_level) == (300, 500, 0)
    assert told.requests_per_second is not None
    assert told.prompt_tokens is not None
    assert 1 / told.requests_per_second == pytest.approx(0.001 * told.prompt_tokens + 50 * 0.003)
    assert told.predicted_ttft is not None
    assert told.predicted_ttft > 0.5
    assert told.headroom is not None
    assert 0.2 < told.headroom < 0.8
    while isinstance(world.attempt(prompt=0), Ticket):
        pass
    after = world.queue.capacity(world.now)
    assert after.offered_per_second > after.admitted_per_second > told.admitted_per_second
    blank = World(pace=None).queue.capacity(100.0)
    assert (blank.headroom, blank.requests_per_second, blank.predicted_ttft) == (None, None, None)


def test_times_of_first_tokens_are_told_apart() -> None:
    """Those behind come later."""
    world = World(max_queue=30)
    world.fill()
    predicted = [world.enter(slo=100.0).modelled for _ in range(20)]
    assert all(one <= other for one, other in pairwise(predicted))
    assert predicted[-1] > 2 * predicted[0]
