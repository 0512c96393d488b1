"""When the first token will come: what it is reckoned from, and how near it comes to what an engine does."""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.admission.estimate import Density, Factor, Lengths, Meter, Outlook
from forebay.contract import Load, Pace
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import GenSpec
from forebay.engine.step import Drawn

PACE = Pace(base=0.004, decode=0.002, prefill=0.001, chunk=50)


def outlook(
    rests: list[int] | None = None, *, slots: int = 4, free: int = 0, owed: int = 0, length: float = 100.0
) -> Outlook:
    return Outlook(PACE, slots, free, sorted([10, 20, 30, 40] if rests is None else rests), owed, length)


# ---- lengths of answers


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 600), max_size=400))
def test_lengths_are_those_of_the_last_256_answers(tokens: list[int]) -> None:
    lengths = Lengths()
    for count in tokens:
        lengths.add(count)
    last = tokens[-256:]
    assert lengths.mean == (statistics.mean(last) if last else None)
    if len(last) < 8:
        assert lengths.usual is None
        assert lengths.expected(10**6) == 128
        return
    usual = lengths.usual
    assert usual is not None
    assert usual in last
    assert sum(count <= usual for count in last) >= 0.75 * len(last)
    assert sum(count < usual for count in last) <= 0.75 * len(last)
    assert lengths.expected(10**6) == usual


def test_what_was_long_ago_is_forgotten() -> None:
    lengths = Lengths()
    for count in [500] * 100 + [20] * 256:
        lengths.add(count)
    assert (lengths.usual, lengths.mean) == (20, 20.0)
    lengths.add(276)
    assert (lengths.usual, lengths.mean) == (20, 21.0)


def test_three_of_four_are_no_longer_than_usual() -> None:
    lengths = Lengths()
    for count in range(1, 101):
        lengths.add(count)
    assert lengths.usual == 76


def test_an_answer_is_expected_to_keep_to_its_limit() -> None:
    lengths = Lengths()
    assert [lengths.expected(most) for most in (0, 1, 50, 128, 1000)] == [1, 1, 50, 128, 128]
    for _ in range(8):
        lengths.add(40)
    assert [lengths.expected(most) for most in (0, 1, 39, 41)] == [1, 1, 39, 40]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 8).map(lambda power: 2**power)), max_size=60))
def test_nine_of_ten_prompts_have_at_least_so_many_tokens_for_their_size(prompts: list[tuple[int, int]]) -> None:
    density = Density()
    for tokens, size in prompts:
        density.add(tokens, size)
        density.add(10**6, 0)  # a size that says nothing
    least = density.least(2**20)
    if len(prompts) < 8:
        assert least == 1
        return
    assert least == 1 or sum(tokens * 2**20 // size < least for tokens, size in prompts) <= 0.1 * len(prompts)
    assert least == 1 or any(tokens * 2**20 // size == least for tokens, size in prompts)
    assert density.least(0) == 1


def test_sizes_of_long_ago_are_forgotten() -> None:
    density = Density()
    for tokens in [10] * 100 + [40] * 256:
        density.add(tokens, 100)
    assert density.least(1000) == 400


# ---- rates


@pytest.mark.parametrize("rate", [0.5, 7.0, 300.0])
def test_a_meter_tells_the_rate_of_steady_arrivals(rate: float) -> None:
    meter = Meter(50.0)
    assert meter.rate(50.0) == 0.0
    for number in range(1, round(60 * rate) + 1):
        now = 50.0 + number / rate
        meter.add(1, now)
        if number / rate > 4:  # from the first seconds on
            assert meter.rate(now) == pytest.approx(rate, rel=0.3 if rate < 1 else 0.1)
    steady = meter.rate(110.0)
    assert steady == pytest.approx(rate, rel=0.15 if rate < 1 else 0.1)
    assert meter.rate(120.0) == pytest.approx(steady / math.e, rel=0.01)  # ten seconds of nothing
    assert meter.rate(300.0) < rate / 1000


def test_a_young_meter_does_not_take_the_first_arrival_for_a_rate() -> None:
    meter = Meter(0.0)
    meter.add(1, 0.001)
    assert meter.rate(0.002) == pytest.approx(1.0, rel=0.01)


def test_a_meter_adds_up_amounts() -> None:
    one, other = Meter(0.0), Meter(0.0)
    for tick in range(1, 100):
        one.add(3.5, tick / 2)
        for _ in range(7):
            other.add(0.5, tick / 2)
    assert one.rate(50.0) == pytest.approx(other.rate(50.0)) == pytest.approx(7.0, rel=0.1)


# ---- the factor


class Lessons:
    """A factor that learns once a second."""

    def __init__(self) -> None:
        self.factor = Factor()
        self.now = 100.0

    def learn(self, predicted: float, observed: float, times: int = 1) -> Factor:
        for _ in range(times):
            self.now += 1.0
            self.factor.learn(predicted, observed, self.now)
        return self.factor


@pytest.mark.parametrize("change", [3.0, 1 / 3])
def test_the_factor_follows_a_threefold_change_within_30_observations(change: float) -> None:
    lessons = Lessons()
    factor = lessons.learn(2.0, 2.0, 50)
    assert factor.value == pytest.approx(1.0)
    narrow = factor.spread
    lessons.learn(4.0, 4.0 * change, 5)
    assert factor.spread > 1.2 * narrow  # it is not sure of itself meanwhile
    lessons.learn(4.0, 4.0 * change, 25)
    assert abs(math.log(factor.value / change)) < math.log(1.1)
    lessons.learn(4.0, 4.0 * change, 60)
    assert factor.value == pytest.approx(change, rel=0.01)
    assert 1.0 < factor.spread < 1.2


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.6])
def test_nine_of_ten_are_within_the_spread(sigma: float) -> None:
    choose = random.Random(5)
    lessons = Lessons()
    factor = lessons.factor
    over = []
    for number in range(3000):
        observed = 3.0 * choose.lognormvariate(0.4, sigma)
        if number > 200:
            over.append(observed > 3.0 * factor.value * factor.spread)
        lessons.learn(3.0, observed)
    assert 0.02 < statistics.mean(over) < 0.13


