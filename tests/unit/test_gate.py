"""The front's queue: bounded, first come first served, and no turn is ever lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.admission.ask import Ask, Rank, Ticket
from forebay.admission.brownout import Level
from forebay.admission.gate import Gate
from forebay.config import AdmissionSettings
from forebay.contract import Busy, DeadlineExceeded, Load, RateLimited

SOON = 1_000.0


class World:
    """A backend with ``capacity`` places behind a gate, a clock that stands still, and guests that can be told
    to leave. The gate's promise is checked after every move."""

    def __init__(self, capacity: int = 1, max_queue: int = 4) -> None:
        self.now = 0.0
        self.capacity = capacity
        self.max_queue = max_queue
        self.running: set[int] = set()
        self.gate = Gate(AdmissionSettings(), max_queue, 10**9, self.load, lambda: self.now, lambda: 0.0)
        self.guests: dict[int, asyncio.Task[str]] = {}
        self.go: dict[int, asyncio.Event] = {}
        self.served: list[int] = []
        self.asked: list[int] = []

    def load(self) -> Load:
        return Load(ready=True, state="ready", credits=self.capacity - len(self.running))

    def ask(self, deadline: float) -> Ask:
        """All of one user, so they are served in the order of their arrival."""
        return Ask(self.now, patience=deadline - self.now, most=1)

    async def _visit(self, guest: int, deadline: float) -> str:
        try:
            async with self.gate.admit(self.ask(deadline)):
                assert len(self.running) < self.capacity or self.shrunk
                self.running.add(guest)
                self.served.append(guest)
                try:
                    await self.go[guest].wait()
                finally:
                    self.running.discard(guest)
        except DeadlineExceeded:
            return "late"
        except Busy:
            return "full"
        return "served"

    shrunk = False  # capacity was lowered: more may run than fit, none may be added

    def arrive(self, deadline: float = SOON) -> int:
        guest = len(self.guests)
        self.go[guest] = asyncio.Event()
        self.asked.append(guest)
        self.guests[guest] = asyncio.create_task(self._visit(guest, deadline))
        return guest

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        assert self.gate.waiting <= self.max_queue
        assert self.gate._queue.granted == 0, "a turn was granted to nobody"
        open_guests = sum(not task.done() for task in self.guests.values())
        assert self.gate.waiting == open_guests - len(self.running)
        if self.gate.waiting:
            assert self.capacity <= len(self.running), "somebody waits though there is room"

    async def close(self) -> list[str]:
        self.shrunk, self.capacity = True, 10**6
        self.gate.pump()
        for go in self.go.values():
            go.set()
        results = await asyncio.gather(*self.guests.values(), return_exceptions=True)
        assert self.gate.waiting == 0
        assert not self.running
        check_nothing_is_left(self.gate)
        return [r if isinstance(r, str) else "cancelled" for r in results]


def check_nothing_is_left(gate: Gate) -> None:
    queue = gate._queue
    assert (gate.waiting, gate.queued_tokens, queue.granted, queue._users.open) == (0, 0, 0, 0)
    assert (gate._waiters, queue._line, queue._granted, queue._running) == ({}, [], set(), set())


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_first_come_first_served() -> None:
    async def scenario() -> None:
        world = World(capacity=1, max_queue=10)
        guests = [world.arrive() for _ in range(5)]
        await world.settle()
        for guest in guests:
            assert world.served[-1] == guest
            world.go[guest].set()
            await world.settle()
        assert world.served == guests
        assert await world.close() == ["served"] * 5

    run(scenario())


def test_newcomer_does_not_overtake_a_granted_turn() -> None:
    async def scenario() -> None:
        world = World(capacity=0)
        first = world.arrive()
        await world.settle()
        world.capacity = 2
        world.gate.pump()  # granted, not yet resumed
        second = world.arrive()
        await world.settle()
        assert world.served == [first, second]
        await world.close()

    run(scenario())


def test_a_turn_on_its_way_counts_against_the_credits() -> None:
    async def scenario() -> None:
        world = World(capacity=0)
        for _ in range(3):
            world.arrive()
        await world.settle()
        world.capacity = 1
        for _ in range(3):
            world.gate.pump()
        await world.settle()
        assert world.served == [0]
        await world.close()

    run(scenario())


