"""The three ways in which waiting requests join: one engine, one answer, one set of laws."""

import math
import socket
import threading
import time

import pytest
from histories import Harness, Histories, expected
from hypothesis import HealthCheck, settings

from forebay.config import EngineSettings
from forebay.engine.join import BURST_WINDOW, WINDOW, WINDOW_BATCH, policy
from forebay.engine.process import Gone, Link, serve
from forebay.engine.profile import profile_of
from forebay.engine.sequence import Emit, End, GenSpec
from forebay.engine.simulated import VirtualClock, simulated_engine
from forebay.engine.step import Step
from forebay.engine.wire import Frame, Submit, Unpacker, pack, to_front

LOOK_AHEAD = 2
MODES = ["continuous", "window", "serial"]


def order(id: int, n_prompt: int = 20, max_tokens: int = 10, **more: object) -> GenSpec:
    return GenSpec(id, [(id * 7 + i) % 50 for i in range(n_prompt)], max_tokens, **more)  # type: ignore[arg-type]


class Batched(Harness):
    """Nobody joins a batch that has begun: who begins while others of a batch live was there before it."""

    batch: dict[int, float]
    came: dict[int, float]

    def submit(self, spec: GenSpec) -> None:
        self.came = {**getattr(self, "came", {}), spec.id: self.now}
        super().submit(spec)

    def step(self) -> Step:
        begin = self.now
        alive = {s.spec.id for s in (*self.scheduler.running, *self.scheduler.waiting)}
        step = super().step()
        alive -= {emit.id for emit in step.ended}  # cancelled or expired: the next batch may begin in this very step
        before = {id: at for id, at in getattr(self, "batch", {}).items() if id in alive}
        started = {work.seq.spec.id for work in step.works}
        at = min(before.values(), default=begin)
        self.batch = {**dict.fromkeys(started, at), **before}
        assert len(self.batch) <= self.scheduler.policy.slots
        assert all(self.came[id] <= at for id in self.batch)
        return step


def batches(*came: float, n: int = 3, **more: int) -> list[tuple[float, list[int]]]:
    """When each batch began and who was in it, if orders come at these times. A step takes a millisecond."""
    sizes = {"n_pages": 500, "max_batch": 16, "token_budget": 512, **more}
    h = Batched(**sizes, batching="window", tick=0.001)
    h.now = 0.0
    begun: dict[int, float] = {}
    orders = [order(id, max_tokens=n) for id in range(len(came))]
    for step in range(2000):
        for spec in orders:
            if spec.id not in h.news and came[spec.id] <= step / 1000:
                h.submit(spec)
        now = h.now
        for work in h.step().works:
            begun.setdefault(work.seq.spec.id, now)
    assert all(h.tokens(spec.id) == expected(spec) for spec in orders)
    times = sorted(set(begun.values()))
    return [(round(at, 3), [id for id in begun if begun[id] == at]) for at in times]


def test_a_window_closes_after_100_ms() -> None:
    assert batches(0.0, 0.05, 0.099, 0.102) == [(WINDOW, [0, 1, 2]), (0.202, [3])]


def test_a_window_closes_when_8_wait() -> None:
    assert batches(*[0.005] * 9) == [(0.005, list(range(8))), (0.105, [8])]


def test_no_batch_is_larger_than_max_batch() -> None:
    assert batches(*[0.0] * 5, max_batch=3) == [(0.0, [0, 1, 2]), (0.1, [3, 4])]


def test_a_burst_closes_its_window_after_10_ms() -> None:
    assert batches(0.0, 0.002, 0.004, 0.006) == [(BURST_WINDOW, [0, 1, 2, 3])]
    assert batches(0.0, 0.002, 0.004) == [(WINDOW, [0, 1, 2])]
    # The fourth makes it a burst, and the oldest has waited longer than that already.
    assert batches(0.0, 0.002, 0.004, 0.05) == [(0.05, [0, 1, 2, 3])]


def test_nobody_joins_until_all_have_ended() -> None:
    (_, first), (began, second) = batches(0.0, *[0.15] * 8, n=100)
    assert (first, second) == ([0], list(range(1, 9)))
    assert began == pytest.approx(WINDOW + 0.1)


def test_a_batch_whose_prompts_fill_several_steps_is_one_batch() -> None:
    """Those that come meanwhile wait, and those of it do not."""
    begun = batches(*[0.0] * 8, 0.001, 0.001, token_budget=40, n=30)
    assert len(begun) > 3
    assert [id for at, ids in begun[:-1] for id in ids if at < 0.02] == list(range(8))
    assert begun[-1][1] == [8, 9]


def test_one_that_is_cancelled_makes_no_room_in_a_batch() -> None:
    h = Batched(n_pages=100, max_batch=16, token_budget=40, batching="window", tick=0.001)
    for id in range(10):
        h.submit(order(id, max_tokens=30))
    h.step()
    h.scheduler.cancel(5)
    h.run()
    assert [e.end for e in h.news[5]] == [End.CANCELLED]
    assert h.tokens(9) == expected(order(9, max_tokens=30))


def test_one_by_one() -> None:
    h = Harness(n_pages=100, max_batch=16, token_budget=64, batching="serial")
    for id in range(4):
        h.submit(order(id))
    h.run()
    ran = [work.seq.spec.id for step in h.steps for work in step.works]
    assert ran == sorted(ran)
    assert max(len(step.works) for step in h.steps) == 1