def test_one_observation_moves_it_little_however_far_it_is_off() -> None:
    for observed in (1e-9, 0.0, 1e9):
        assert 0.85 < Lessons().learn(1.0, observed).value < 1.16
    lessons = Lessons()
    assert lessons.learn(1.0, 1e9, 1000).value == pytest.approx(16.0)
    assert lessons.learn(1e9, 1.0, 1000).value == pytest.approx(1 / 16)


def test_what_was_never_observed_is_believed_with_caution() -> None:
    assert Factor().value == 1.0
    assert 1.2 < Factor().spread < 1.6


def test_short_times_teach_less_and_the_shortest_nothing() -> None:
    long, short = Lessons().learn(1.0, 2.0, 10), Lessons().learn(0.1, 0.2, 10)
    assert 1.05 < short.value < long.value < 2.0
    assert Lessons().learn(0.001, 0.049, 10).value == 1.0


def test_many_at_once_teach_no_more_than_one() -> None:
    """Hundreds that were let in by one prediction are off together."""
    one, many = Factor(), Factor()
    for second in range(20):
        for number in range(100):
            many.learn(2.0, 6.0, 100.0 + second + number / 1e5)
        one.learn(2.0, 6.0, 100.0 + second)
    assert many.value == pytest.approx(one.value, rel=0.05)


# ---- the outlook


def test_nothing_is_known_of_an_engine_that_was_not_measured() -> None:
    assert Outlook.of(Load(ready=True, state="ready", slots=4), [], 10.0) is None
    assert Outlook.of(Load(ready=True, state="ready", pace=PACE), [], 10.0) is None


def test_free_is_what_both_slots_and_memory_have_room_for() -> None:
    def free(running: int, waiting: int, credits: int) -> int:
        load = Load(
            ready=True, state="ready", running=running, waiting=waiting, credits=credits, slots=8, owed=7, pace=PACE
        )
        found = Outlook.of(load, [1, 2, 3], 0.5)
        assert found is not None
        assert (list(found.rests), found.owed, found.length) == ([1, 2, 3], 7, 1.0)
        return found.free

    assert free(3, 0, 7) == 5
    assert free(3, 1, 7) == 4
    assert free(3, 0, 2) == 2
    assert free(8, 2, 0) == -2


def test_alone_and_idle() -> None:
    """A prompt is one step of an engine that does nothing else."""
    idle = outlook([], free=4)
    assert idle.first_token(0, 0, 300) == pytest.approx(0.004 + 0.3)


