"""The engine as a library: one answer whatever the path (law 9 in float32), and failures that end alone (law 12)."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import Judge

from forebay.catalog import ModelFiles
from forebay.config import EngineSettings
from forebay.engine.kernels import library
from forebay.engine.kv.capacity import OutputGuess, pages_of
from forebay.engine.loop import MAX_FAILED_STEPS, Engine, EngineBroken
from forebay.engine.runner import Built, build, usable_cores
from forebay.engine.sample import FAILED
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Emit, End, GenSpec
from forebay.engine.step import Drawn, Step


def prompt(n: int, salt: int = 0, vocab: int = 199) -> list[int]:
    return [(i * i * 31 + 7 * i + 3 + salt * 97) % vocab for i in range(n)]


def tokens(news: list[Emit]) -> list[int]:
    return [token for emit in news for token in emit.tokens]


class Blind(OutputGuess):
    """Lets in more than the pool can hold, so that sequences are preempted."""

    def remaining(self, generated: int, max_tokens: int) -> int:
        return 1


def every_path(built: Built, ids: list[int], n: int) -> dict[str, list[int]]:
    """The same order on each path through the engine: name -> its tokens. All share one model and pool."""
    vocab = built.spec.vocab_size

    def make(n_pages: int = built.n_pages, token_budget: int = 512) -> Engine:
        scheduler = Scheduler(n_pages=n_pages, max_batch=16, token_budget=token_budget, max_context=1024)
        return Engine(scheduler, built.runner, vocab_size=vocab, clock=time.monotonic)

    found: dict[str, list[int]] = {}
    order = GenSpec(1, ids, n)
    others = [GenSpec(i, prompt(20 + 9 * i, i, vocab), n) for i in range(2, 17)]

    engine = make()
    found["alone"] = tokens(engine.generate([order])[1])
    found["after a cache hit"] = tokens(engine.generate([order])[1])
    assert engine.scheduler.prefix_hits >= len(ids) // 16 * 16 - 16
    engine.scheduler.check()

    engine = make()
    found["among 15 others"] = tokens(engine.generate([*others[:7], order, *others[7:]])[1])
    engine.scheduler.check()

    found["in chunks of 64"] = tokens(make(token_budget=64).generate([order])[1])

    # Three prompts fit, three answers do not; the others are older, so this one gives way.
    engine = make(n_pages=3 * (pages_of(len(ids)) + pages_of(len(ids) + n)) // 2)
    engine.scheduler.guess = Blind()
    news = engine.generate([*(GenSpec(i, prompt(len(ids), i, vocab), n) for i in (2, 3)), order])
    assert engine.scheduler.preemptions > 0
    found["after a preemption"] = tokens(news[1])
    engine.scheduler.check()
    return found


def float32(files: ModelFiles, kernels: str = "auto") -> Built:
    settings = {"dtype": "float32", "device": "cpu", "kv_memory": 2**27, "kernels": kernels}
    return build(files, EngineSettings.model_validate(settings))


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_law_9_tiny(plain: tuple[ModelFiles, Judge], kernels: str) -> None:
    files, judge = plain
    built = float32(files, kernels)
    assert built.summary["kernels"].startswith("torch" if kernels == "off" or library() is None else "compiled")
    found = every_path(built, prompt(150), 64)
    assert found == dict.fromkeys(found, judge.greedy(prompt(150), 64))


def test_law_9_real_model(demo_model: ModelFiles, demo_transformers: Judge) -> None:
    ids = prompt(150, vocab=49152)
    found = every_path(float32(demo_model), ids, 32)
    assert found == dict.fromkeys(found, demo_transformers.greedy(ids, 32))


def test_seeded_sampling_is_the_same_alone_and_in_a_crowd(
    plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine]
) -> None:
    files, _ = plain
    order = GenSpec(1, prompt(40), 40, temperature=0.9, top_p=0.95, seed=11)
    others = [GenSpec(i, prompt(30, i), 40, temperature=1.0, seed=i) for i in range(2, 9)]
    alone = tokens(engine_of(files).generate([order])[1])
    crowd = tokens(engine_of(files).generate([*others, order])[1])
    assert alone == crowd
    assert alone != tokens(engine_of(files).generate([GenSpec(1, prompt(40), 40, temperature=0.9, seed=12)])[1])


def test_min_tokens_keeps_the_end_away(plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine]) -> None:
    files, judge = plain
    first = judge.greedy(prompt(40), 1)
    engine = engine_of(files)
    assert tokens(engine.generate([GenSpec(1, prompt(40), 20, stop_ids=first)])[1]) == first
    answer = tokens(engine.generate([GenSpec(2, prompt(40), 20, min_tokens=5, stop_ids=first)])[2])
    assert len(answer) > 5
    assert first[0] not in answer[:5]


class Faulty:
    """A runner that raises on token 13, and draws broken logits on token 17."""

    def __init__(self, *, always: bool = False) -> None:
        self.always = always

    def execute(self, step: Step) -> Drawn:
        ids = [work.seq.ids for work in step.works]
        if self.always or any(13 in one for one in ids):
            raise ValueError("thirteen")
        return Drawn([FAILED if 17 in one else 5 for one in ids])


def faulty_engine(**more: bool) -> Engine:
    scheduler = Scheduler(n_pages=50, max_batch=8, token_budget=64, max_context=200)
    return Engine(scheduler, Faulty(**more), vocab_size=50, clock=time.monotonic)


def test_law_12_one_bad_request_ends_alone() -> None:
    engine = faulty_engine()
    specs = [GenSpec(1, [1, 2], 6), GenSpec(2, [13], 6), GenSpec(3, [17], 6), GenSpec(4, [3], 6)]
    news = engine.generate(specs)
    assert {id: emits[-1].end for id, emits in news.items()} == {
        1: End.LENGTH,
        2: End.ERROR,
        3: End.ERROR,
        4: End.LENGTH,
    }
    assert tokens(news[1]) == tokens(news[4]) == [5] * 6
    assert "ValueError" in news[2][-1].detail
    assert "not finite" in news[3][-1].detail
    engine.scheduler.check()


def test_an_engine_in_which_nothing_works_says_so() -> None:
    engine = faulty_engine(always=True)
    for id in range(1, MAX_FAILED_STEPS):
        engine.submit(GenSpec(id, [1], 5))
        assert engine.step().emits[0].end is End.ERROR
    engine.submit(GenSpec(99, [1], 5))
    with pytest.raises(EngineBroken):
        engine.step()


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (GenSpec(1, [1, 50], 5), "token id 50"),
        (GenSpec(1, [-1], 5), "token id -1"),
        (GenSpec(1, [1], 5, stop_ids=[2**40]), f"token id {2**40}"),
        (GenSpec(1, [1], 5, temperature=float("nan")), "temperature"),
        (GenSpec(1, [1], 5, temperature=-1.0), "temperature"),
        (GenSpec(1, [1], 5, top_p=0.0), "top_p"),
        (GenSpec(1, [1], 5, top_k=-2), "top_k"),
        (GenSpec(1, [1], 5, min_tokens=6), "min_tokens"),
        (GenSpec(1, [1] * 300, 5), "exceed"),
    ],
)
def test_the_backstop_refuses_what_the_front_should_have(spec: GenSpec, why: str) -> None:
    engine = faulty_engine()
    (emit,) = engine.generate([spec])[1]
    assert emit.end is End.REFUSED
    assert why in emit.detail


def test_law_10_no_clock_but_the_one_given() -> None:
    """Deadlines and stamps follow the engine's clock argument; real time plays no part."""
    now = [100.0]
    scheduler = Scheduler(n_pages=50, max_batch=1, token_budget=64, max_context=200)
    engine = Engine(scheduler, Faulty(), vocab_size=50, clock=lambda: now[0])
    engine.submit(GenSpec(1, [1], 3, deadline=101.0))
    engine.submit(GenSpec(2, [1], 3, deadline=101.0))
    first = engine.step().emits
    assert [(e.id, e.started) for e in first] == [(1, 100.0)]
    now[0] = 101.0
    ends = {e.id: e.end for _ in range(3) for e in engine.step().emits if e.end}
    assert ends == {1: End.LENGTH, 2: End.EXPIRED}


