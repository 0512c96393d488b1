"""How long steps take, learned from a few and followed: the machine changes, hiccups, and contexts grow."""

import pytest

from forebay.engine.pace import LEAST, PROBE, STRETCH, Pace, Timed

#: Measured on the demo model: beside 15 answers, and alone. Milliseconds.
MEASURED = [(15, 0, 30), (15, 16, 47), (15, 64, 102), (15, 128, 163), (15, 512, 619), (0, 16, 19), (0, 64, 62)]
POINTS = [Timed(decodes, prefill, ms / 1000) for decodes, prefill, ms in [*MEASURED, (0, 512, 518)]]


def engine(decodes: int, prefill: int, slower: float = 1.0) -> float:
    return slower * (0.0035 + 0.00185 * decodes + 0.001 * prefill)


def test_the_shape_fits_what_was_measured() -> None:
    pace = Pace(POINTS)
    for decodes, prefill, seconds in POINTS:
        assert pace.seconds(decodes, prefill) == pytest.approx(seconds, rel=0.12)


def test_a_point_that_was_held_up_hardly_bends_the_shape() -> None:
    pace = Pace([Timed(1, 0, 20 * engine(1, 0)), *(Timed(n, 0, engine(n, 0)) for n in (2, 4, 8, 16)), *POINTS])
    assert pace.seconds(15) == pytest.approx(0.03, rel=0.15)
    assert pace.seconds(15, 64) == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("n", range(1, len(POINTS)))
def test_few_points_are_enough(n: int) -> None:
    """Nothing is negative or for nothing, whatever is known."""
    for points in (POINTS[:n], POINTS[::-1][:n]):
        pace = Pace(points)
        assert pace.seconds(0) > 0
        assert pace.seconds(16, 100) >= pace.seconds(16) >= pace.seconds(1) > 0
        assert LEAST <= pace.chunk(15, 0.075) < 10**6
        for _ in range(12):
            for decodes, prefill in ((15, 0), (15, 100), (0, 512)):
                pace.observe(decodes, prefill, engine(decodes, prefill))
        assert pace.seconds(15, 100) == pytest.approx(engine(15, 100), rel=0.15)


def test_without_a_warm_up_the_first_steps_tell() -> None:
    pace = Pace()
    assert pace.told(16, 0.075, 512) is None
    pace.observe(15, 0, 0.3)
    assert pace.seconds(15) == pytest.approx(0.3)
    pace.observe(15, 100, 1.3)
    assert pace.seconds(15, 100) == pytest.approx(1.3)


@pytest.mark.parametrize("slower", [3.0, 1 / 3])
def test_a_threefold_change_is_followed_within_20_steps(slower: float) -> None:
    pace = Pace(POINTS)
    for _ in range(10):
        pace.observe(15, 0, engine(15, 0, slower))
        pace.observe(15, 48, engine(15, 48, slower))
    assert pace.seconds(15) == pytest.approx(engine(15, 0, slower), rel=0.15)
    assert pace.seconds(15, 48) == pytest.approx(engine(15, 48, slower), rel=0.15)


def test_prompts_behind_long_contexts_cost_more_and_answers_do_not() -> None:
    pace = Pace(POINTS)
    for _ in range(20):
        chunk = pace.chunk(15, 0.075)
        pace.observe(15, chunk, engine(15, 4 * chunk))
    assert pace.seconds(15) == pytest.approx(engine(15, 0), rel=0.05)
    assert engine(15, 4 * pace.chunk(15, 0.075)) == pytest.approx(0.075, rel=0.1)


def test_a_single_hiccup_throws_nothing_off() -> None:
    for decodes, prefill in ((15, 0), (15, 48), (0, 512)):
        pace = Pace(POINTS)
        before = pace.seconds(15, 48)
        pace.observe(decodes, prefill, 20 * engine(decodes, prefill))
        assert pace.seconds(15, 48) < 1.3 * before
        for _ in range(8):
            pace.observe(15, 0, engine(15, 0))
            pace.observe(15, 48, engine(15, 48))
        assert pace.seconds(15, 48) == pytest.approx(engine(15, 48), rel=0.1)


def test_a_few_tokens_beside_many_answers_tell_little_of_prompts() -> None:
    """What is left for them is mostly the noise of the rest."""
    pace = Pace(POINTS)
    before = pace.seconds(0, 512)
    for _ in range(5):
        pace.observe(15, 2, engine(15, 2) + 0.006)
    assert pace.seconds(0, 512) == pytest.approx(before, rel=0.25)


def test_a_chunk_fills_the_gap_that_is_allowed() -> None:
    pace = Pace(POINTS)
    # One answer alone is far quicker than the gap that nobody minds.
    assert pace.seconds(1, pace.chunk(1, 0.075)) == pytest.approx(0.075, rel=0.03)
    # Answers that are slow by themselves take 2.5 times as long.
    assert pace.seconds(100, pace.chunk(100, 0.075)) == pytest.approx(STRETCH * pace.seconds(100), rel=0.03)
    for _ in range(60):
        pace.observe(15, 32, 3.0)
    assert pace.chunk(15, 0.075) == LEAST


def test_a_clock_that_stands_still_tells_nothing() -> None:
    pace = Pace(POINTS)
    before = pace.seconds(15, 48)
    for seconds in (0.0, -1.0):
        pace.observe(15, 48, seconds)
        pace.observe(0, 0, 1.0)
    assert pace.seconds(15, 48) == before


def test_a_step_for_answers_alone_is_due_after_many_with_prompts() -> None:
    pace = Pace(POINTS)
    for _ in range(PROBE):
        assert not pace.probe()
        pace.observe(15, 48, engine(15, 48))
    assert pace.probe()
    assert not pace.probe()  # said once
    for decodes, prefill in ((15, 0), (0, 512)):
        for _ in range(PROBE - 1):
            pace.observe(15, 48, engine(15, 48))
        pace.observe(decodes, prefill, engine(decodes, prefill))
        assert not pace.probe()


def test_after_a_surprise_answers_are_looked_at_until_they_are_known() -> None:
    """Half of the steps at most; and what is slow for a moment costs one."""
    pace = Pace(POINTS)
    pace.observe(15, 48, engine(15, 48, 5.0))
    assert pace.probe()
    pace.observe(15, 0, engine(15, 0))
    pace.observe(15, 48, engine(15, 48))
    assert not pace.probe()
    probes = 0
    for _ in range(20):
        mixed = not pace.probe()
        pace.observe(15, 48 * mixed, engine(15, 48 * mixed, 1 / 3))
        probes += not mixed
    assert 5 <= probes <= 10
    assert pace.seconds(15) == pytest.approx(engine(15, 0, 1 / 3), rel=0.3)


def test_what_the_front_is_told() -> None:
    pace = Pace(POINTS)
    base, decode, prefill, chunk = pace.told(16, 0.075, 512) or (0.0, 0.0, 0.0, 0)
    assert base + 15 * decode + chunk * prefill == pytest.approx(0.075, rel=0.05)
    assert (pace.told(16, 0.0, 512) or ())[3] == 512 - 15  # no limit
    assert (pace.told(1, 0.075, 512) or ())[3] == 512  # nothing runs beside it
    assert (pace.told(16, 0.075, 20) or ())[3] == 5