@pytest.mark.parametrize("max_queue", [0, 1, 3])
def test_full_queue_refuses_at_once(max_queue: int) -> None:
    async def scenario() -> None:
        world = World(capacity=2, max_queue=max_queue)
        for _ in range(2 + max_queue + 5):
            world.arrive()
        await world.settle()
        assert len(world.running) == 2
        assert world.gate.waiting == max_queue
        assert (await world.close()).count("full") == 5

    run(scenario())


def test_cancelled_after_the_grant_passes_it_on() -> None:
    async def scenario() -> None:
        world = World(capacity=0)
        first, second = world.arrive(), world.arrive()
        await world.settle()
        world.capacity = 1
        world.gate.pump()
        world.guests[first].cancel()  # in the same tick, before it could run
        await world.settle()
        assert world.served == [second]
        assert await world.close() == ["cancelled", "served"]

    run(scenario())


def test_cancelled_after_its_deadline_leaves_no_turn_behind() -> None:
    async def scenario() -> None:
        world = World(capacity=0)
        world.arrive(deadline=5)
        await world.settle()
        world.now, world.capacity = 6, 1
        world.gate.pump()
        world.guests[0].cancel()
        await world.settle()
        assert world.served == []
        await world.close()

    run(scenario())


def test_deadlines() -> None:
    async def scenario() -> None:
        world = World(capacity=0)
        world.now = 10.0
        assert await world.guests[world.arrive(deadline=10.0)] == "late"  # on arrival
        soon = world.arrive(deadline=10.02)
        later = world.arrive(deadline=SOON)
        assert await asyncio.wait_for(world.guests[soon], 5) == "late"  # by the timer, though nothing pumps
        assert world.gate.waiting == 1
        world.now, world.capacity = SOON + 1, 5
        world.gate.pump()  # a turn that came too late is not given
        assert await world.guests[later] == "late"
        assert world.served == []
        await world.close()

    run(scenario())


def test_retry_after_follows_the_measured_drain() -> None:
    async def refused(world: World) -> float:
        with pytest.raises(Busy) as busy:
            async with world.gate.admit(world.ask(world.now + SOON)):
                pass
        return busy.value.retry_after

    async def after(seconds: float) -> float:
        world = World(capacity=1, max_queue=4)
        for _ in range(5):
            world.arrive()
        await world.settle()
        for guest in range(40):  # one leaves every ``seconds``, another takes its place in the queue
            world.now += seconds
            world.go[guest].set()
            await world.settle()
            world.arrive(deadline=world.now + SOON)
            await world.settle()
        wait = await refused(world)
        await world.close()
        return wait

    async def scenario() -> None:
        assert await refused(World(capacity=0, max_queue=0)) == 1.0
        assert await after(0.01) == 1.0
        assert await after(2.0) == pytest.approx(10.0, rel=0.01)  # 4 wait, and the one that asks
        assert await after(20.0) == 15.0  # the longest is 30 s, less what is drawn so that not all come at once

    run(scenario())


async def history(seed: int, moves: int) -> None:
    choose = random.Random(seed)
    world = World(capacity=choose.randrange(4), max_queue=choose.randrange(6))
    for _ in range(moves):
        move = choose.choice(["arrive", "arrive", "cancel", "finish", "finish", "capacity", "time", "pump", "settle"])
        open_guests = [guest for guest, task in world.guests.items() if not task.done()]
        if move == "arrive":
            world.arrive(deadline=world.now + choose.choice([5.0, 20.0, SOON]))
        elif move == "cancel" and open_guests:
            world.guests[choose.choice(open_guests)].cancel()
        elif move == "finish" and world.running:
            world.go[choose.choice(sorted(world.running))].set()
        elif move == "capacity":
            capacity = choose.randrange(5)
            world.shrunk |= capacity < world.capacity
            world.capacity = capacity
            world.gate.pump()
        elif move == "time":
            world.now += 3.0
        elif move == "pump":
            world.gate.pump()
        else:
            await world.settle()
    await world.settle()
    before = list(world.served)
    assert before == sorted(before), "served out of order"
    results = await world.close()
    assert world.served == sorted(world.served), "served out of order"
    assert all(results[guest] in ("served", "cancelled") for guest in world.served)
    assert all(results[guest] != "served" for guest in world.asked if guest not in world.served)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_random_histories(seed: int, moves: int) -> None:
    """Never more than max_queue wait, order is kept, no turn is lost and none leaks, under random cancels."""
    run(history(seed, moves))