@pytest.mark.parametrize("batching", MODES)
def test_the_next_ones_are_there_when_some_end(batching: str) -> None:
    """A front that sends what the credits allow: every batch but the last is full."""
    h = Harness(n_pages=1000, max_batch=16, token_budget=512, batching=batching, tick=0.001)
    left = [order(id, max_tokens=5 + id % 7) for id in range(80)]
    sizes: list[int] = []
    most = 0
    while left or h.scheduler.has_work:
        for _ in range(min(len(left), max(0, h.scheduler.credits() + LOOK_AHEAD))):
            h.submit(left.pop(0))
        empty = not h.scheduler.running
        h.step()
        most = max(most, len(h.scheduler.waiting))
        if empty:
            sizes.append(len(h.steps[-1].works))
    slots = {"continuous": 16, "window": 8, "serial": 1}[batching]
    assert h.scheduler.policy.slots == slots
    assert most <= {"continuous": LOOK_AHEAD, "window": 8 + LOOK_AHEAD, "serial": LOOK_AHEAD}[batching]
    assert set(sizes) == {slots}
    assert len(sizes) == {"continuous": 1, "window": 10, "serial": 80}[batching]


def test_credits_of_each_mode() -> None:
    for batching, idle, one_runs in (("continuous", 16, 15), ("window", 8, 8), ("serial", 1, 0)):
        h = Harness(n_pages=500, max_batch=16, token_budget=64, batching=batching, tick=0.2)
        assert h.scheduler.credits() == idle
        h.submit(order(1))
        h.step()
        h.step()
        assert [s.spec.id for s in h.scheduler.running] == [1]
        assert h.scheduler.credits() == one_runs


def test_seconds_until_there_is_something_to_do() -> None:
    h = Harness(n_pages=100, max_batch=16, token_budget=64, batching="window", tick=0.03)
    scheduler = h.scheduler
    assert scheduler.due(h.now) == math.inf
    h.submit(order(1))
    assert scheduler.due(h.now) == pytest.approx(WINDOW)
    assert not h.step().works
    assert scheduler.due(h.now) == pytest.approx(WINDOW - 0.03)
    scheduler.cancel(1)
    assert scheduler.due(h.now) == 0  # that is news
    h.step()
    assert scheduler.due(h.now) == math.inf
    for id in range(2, 2 + WINDOW_BATCH):
        h.submit(order(id))
    assert scheduler.due(h.now) == 0
    h.step()
    h.submit(order(50))
    assert scheduler.due(h.now) == 0  # for those that run
    for batching in ("continuous", "serial"):
        h = Harness(n_pages=100, max_batch=16, token_budget=64, batching=batching)
        h.submit(order(1))
        assert h.scheduler.due(h.now) == 0


@pytest.mark.parametrize("batching", MODES)
def test_law_9_the_mode_changes_no_answer(batching: str) -> None:
    """Also with a pool that is too small for all of them at once."""
    for n_pages in (400, 24):
        h = Harness(n_pages=n_pages, max_batch=8, token_budget=64, batching=batching, chunk=16, tick=0.02)
        orders = [order(id, n_prompt=20 + 9 * id, max_tokens=40) for id in range(20)]
        for spec in orders:
            h.submit(spec)
        h.run()
        for spec in orders:
            assert h.tokens(spec.id) == expected(spec)


@pytest.mark.parametrize("batching", MODES)
def test_the_library_waits_out_the_window(batching: str) -> None:
    profile = profile_of(EngineSettings(engine="simulated:cpu"))
    assert profile
    clock = VirtualClock()
    engine = simulated_engine(profile, clock, clock.sleep, batching=batching)
    news = engine.generate([order(id) for id in range(11)])
    assert all(emits[-1].end is End.LENGTH for emits in news.values())
    assert engine.scheduler.policy.slots == policy(batching, 16).slots
    begin = clock.now
    engine.generate([order(20, max_tokens=1)])
    assert (clock.now - begin >= WINDOW) is (batching == "window")


def test_a_window_that_is_waited_for_makes_no_flood_of_frames() -> None:
    """Through the child's own loop, in real time; what is sent meanwhile is read at once."""
    profile = profile_of(EngineSettings(engine="simulated:cpu"))
    assert profile
    engine = simulated_engine(profile, time.monotonic, time.sleep, batching="window")
    ours, theirs = socket.socketpair()

    def child() -> None:
        with pytest.raises(Gone):
            serve(engine, Link(theirs))

    thread = threading.Thread(target=child)
    thread.start()
    try:
        ours.settimeout(20)
        begin = time.monotonic()
        ours.sendall(pack(Submit(order(1, max_tokens=1))))
        unpacker = Unpacker()
        frames: list[Frame] = []
        emits: list[Emit] = []
        while not emits:
            for body in unpacker.feed(ours.recv(1 << 16)):
                message = to_front(body)
                assert isinstance(message, Frame)
                frames.append(message)
                emits += message.emits
        assert time.monotonic() - begin > 0.9 * WINDOW
        assert len(frames) <= 3
    finally:
        ours.close()
        thread.join(20)
        theirs.close()
    assert not thread.is_alive()


class SerialHistories(Histories):
    batching = "serial"


class WindowHistories(Histories):
    batching = "window"
    tick = 0.03
    harness = Batched


TestLawsOneByOne = SerialHistories.TestCase
TestLawsInBatches = WindowHistories.TestCase
TestLawsOneByOne.settings = TestLawsInBatches.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