def test_beside_answers_a_prompt_comes_in_chunks() -> None:
    busy = outlook([10, 20], free=2)
    step = 0.004 + 2 * 0.002
    # Six chunks of 50, each in a step, and half of the step that has begun.
    assert busy.first_token(0, 0, 300) == pytest.approx(step / 2 + 6 * step + 0.3)
    # What the engine owes is computed before.
    owing = outlook([10, 20], free=2, owed=100)
    assert owing.first_token(0, 0, 300) == pytest.approx((step + 0.05) / 2 + 8 * step + 0.4)


def test_a_place_comes_free_when_an_answer_ends() -> None:
    full = outlook()
    step = 0.004 + 4 * 0.002

    def steps(places: int) -> float:
        return (full.first_token(places, 0, 1) - step / 2 - 0.001) / step - 1

    assert [steps(places) for places in range(6)] == pytest.approx([10, 20, 30, 40, 110, 120])
    ahead = outlook(free=-2)  # two wait in the engine already
    assert ahead.first_token(0, 0, 1) == pytest.approx(full.first_token(2, 0, 1))


def test_one_whose_turn_has_come_has_a_step_and_a_prompt_before_it() -> None:
    full = outlook()
    step = 0.004 + 4 * 0.002
    assert full.granted(300) == pytest.approx(7.5 * step + 0.375)
    assert full.granted(10) == pytest.approx(2.5 * step + 0.085)


def test_who_finds_a_place_waits_for_no_answer() -> None:
    """Also where that place is the last, and where those ahead have places, too."""
    roomy = outlook([1000, 1000], slots=5, free=3)
    assert roomy.first_token(0, 0, 1) == roomy.first_token(2, 0, 1) < 0.1
    assert roomy.first_token(3, 0, 1) > 1000 * 0.004


def test_prompts_ahead_count_where_they_take_longer_than_the_answers() -> None:
    full = outlook()
    step = 0.004 + 4 * 0.002
    assert full.first_token(0, 500, 1) == pytest.approx(step / 2 + (10 + 1) * step + 0.501)  # ten chunks: as long
    assert full.first_token(0, 5000, 1) == pytest.approx(step / 2 + (100 + 1) * step + 5.001)


Tokens = st.integers(0, 5000)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 8), st.data(), st.integers(-3, 8), Tokens, st.floats(1, 500), st.integers(0, 40), Tokens, Tokens)
def test_more_ahead_never_means_sooner(
    slots: int, data: st.DataObject, free: int, owed: int, length: float, places: int, queued: int, prompt: int
) -> None:
    """Nor do more prompts, more that is owed or a longer prompt. (Rests differ by no more than an answer here.)"""
    rests = data.draw(st.lists(st.integers(1, 1 + int(length)), max_size=slots))
    free = min(free, slots - len(rests))

    def first(places: int, queued: int, prompt: int, owed: int = owed, free: int = free) -> float:
        return Outlook(PACE, slots, free, sorted(rests), owed, length).first_token(places, queued, prompt)

    now = first(places, queued, prompt) - 1e-9
    assert now > 0
    more = data.draw(st.integers(1, 600))
    assert first(places, queued + more, prompt) >= now
    assert first(places, queued, prompt + more) >= now - PACE.base  # it may share a step with those ahead
    assert first(places, queued, prompt, owed=owed + more) >= now
    assert first(places + 1, queued, prompt) >= now
    assert first(places + 1, queued + more, prompt) >= now
    assert first(places, queued, prompt, free=free - 1) >= now


def test_an_answer_that_is_much_longer_than_usual_does_not_bring_others_forward() -> None:
    long = outlook([1, 1000], slots=2, length=50.0)
    times = [long.first_token(places, 0, 1) for places in range(8)]
    assert times == sorted(times)


def test_places_come_free_again_while_a_long_answer_runs() -> None:
    """The other slot is free after 1, 51, 101, ... steps: nobody has to wait for 1000."""
    long = outlook([1, 1000], slots=2, length=50.0)
    step = 0.004 + 2 * 0.002
    assert long.first_token(1, 0, 1) == pytest.approx(step / 2 + (51 + 1) * step + 0.001)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 400), max_size=8),
    st.integers(8, 2400).map(lambda eighths: eighths / 8),
    st.integers(1, 60),
)
def test_places_come_free_as_if_each_end_began_another_answer(rests: list[int], length: float, ends: int) -> None:
    """Against answers that are let end one by one."""
    free = [float(rest) for rest in rests or [1]]
    heapq.heapify(free)
    for _ in range(ends - 1):
        heapq.heapreplace(free, free[0] + length)
    assert outlook(rests, slots=8, length=length)._steps(ends) == pytest.approx(free[0])


