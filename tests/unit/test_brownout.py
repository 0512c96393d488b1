"""Brownout: a step at a time, by the shortest wait of a while."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.admission.brownout import DOWN, UP, Brownout, Level

TARGET = 1.0
TICK = 0.25  # between two looks; a binary fraction, so that sums are exact


def held(brownout: Brownout, begin: float, seconds: float, oldest: float | None, waited: float | None = None) -> float:
    """Look every tick from ``begin`` on, for so long, while somebody gets a turn after ``waited`` before each look."""
    for tick in range(round(seconds / TICK)):
        if waited is not None:
            brownout.waited(waited)
        brownout.look(begin + (tick + 1) * TICK, oldest)
    return begin + seconds


def at(level: Level) -> tuple[Brownout, float]:
    """One that was brought to ``level``, and the time, at which a while begins."""
    brownout = Brownout(TARGET)
    brownout.look(0.0, None)
    now = held(brownout, 0.0, DOWN, None)
    now = held(brownout, now, UP * level, 2.0)
    assert brownout.level is level
    return brownout, now


def test_rises_a_step_in_every_while_of_long_waits_and_no_further_than_the_last() -> None:
    brownout = Brownout(TARGET)
    brownout.look(0.0, 5.0)
    seen = [brownout.look((tick + 1) * TICK, 5.0) for tick in range(round(7 * UP / TICK))]
    assert seen == [min(int((tick + 1) * TICK / UP), 5) for tick in range(len(seen))]
    assert brownout.level is Level.FEW_NEW


def test_nobody_is_let_in_and_that_is_the_worst_of_all_queues() -> None:
    brownout, now = at(Level.NORMAL)
    held(brownout, now, UP, 1.01)  # no turn is given at all
    assert brownout.level is Level.NO_SPECULATION


def test_the_shortest_wait_decides_not_the_longest() -> None:
    brownout, now = at(Level.NORMAL)
    for _ in range(20):
        brownout.waited(0.6)  # one in every while, among many
        now = held(brownout, now, UP, 30.0, waited=30.0)
        assert brownout.level is Level.NORMAL


def test_a_wait_at_any_moment_of_the_while_counts() -> None:
    for moment in range(round(UP / TICK)):
        brownout, now = at(Level.NORMAL)
        for tick in range(round(UP / TICK)):
            if tick == moment:
                brownout.waited(0.9)
            now += TICK
            brownout.look(now, 20.0)
        assert brownout.level is Level.NORMAL


def test_an_empty_queue_at_any_moment_of_the_while_counts() -> None:
    brownout, now = at(Level.NORMAL)
    for tick in range(round(1.9 / TICK)):
        now += TICK
        brownout.look(now, None if tick == 1 else 20.0)
    assert brownout.level is Level.NORMAL


def test_between_half_the_target_and_the_target_it_stays() -> None:
    for level in Level:
        for wait in (0.5, 0.75, 1.0):
            brownout, now = at(level)
            held(brownout, now, 10 * UP, oldest=3.0, waited=wait)
            assert brownout.level is level, wait
            brownout, now = at(level)
            held(brownout, now, 10 * UP, oldest=wait)
            assert brownout.level is level, wait


def test_comes_down_step_by_step_and_faster_than_it_rose() -> None:
    brownout, now = at(Level.FEW_NEW)
    seen = []
    for _ in range(round(6 * DOWN / TICK)):
        brownout.waited(0.49)
        now += TICK
        seen.append(int(brownout.look(now, 3.0)))
    assert seen == [5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0, 0]


def test_nobody_waits_and_so_it_comes_down() -> None:
    brownout, now = at(Level.FEW_NEW)
    held(brownout, now, 5 * DOWN, None)
    assert brownout.level is Level.NORMAL


def test_what_was_before_the_while_does_not_count() -> None:
    brownout, now = at(Level.NORMAL)
    brownout.waited(0.1)
    now = held(brownout, now, DOWN, 20.0)  # ends the while of the short wait
    held(brownout, now, UP, 20.0)
    assert brownout.level is Level.NO_SPECULATION


Event = tuple[float, list[float], float | None]
Events = st.lists(
    st.tuples(
        st.sampled_from([0.125, 0.25, 0.5]),
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 9.0]), max_size=2),
        st.sampled_from([None, 0.25, 0.5, 0.75, 1.0, 1.25, 9.0]),
    ),
    max_size=120,
)
Loaded = st.lists(
    st.tuples(st.sampled_from([0.25, 0.5]), st.lists(st.sampled_from([1.25, 9.0]), max_size=2), st.just(9.0)),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(st.tuples(Loaded, Events, Loaded, Events))
def test_every_step_has_a_reason(parts: tuple[list[Event], ...]) -> None:
    """Up: all waits of the last two seconds were too long. Down: one of a while was short. Never two at once."""
    brownout = Brownout(TARGET)
    now, changed, level = 0.0, -inf, 0
    waits: list[tuple[float, float]] = []
    brownout.look(now, None)
    for span, turns, oldest in (event for part in parts for event in part):
        now += span
        for wait in turns:
            brownout.waited(wait)
        waits += [(now, wait) for wait in turns]
        if oldest is None:
            waits.append((now, 0.0))
        new = int(brownout.look(now, oldest))
        assert new in range(6)
        recent = [wait for when, wait in waits if when > now - UP]
        if new > level:
            assert new == level + 1
            assert now - changed >= UP
            assert min(recent, default=inf) > TARGET
            assert oldest is not None
            assert oldest > TARGET
        if new < level:
            assert new == level - 1
            assert now - changed >= DOWN
            whiles = [wait for when, wait in waits if when > now - UP - 0.5]
            assert min([*whiles, oldest or 0.0]) < TARGET / 2
        if new != level:
            changed, level = now, new
    assert brownout.level == level


def test_a_target_of_its_own() -> None:
    brownout = Brownout(15.0)
    brownout.look(0.0, 14.0)
    assert held(brownout, 0.0, 3 * UP, 14.0) == pytest.approx(6.0)
    assert brownout.level is Level.NORMAL
    held(brownout, 6.0, UP, 16.0)
    assert brownout.level is Level.NO_SPECULATION
