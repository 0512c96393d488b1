"""The engine: inbox -> plan -> execute -> commit -> outbox. The only owner of engine state (law 2)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from itertools import chain

from .kv.pages import PAGE_SIZE
from .kv.tiers import Realm
from .pace import Pace
from .scheduler import Scheduler
from .sequence import Emit, End, GenSpec, Logprobs
from .step import FAILED, Drawn, Runner, Step
from .wire import Frame

log = logging.getLogger(__name__)

#: So many steps in a row in which everything failed, and the engine is beyond repair.
MAX_FAILED_STEPS = 3
#: Seconds after which the inbox is looked at again while pages come from a lower tier.
ARRIVAL_WAIT = 0.005


class EngineBroken(RuntimeError):
    """Nothing can be computed any more; the process should be replaced."""


class Engine:
    """Drives in-process for the library, tests and benchmarks, and inside the child process for the server.

    ``clock`` returns monotonic seconds, ``sleep`` waits for some. ``vocab_size`` is the width of the logits. ``pace``
    is what the warm-up has told of the runner. ``max_gap``: seconds that a step may take for the sake of prompts while
    answers run; 0: no limit.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
        pace: Pace | None = None,
        max_gap: float = 0.0,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.pace = pace or Pace()
        self._vocab_size = vocab_size
        self._clock = clock
        self._sleep = sleep
        self._max_gap = max_gap
        self._received = 0
        self._steps = 0
        self._failed_steps = 0
        self._news: list[Emit] = []

    def submit(self, spec: GenSpec) -> None:
        """Take an order. What cannot be served is refused in the news of the next step."""
        self._received += 1
        fault = self._fault(spec)
        refusal = Emit(spec.id, end=End.REFUSED, detail=fault) if fault else self.scheduler.submit(spec, self._clock())
        if refusal:
            self._news.append(refusal)

    def cancel(self, id: int, tokens: int | None = None) -> None:
        self.scheduler.cancel(id, tokens)

    def purge(self, realm: Realm, ids: list[int], spare: int = 0) -> None:
        """Ids that no prompt can have are of nothing that is kept."""
        if all(0 <= id < self._vocab_size for id in ids):
            self.scheduler.purge(realm, ids, spare)

    def rest(self) -> None:
        """To be called now and then while there is nothing to do."""
        self.scheduler.traffic.work(self._clock())

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._news)

    def due(self) -> float:
        """Seconds until step() has something to do: 0 where it has now, infinity where there is no work."""
        return 0.0 if self._news else self.scheduler.due(self._clock())

    def step(self) -> Frame:
        """Do one step if there is work. Raises EngineBroken if no step succeeds any more."""
        begin = self._clock()
        step = self.scheduler.plan(begin, self._chunk())
        emits = [*self._news, *step.ended]
        self._news = []
        if step.works:
            drawn, failures = self._execute(step)
            emits += self.scheduler.commit(step, drawn, failures)
            self._steps += 1
            if not failures:  # else some of it was computed twice
                self.pace.observe(step.n_decodes, step.n_tokens - step.n_decodes, self._clock() - begin)
        elif self.scheduler.traffic.fetches:  # all that there is waits for them
            self.scheduler.traffic.tiers.wait(ARRIVAL_WAIT)
        return self.frame(emits, step.n_tokens)

    def _chunk(self) -> int | None:
        """Tokens of prefill that the next step may have beside answers; None: as many as there is room for."""
        decoding = self.scheduler.decoding
        if not self._max_gap or not decoding:
            return None
        return 0 if self.pace.probe() else self.pace.chunk(decoding, self._max_gap)

    def frame(self, emits: list[Emit], n_tokens: int = 0) -> Frame:
        """News with the state after them; without news, the heartbeat."""
        scheduler = self.scheduler
        return Frame(
            emits=emits,
            received=self._received,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            credits=scheduler.credits(),
            pages=scheduler.pages.counts(),
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            steps=self._steps,
            step_tokens=n_tokens,
            tiers=scheduler.traffic.tiers.counts(),
            owed=scheduler.owed,
            pace=self.pace.told(scheduler.policy.slots, self._max_gap, scheduler.token_budget),
        )

    def generate(self, specs: list[GenSpec]) -> dict[int, list[Emit]]:
        """Run these orders to their ends (library use): id -> its news in order."""
        for spec in specs:
            self.submit(spec)
        news: dict[int, list[Emit]] = {spec.id: [] for spec in specs}
        while self.has_work:
            if due := self.due():
                self._sleep(due)
            for emit in self.step().emits:
                news[emit.id].append(emit)
        return news

    def _execute(self, step: Step) -> tuple[Drawn, dict[int, str]]:
        """What each work drew, and failures per work. A step that fails as a whole is tried again one by one, so that
        only those at fault end (law 12)."""
        try:
            drawn = self.runner.execute(step)
            failures: dict[int, str] = {}
        except Exception:
            log.exception("a step of %d sequences failed; trying them one by one", len(step.works))
            tokens = [0] * len(step.works)
            logprobs: dict[int, Logprobs] = {}
            failures = {}
            for i, work in enumerate(step.works):
                try:
                    alone = self.runner.execute(Step((work,)))
                    tokens[i] = alone.tokens[0]
                    if alone.logprobs:
                        logprobs[i] = alone.logprobs[0]
                except Exception as error:
                    log.exception("sequence %d failed", work.seq.spec.id)
                    failures[i] = f"the engine failed: {type(error).__name__}"
            drawn = Drawn(tokens, logprobs)
        self._failed_steps = self._failed_steps + 1 if len(failures) == len(step.works) else 0
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise EngineBroken(f"{self._failed_steps} steps in a row failed: {failures}")
        failures |= {i: "the logits are not finite" for i, token in enumerate(drawn.tokens) if token == FAILED}
        return drawn, failures

    def _fault(self, spec: GenSpec) -> str:
        """What is wrong with an order, or nothing. The front checks the same; this is the backstop."""
        ids = chain(spec.ids, spec.stop_ids, spec.logit_bias, *spec.bad_words)
        bad = next((t for t in ids if not 0 <= t < self._vocab_size), None)
        more = (spec.frequency_penalty, spec.presence_penalty, *spec.logit_bias.values())
        temperature, repetition = spec.temperature, spec.repetition_penalty
        checks = (
            (bad is None, f"token id {bad} is outside the vocabulary of {self._vocab_size}"),
            (math.isfinite(temperature) and temperature >= 0, f"temperature {temperature} is not a number from 0"),
            (0 < spec.top_p <= 1, f"top_p {spec.top_p} is not above 0 and up to 1"),
            (spec.top_k >= 0, f"top_k {spec.top_k} is less than 0"),
            (0 <= spec.min_p <= 1, f"min_p {spec.min_p} is not between 0 and 1"),
            (math.isfinite(repetition) and repetition > 0, f"repetition_penalty {repetition} is not a number above 0"),
            (all(map(math.isfinite, more)), "frequency_penalty, presence_penalty or a logit_bias is not finite"),
            (all(spec.bad_words), "one of bad_words has no tokens"),
            (0 <= spec.public * PAGE_SIZE <= len(spec.ids), f"the prompt has no {spec.public} pages to share"),
            (spec.logprobs is None or spec.logprobs >= 0, f"logprobs {spec.logprobs} is less than 0"),
            (
                0 <= spec.min_tokens <= spec.max_tokens,
                f"min_tokens {spec.min_tokens} is not between 0 and max_tokens {spec.max_tokens}",
            ),
        )
        return next((why for right, why in checks if not right), "")
