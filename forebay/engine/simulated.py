"""An engine without a model: steps take the time that a profile says, and answers say the prompt back. The scheduler,
its pages and all that is around them are real. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..catalog import ModelFiles, read_meta
from ..config import EngineSettings
from ..contract import Unsupported
from .join import policy
from .kv.pages import PAGE_SIZE
from .loop import Engine
from .pace import Pace, Timed
from .profile import Profile, profile_of, with_profile
from .scheduler import Scheduler
from .sequence import Logprobs, Sequence
from .step import Drawn, Step
from .wire import Hello


class SimulatedRunner:
    """``sleep`` takes the time of a step. ``slower``: so many times longer than the profile says."""

    def __init__(self, profile: Profile, sleep: Callable[[float], None]) -> None:
        self.profile = profile
        self.slower = 1.0
        self._sleep = sleep

    def execute(self, step: Step) -> Drawn:
        self._sleep(self.slower * self.seconds(step))
        tokens = [_echo(work.seq) if work.samples else 0 for work in step.works]
        logprobs = {
            i: Logprobs(0.0, [tokens[i]][:most], [0.0][:most])  # it was sure
            for i, work in enumerate(step.works)
            if work.samples and (most := work.seq.spec.logprobs) is not None
        }
        return Drawn(tokens, logprobs)

    def seconds(self, step: Step) -> float:
        """What the profile says."""
        prompts = [work for work in step.works if work.count > 1]
        before = sum(work.count * work.start + work.count * (work.count - 1) // 2 for work in prompts)
        return self.profile.seconds(step.n_decodes, sum(work.count for work in prompts), before)


def _echo(seq: Sequence) -> int:
    """The prompt's ids again and again. Those that would end the answer give way to the next that does not."""
    prompt = seq.spec.ids
    cycle = (prompt[(seq.generated + i) % len(prompt)] for i in range(len(prompt)))
    return next((id for id in cycle if id not in seq.spec.stop_ids), prompt[0])


class VirtualClock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def simulated_engine(
    profile: Profile,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    *,
    max_batch: int | None = None,
    token_budget: int | None = None,
    batching: str = "continuous",
    max_gap: float = 0.075,
    max_context: int = 8192,
    vocab_size: int = 32_000,
) -> Engine:
    """In this process. With a VirtualClock and its ``sleep``, no time passes but what steps take. ``max_batch`` and
    ``token_budget``: the profile's where they are not given."""
    slots, budget = max_batch or profile.max_batch, token_budget or profile.token_budget
    scheduler = Scheduler(
        n_pages=profile.n_pages,
        max_batch=slots,
        token_budget=budget,
        max_context=max_context,
        policy=policy(batching, slots),
    )
    # What a warm-up would measure.
    shapes = ((1, 0), (slots, 0), (0, budget), (slots - 1, max(PAGE_SIZE, budget - slots)))
    points = [Timed(*shape, profile.seconds(*shape)) for shape in shapes]
    return Engine(
        scheduler,
        SimulatedRunner(profile, sleep),
        vocab_size=vocab_size,
        clock=clock,
        sleep=sleep,
        pace=Pace(points),
        max_gap=max_gap,
    )


def load(files: ModelFiles, settings: EngineSettings) -> tuple[Engine, Hello]:
    """One in real time, with the vocabulary and the context of a model that it does not load."""
    settings = with_profile(settings)
    profile = profile_of(settings)
    if profile is None:
        raise RuntimeError("the settings ask for the model")
    meta = read_meta(files)
    if settings.max_context > meta.context_length:
        raise Unsupported(f"max-context {settings.max_context} is more than the model's {meta.context_length}")
    engine = simulated_engine(
        profile,
        time.monotonic,
        time.sleep,
        max_batch=settings.max_batch,
        token_budget=settings.token_budget,
        batching=settings.batching,
        max_gap=settings.max_gap,
        max_context=settings.max_context or meta.context_length,
        vocab_size=meta.vocab_size,
    )
    scheduler = engine.scheduler
    summary = {
        "engine": f"simulated: {profile.name} profile{', an estimate' if profile.estimate else ''}; "
        f"answers say the prompt back",
        "kv cache": f"{profile.n_pages:,} pages of {PAGE_SIZE} tokens, simulated",
    }
    slowest = profile.seconds(settings.max_batch, settings.token_budget)
    return engine, Hello(profile.n_pages, PAGE_SIZE, scheduler.max_context, meta.vocab_size, summary, slowest)
