"""A scheduler with a stand-in for the model: the next token is a function of all tokens before it.

That makes every answer known beforehand, so a test can compare what came out with what had to.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from forebay.engine.kv.pages import PAGE_SIZE
from forebay.engine.kv.tiers import Arrival, Block, NoTiers, Offer
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

    def copy(self, page: int) -> list[tuple[int, int] | None]:
        return [self._held.get((page, offset)) for offset in range(PAGE_SIZE)]

    def fill(self, page: int, copied: list[tuple[int, int] | None]) -> None:
        for offset, held in enumerate(copied):
            if held is not None:
                self._held[page, offset] = held


class LowerMemory(NoTiers):
    """Lower tiers over a PageMemory. Pages come ``delay`` plans after they were asked for, and after every third fetch
    all but the first are damaged; until then what is in their place is garbage."""

    def __init__(self, memory: PageMemory, room: int = 1000, delay: int = 1) -> None:
        self.kept: dict[bytes, list[tuple[int, int] | None]] = {}
        self.delay = delay
        self.parents: dict[bytes, bytes] = {}
        self.fetched = 0
        self.refuses = False
        self._memory = memory
        self._room = room
        self._coming: list[tuple[int, Offer, list[int], Arrival]] = []
        self._plans = 0

    def find(self, blocks: Iterable[Block]) -> Offer | None:
        found = tuple(takewhile(lambda block: block.key in self.kept, blocks))
        return Offer(found, "disk") if found else None

    def fetch(self, offer: Offer, pages: Sequence[int]) -> Arrival:
        self.fetched += 1
        for page in pages:
            self._memory.fill(page, [(-1, -1)] * PAGE_SIZE)
        self._coming.append((self._plans + self.delay, offer, list(pages), Arrival()))
        return self._coming[-1][-1]

    def extend(self, key: bytes, ttl: float) -> bool:
        return key in self.kept

    def save(self, block: Block, page: int, ttl: float) -> None:
        assert ttl > 0
        if self.refuses:
            return
        while len(self.kept) >= self._room:
            del self.kept[next(iter(self.kept))]
        copied = self._memory.copy(page)
        assert [held and held[1] for held in copied] == list(block.ids)
        self.kept[block.key] = copied
        self.parents[block.key] = block.parent

    def forget(self, blocks: Sequence[Block]) -> None:
        behind = Counter(self.parents[key] for key in self.kept)
        for block in reversed(blocks):
            if behind[block.key]:
                return
            if self.kept.pop(block.key, None) is not None:
                behind[block.parent] -= 1

    def pass_by(self) -> None:
        self._plans += 1
        due = [fetch for fetch in self._coming if fetch[0] <= self._plans]
        self._coming = [fetch for fetch in self._coming if fetch[0] > self._plans]
        for _, offer, pages, arrival in due:
            good = 1 if self.fetched % 3 == 0 else len(pages)
            came = 0
            for block, page in list(zip(offer.blocks, pages, strict=True))[:good]:
                if (kept := self.kept.get(block.key)) is None:
                    break
                self._memory.fill(page, kept)
                came += 1
            arrival.pages = came


class Harness:
    """Plans, executes and commits, checking every law that can be seen from here after each step. ``lower``: how many
    pages lower tiers hold."""

    def __init__(
        self, *, n_pages: int, max_batch: int, token_budget: int, max_context: int = 10_000, lower: int = 0
    ) -> None:
        self.memory = PageMemory()
        self.lower = LowerMemory(self.memory, lower) if lower else None
        self.scheduler = Scheduler(
            n_pages=n_pages,
            max_batch=max_batch,
            token_budget=token_budget,
            max_context=max_context,
            tiers=self.lower,
        )
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
        if self.lower is not None:
            self.lower.pass_by()
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