def test_work_is_a_part_of_the_engine() -> None:
    """As many requests as its rate says take all of its time."""
    full = outlook(slots=4)
    seconds = 100 * (0.004 + 4 * 0.002) + 4 * 0.3  # four answers of 100 tokens, and their prompts
    assert 4 * full.work(300, 100) == pytest.approx(seconds)


# ---- against an engine


class Engine:
    """The scheduler, with a stand-in for the model that takes the time that Pace says. A queue is before it, first come
    first served, which sends what there are credits for, and two more."""

    def __init__(self, slots: int, pace: Pace) -> None:
        self.slots, self.pace = slots, pace
        self.scheduler = Scheduler(n_pages=20_000, max_batch=slots, token_budget=512, max_context=8192)
        self.now = 0.0
        self.line: deque[GenSpec] = deque()
        self.first: dict[int, float] = {}
        self.specs: dict[int, GenSpec] = {}
        self.tokens: dict[int, int] = {}
        self.came = 0

    def ask(self, prompt: int, most: int) -> int:
        self.came += 1
        id = self.came
        self.specs[id] = GenSpec(id, [1000 * id + at for at in range(prompt)], most)
        self.line.append(self.specs[id])
        return id

    def send(self) -> None:
        waiting = self.scheduler.credits() + 2
        while self.line and waiting > 0:
            self.scheduler.submit(self.line.popleft())
            waiting -= 1

    def step(self) -> None:
        self.send()
        step = self.scheduler.plan(self.now, self.pace.chunk)
        prefill = step.n_tokens - step.n_decodes
        self.now += self.pace.base + self.pace.decode * step.n_decodes + self.pace.prefill * prefill
        for emit in self.scheduler.commit(step, Drawn([5] * len(step.works))):
            self.first.setdefault(emit.id, self.now)
            self.tokens[emit.id] = self.tokens.get(emit.id, 0) + len(emit.tokens)

    def load(self) -> Load:
        return Load(
            ready=True,
            state="ready",
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            credits=self.scheduler.credits() + 2,
            slots=self.slots,
            owed=self.scheduler.owed,
            pace=self.pace,
        )

    def rests(self) -> list[int]:
        here = [*self.scheduler.running, *self.scheduler.waiting]
        return [self.specs[seq.spec.id].max_tokens - self.tokens.get(seq.spec.id, 0) for seq in here]

    def until_first(self, id: int) -> float:
        begun = self.now
        while id not in self.first:
            self.step()
        return self.first[id] - begun


def test_predicted_and_observed_first_tokens() -> None:
    """From random states of an engine, at any load and under a queue of any length: half are off by less than a
    quarter, nine of ten by less than a factor of two."""
    choose = random.Random(11)
    ratios = []
    for _ in range(120):
        slots = choose.choice([2, 4, 8, 16])
        pace = Pace(choose.uniform(0.002, 0.02), choose.uniform(0.0005, 0.002), choose.uniform(0.0002, 0.001), 0)
        beside = pace.base + pace.decode * (slots - 1)
        chunk = max(8, int((max(0.075, 2.5 * beside) - beside) / pace.prefill))
        pace = Pace(pace.base, pace.decode, pace.prefill, min(chunk, 512 - slots + 1))
        engine = Engine(slots, pace)
        size = choose.uniform(50, 600)

        def ask(engine: Engine = engine, size: float = size) -> int:
            prompt = max(4, int(choose.lognormvariate(math.log(size), 0.5)))
            return engine.ask(prompt, max(2, int(choose.lognormvariate(math.log(50), 0.5))))

        crowd = choose.randrange(1, 2 * slots + 2)
        for _ in range(crowd):
            ask()
        for _ in range(choose.randrange(1, 120)):
            if engine.scheduler.has_work or engine.line:
                engine.step()
            elif crowd:
                ask()
            if choose.random() < 0.3 and len(engine.line) < crowd:
                ask()
        queued = sum(len(spec.ids) for spec in engine.line)
        ahead = Outlook.of(engine.load(), engine.rests(), 57.0)
        assert ahead is not None
        places = len(engine.line)
        guest = ask()
        predicted = ahead.first_token(places, queued, len(engine.specs[guest].ids))
        ratios.append(math.log(engine.until_first(guest) / predicted))
    off = sorted(map(abs, ratios))
    assert off[60] < math.log(1.25)
    assert off[108] < math.log(2)
    assert abs(statistics.median(ratios)) < math.log(1.25)