def test_frames_carry_credits_and_counts(plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine]) -> None:
    files, _ = plain
    engine = engine_of(files, max_batch=4)
    for id in range(1, 7):
        engine.submit(GenSpec(id, prompt(20, id), 5))
    frame = engine.step()
    assert (frame.received, frame.running, frame.waiting, frame.credits) == (6, 4, 2, -2)
    assert frame.step_tokens == 80
    assert sum(frame.pages.values()) == engine.scheduler.pages.total
    while engine.has_work:
        frame = engine.step()
    assert (frame.running, frame.waiting, frame.credits) == (0, 0, 4)


def test_memory_does_not_grow_with_requests(plain: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine]) -> None:
    files, _ = plain
    engine = engine_of(files, kv_memory=2**20)
    for round in range(30):
        engine.generate([GenSpec(i, prompt(60, 7 * round + i), 8) for i in range(1, 9)])
    engine.scheduler.check()
    assert len(engine.scheduler.tree) <= engine.scheduler.pages.total
    assert not engine.scheduler._by_id
    assert torch.is_grad_enabled()


def test_threads_are_the_cores_that_may_be_used(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    for text, expected in (("max 100000", cores), ("100000 100000", 1), ("50000 100000", 1), ("nonsense", cores)):
        quota.write_text(text)
        assert usable_cores(quota) == expected
    assert usable_cores(tmp_path / "none") == cores