@pytest.mark.parametrize("ends", ["with an answer", "overdue", "refused"])
@pytest.mark.parametrize("granted", [0, 1, 2, 3, 4, 99])
@pytest.mark.parametrize("cancelled", [0, 1, 2, 3, 4, 5, 6])
def test_cancelled_at_any_moment_it_leaves_nothing_behind(cancelled: int, granted: int, ends: str) -> None:
    """So many turns of the event loop after it came, with a turn of its own so many after that, and others around."""

    async def scenario() -> None:
        world = World(capacity=1, max_queue=0 if ends == "refused" else 9)
        if ends != "refused":
            world.arrive()
            await world.settle()
            world.arrive()
        guest = world.arrive(deadline=5.0)
        other = world.arrive()
        for tick in range(8):
            if tick == cancelled:
                world.guests[guest].cancel()
            if tick == granted:
                world.capacity = 3
                world.gate.pump()
            if tick == 2 and ends == "overdue":
                world.now = 6.0
                world.gate.pump()
            await asyncio.sleep(0)
        world.capacity = max(3, world.capacity)
        world.gate.pump()
        await world.settle()
        assert ends == "refused" or other in world.running
        assert (guest in world.running) == (not world.guests[guest].done())
        await world.close()

    run(scenario())


def test_no_timer_outlives_the_wait_that_it_ends() -> None:
    async def scenario() -> None:
        world = World(capacity=0)
        served, gone = world.arrive(), world.arrive()
        await world.settle()
        timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        assert sum(not timer.cancelled() for timer in timers) == 2
        world.guests[gone].cancel()
        world.capacity = 1
        world.gate.pump()
        await world.settle()
        assert world.served == [served]
        assert all(timer.cancelled() for timer in timers)
        await world.close()

    run(scenario())


