"""A scheduler with a stand-in for the model: the next token is a function of all tokens before it.

That makes every answer known beforehand, so a test can compare what came out with what had to.
"""

import zlib

from forebay.engine.kv.pages import PAGE_SIZE
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Emit, GenSpec
from forebay.engine.step import Drawn, Step

VOCAB = 50


def next_token(ids: list[int]) -> int:
    return zlib.crc32(repr(ids).encode()) % VOCAB


def expected(spec: GenSpec) -> list[int]:
    ids = list(spec.ids)
    for n in range(1, spec.max_tokens + 1):
        ids.append(next_token(ids))
        if ids[-1] in spec.stop_ids and n > spec.min_tokens:
            break
    return ids[len(spec.ids) :]


class PageMemory:
    """Remembers which token each (page, offset) holds, and reads prefixes back through the table as attention
    would: a page that was freed, overwritten or never computed shows as a wrong token."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[int, int]] = {}

    def execute(self, step: Step) -> Drawn:
        for work in step.works:
            for at in range(work.start, work.start + work.count):
                self._held[work.seq.table[at // PAGE_SIZE], at % PAGE_SIZE] = (at, work.seq.ids[at])
        tokens = []
        for work in step.works:
            end = work.start + work.count
            read = [self._held.get((work.seq.table[at // PAGE_SIZE], at % PAGE_SIZE)) for at in range(end)]
            want = list(enumerate(work.seq.ids[:end]))
            if read != want:
                raise AssertionError(f"sequence {work.seq.spec.id} reads {read}, wants {want}")
            tokens.append(next_token(work.seq.ids) if work.samples else 0)
        return Drawn(tokens)


class Harness:
    """Plans, executes and commits, checking every law that can be seen from here after each step."""

    def __init__(self, *, n_pages: int, max_batch: int, token_budget: int, max_context: int = 10_000) -> None:
        self.scheduler = Scheduler(
            n_pages=n_pages, max_batch=max_batch, token_budget=token_budget, max_context=max_context
        )
        self.memory = PageMemory()
        self.now = 1.0
        self.news: dict[int, list[Emit]] = {}
        self.preempted: dict[int, int] = {}
        self.steps: list[Step] = []

    def submit(self, spec: GenSpec) -> None:
        self.news[spec.id] = []
        if refusal := self.scheduler.submit(spec):
            self._note(refusal)

    def step(self) -> Step:
        before = {s.spec.id for s in self.scheduler.running}
        step = self.scheduler.plan(self.now)
        for seq in self.scheduler.waiting:
            if seq.spec.id in before:
                self.preempted[seq.spec.id] = self.preempted.get(seq.spec.id, 0) + 1
        assert step.n_tokens <= self.scheduler.token_budget
        assert len(self.scheduler.running) <= self.scheduler.max_batch
        for emit in step.ended:
            self._note(emit)
        if step.works:
            for emit in self.scheduler.commit(step, self.memory.execute(step)):
                self._note(emit)
        self.scheduler.check()
        self.steps.append(step)
        self.now += 1
        return step

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.running} {self.scheduler.waiting}")

    def tokens(self, id: int) -> list[int]:
        return [token for emit in self.news[id] for token in emit.tokens]

    def _note(self, emit: Emit) -> None:
        assert not any(e.end for e in self.news[emit.id]), f"{emit.id} has two endings (law 1)"
        self.news[emit.id].append(emit)
