"""A long prompt among running chats: they wait for it no longer than for anything else (vLLM issue 54919)."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

from forebay.config import EngineSettings
from forebay.engine.loop import Engine
from forebay.engine.profile import profile_of
from forebay.engine.sequence import GenSpec
from forebay.engine.simulated import VirtualClock, simulated_engine

CHATS = range(1, 16)
LONG = 99


def cpu(max_gap: float, token_budget: int = 512) -> tuple[Engine, VirtualClock]:
    profile = profile_of(EngineSettings(engine="simulated:cpu"))
    assert profile is not None
    clock = VirtualClock()
    return simulated_engine(profile, clock, clock.sleep, max_gap=max_gap, token_budget=token_budget), clock


def chats(engine: Engine, max_tokens: int = 2000) -> None:
    """All of them answer, and nothing else is to do."""
    for id in CHATS:
        engine.submit(GenSpec(id, [id] * 30, max_tokens))
    for _ in range(150):
        engine.step()
    assert engine.scheduler.decoding == len(CHATS)


def gaps(engine: Engine, clock: VirtualClock, until: int) -> Iterator[float]:
    """Seconds between two tokens of each chat, while steps are made until ``until`` has its first."""
    last = dict.fromkeys(CHATS, clock.now)
    while True:
        news = {emit.id: emit for emit in engine.step().emits if emit.tokens}
        for id in set(news) & set(last):
            yield clock.now - last[id]
            last[id] = clock.now
        if until in news:
            return


@pytest.mark.parametrize(("max_gap", "bound"), [(0.075, True), (0.0, False)])
def test_15_chats_go_on_while_a_prompt_of_6000_tokens_is_computed(max_gap: float, bound: bool) -> None:
    engine, clock = cpu(max_gap)
    chats(engine)
    begin = clock.now
    engine.step()
    usual = clock.now - begin
    engine.submit(GenSpec(LONG, [7] * 6000, 5))
    worst = max(gaps(engine, clock, LONG))
    assert (worst < 3 * usual) is bound, worst / usual
    if not bound:
        assert worst > 10 * usual


def test_an_engine_that_becomes_slower_or_faster_is_followed() -> None:
    engine, clock = cpu(0.075)
    chats(engine)
    engine.submit(GenSpec(LONG, [7] * 7000, 5))
    seen = defaultdict(list)
    for slower in (1.0, 3.0, 1.0, 3.0, 1.0):
        engine.runner.slower = slower
        for step in range(40):
            begin = clock.now
            frame = engine.step()
            if step >= 20 and frame.owed:
                seen[slower].append(clock.now - begin)
    alone = engine.runner.profile.seconds(len(CHATS))
    assert min(len(steps) for steps in seen.values()) > 30
    assert max(seen[1.0]) < 3 * alone
    assert max(seen[3.0]) < 3 * 3 * alone


def test_under_prompts_without_end_it_is_still_known_what_answers_alone_take() -> None:
    """Where every step has both, an error about the answers' part would stay, and each step be as long as that allows.
    Here it becomes quicker so slowly that no step is a surprise."""
    engine, clock = cpu(0.01)  # so that it goes by the answers' part alone
    chats(engine)
    id = LONG
    worst = 0.0
    for step in range(900):
        if not engine.scheduler.waiting:
            id += 1
            engine.submit(GenSpec(id, [id % 1000, *[7] * 400], 1))
        engine.runner.slower = 4.0 - 3.0 * min(1.0, step / 600)
        begin = clock.now
        engine.step()
        if step >= 650:
            worst = max(worst, clock.now - begin)
    assert worst < 3 * engine.runner.profile.seconds(len(CHATS))


@pytest.mark.parametrize("token_budget", [16, 512])
def test_prompts_are_never_starved(token_budget: int) -> None:
    """However slow it is: a long prompt, and a short one behind it, are computed while the chats go on."""
    engine, clock = cpu(0.001, token_budget)
    chats(engine)
    engine.runner.slower = 50.0
    engine.submit(GenSpec(LONG, [7] * 500, 1))
    steps = sum(1 for _ in gaps(engine, clock, LONG)) / len(CHATS)
    assert steps < 700


def test_without_answers_a_prompt_takes_the_whole_budget() -> None:
    engine, _ = cpu(0.075)
    engine.submit(GenSpec(LONG, [7] * 2000, 5))
    assert [engine.step().step_tokens for _ in range(4)] == [512, 512, 512, 464]


def test_a_prompts_last_token_is_nobodys_answer() -> None:
    """A sequence that owes one token and has said nothing does not hold others up."""
    engine, _ = cpu(0.075)
    engine.submit(GenSpec(1, [7] * 513, 5))
    engine.submit(GenSpec(2, [8] * 600, 5))
    assert [engine.step().step_tokens for _ in range(2)] == [512, 512]