class Hall:
    """Guests with asks of their own. Who is let in stays until it is told to go."""

    def __init__(self, capacity: int, **names: object) -> None:
        self.now = 10.0
        self.capacity = capacity
        self.taken = 0
        settings = AdmissionSettings.model_validate(names)
        self.gate = Gate(settings, 50, 10**9, self.load, lambda: self.now, lambda: 0.0)
        self.inside: list[str] = []
        self.tickets: dict[str, Ticket] = {}
        self.go: dict[str, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def load(self) -> Load:
        return Load(ready=True, state="ready", credits=self.capacity - self.taken, slots=self.capacity)

    async def come(self, name: str, rank: Rank = Rank.FIRST, user: str = "", places: int = 1) -> None:
        self.go[name] = asyncio.Event()
        ask = Ask(self.now, ("", user), rank, prompt=5, most=50, places=places)
        self.tasks.append(asyncio.create_task(self._visit(name, ask)))
        await self.rest()

    async def _visit(self, name: str, ask: Ask) -> None:
        async with self.gate.admit(ask) as ticket:
            self.taken += ask.places
            self.inside.append(name)
            self.tickets[name] = ticket
            try:
                await self.go[name].wait()
            finally:
                self.taken -= ask.places

    async def leave(self, name: str) -> None:
        self.go[name].set()
        await self.rest()

    async def rest(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def close(self) -> None:
        self.capacity = 1000
        self.gate.pump()
        for go in self.go.values():
            go.set()
        await asyncio.gather(*self.tasks)
        check_nothing_is_left(self.gate)


def test_ranks_and_users_have_their_order() -> None:
    async def scenario() -> None:
        hall = Hall(1)
        await hall.come("runs", user="heavy")
        await hall.come("batch", Rank.BATCH, "a")
        await hall.come("heavy", Rank.FIRST, "heavy")
        await hall.come("light", Rank.FIRST, "b")
        await hall.come("live", Rank.LIVE, "heavy")
        for _ in range(4):
            await hall.leave(hall.inside[-1])
        assert hall.inside == ["runs", "live", "light", "heavy", "batch"]
        await hall.close()

    run(scenario())


def test_several_places_are_granted_together_and_nobody_else_meanwhile() -> None:
    async def scenario() -> None:
        hall = Hall(2)
        await hall.come("first")
        await hall.come("many", places=3)  # one place is free
        assert hall.inside == ["first", "many"]
        await hall.come("last")
        assert hall.gate.waiting == 1
        hall.capacity = 4
        hall.gate.pump()
        await hall.rest()
        assert hall.inside == ["first", "many"]
        await hall.leave("many")
        assert hall.inside == ["first", "many", "last"]
        await hall.come("more", places=2)
        await hall.come("waits", places=3)
        await hall.come("waits, too", places=2)
        assert (hall.gate.waiting, hall.gate.queued_tokens) == (5, 10)
        await hall.close()

    run(scenario())


@pytest.mark.parametrize("ticks", [0, 1, 2, 3])
def test_who_was_granted_several_places_and_leaves_gives_them_back(ticks: int) -> None:
    async def scenario() -> None:
        hall = Hall(1)
        await hall.come("first")
        await hall.come("many", places=3)
        await hall.come("last")
        hall.go["first"].set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        hall.tasks[1].cancel()
        await hall.rest()
        assert "last" in hall.inside
        await hall.leave("last")
        hall.tasks = [task for task in hall.tasks if not task.cancelled()]
        await hall.close()

    run(scenario())


def test_what_the_gate_is_told_of_answers() -> None:
    async def scenario() -> None:
        hall = Hall(20)
        assert hall.gate.usual() is None
        for number in range(8):
            name = str(number)
            await hall.come(name)
            hall.gate.saw(hall.tickets[name], 0)
            assert hall.tickets[name].first is None
            hall.now += 1.0
            hall.gate.saw(hall.tickets[name], 30)
            hall.now += 1.0
            hall.gate.saw(hall.tickets[name], 10)
            assert hall.tickets[name].first == hall.now - 1.0
            assert hall.tickets[name].tokens == 40
            await hall.leave(name)
        assert hall.gate.usual() == 40
        assert hall.gate.capacity().completion_tokens == 40
        assert hall.gate.capacity().offered_per_second > 0
        await hall.close()

    run(scenario())


def test_each_step_of_the_brownout_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        hall = Hall(1)
        hall.gate.pump()
        await hall.come("runs")
        await hall.come("waits")
        for _ in range(150):
            hall.now += 0.1
            hall.gate.pump()
        assert hall.gate.level is Level.FEW_NEW
        await hall.leave("runs")
        for _ in range(10):
            hall.now += 0.5
            hall.gate.pump()
        assert hall.gate.level is Level.NORMAL
        await hall.close()

    with caplog.at_level(logging.DEBUG, logger="forebay.admission"):
        run(scenario())
    names = [level.name.lower() for level in Level]
    up = [f"brownout: {names[at + 1]}, after {names[at]}" for at in range(5)]
    down = [f"brownout: {names[at]}, after {names[at + 1]}" for at in reversed(range(5))]
    # The turn of one that waited for long is a long wait, until a while without any has passed.
    assert [record.getMessage() for record in caplog.records] == up + down
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_what_is_refused_before_its_body_is_read() -> None:
    async def scenario() -> None:
        hall = Hall(1)
        hall.gate.check(Rank.BATCH)
        for number in range(51):
            await hall.come(str(number), user=str(number))
        assert hall.gate.waiting == 50
        with pytest.raises(Busy):
            hall.gate.check(Rank.LIVE)
        hall.gate.check_rate("key", 0.1)
        with pytest.raises(RateLimited):
            hall.gate.check_rate("key", 0.1)
        hall.gate.check_rate("key", 0.0)
        await hall.close()

    run(scenario())


def test_a_request_that_fails_inside_gives_its_place_back() -> None:
    async def scenario() -> None:
        hall = Hall(1)

        async def fail() -> None:
            async with hall.gate.admit(Ask(hall.now)):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await hall.come("next")
        assert hall.inside == ["next"]
        await hall.close()

    run(scenario())
