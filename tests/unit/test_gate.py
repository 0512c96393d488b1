"""The front's queue: bounded, first come first served, and no turn is ever lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.admission.gate import Gate
from forebay.contract import Busy, DeadlineExceeded

SOON = 1_000.0


class World:
    """A backend with ``capacity`` places behind a gate, a clock that stands still, and guests that can be told
    to leave. The gate's promise is checked after every move."""

    def __init__(self, capacity: int = 1, max_queue: int = 4) -> None:
        self.now = 0.0
        self.capacity = capacity
        self.max_queue = max_queue
        self.running: set[int] = set()
        self.gate = Gate(max_queue, lambda: self.capacity - len(self.running), lambda: self.now)
        self.guests: dict[int, asyncio.Task[str]] = {}
        self.go: dict[int, asyncio.Event] = {}
        self.served: list[int] = []
        self.asked: list[int] = []

    async def _visit(self, guest: int, deadline: float) -> str:
        try:
            async with self.gate.admit(deadline):
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
        assert self.gate._granted == 0, "a turn was granted to nobody"
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
        assert self.gate._granted == 0
        assert not self.running
        return [r if isinstance(r, str) else "cancelled" for r in results]


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
            async with world.gate.admit(SOON):
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
        assert await after(20.0) == 30.0

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
