"""A scheduler with a stand-in for the model: the next token is a function of all tokens before it.

That makes every answer known beforehand, so a test can compare what came out with what had to.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.engine.join import policy
from forebay.engine.kv.capacity import OutputGuess
from forebay.engine.kv.pages import PAGE_SIZE
from forebay.engine.kv.tiers import Arrival, Block, NoTiers, Offer, Realm
from forebay.engine.scheduler import Scheduler
from forebay.engine.sequence import Emit, End, GenSpec
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
    pages lower tiers hold. ``chunk``: tokens of prefill beside answers. A step takes ``tick`` seconds."""

    def __init__(
        self,
        *,
        n_pages: int,
        max_batch: int,
        token_budget: int,
        max_context: int = 10_000,
        lower: int = 0,
        batching: str = "continuous",
        chunk: int | None = None,
        tick: float = 1.0,
    ) -> None:
        self.memory = PageMemory()
        self.lower = LowerMemory(self.memory, lower) if lower else None
        self.scheduler = Scheduler(
            n_pages=n_pages,
            max_batch=max_batch,
            token_budget=token_budget,
            max_context=max_context,
            tiers=self.lower,
            policy=policy(batching, max_batch),
        )
        self.chunk = chunk
        self.tick = tick
        self.now = 1.0
        self.news: dict[int, list[Emit]] = {}
        self.preempted: dict[int, int] = {}
        self.steps: list[Step] = []

    def submit(self, spec: GenSpec) -> None:
        self.news[spec.id] = []
        if refusal := self.scheduler.submit(spec, self.now):
            self._note(refusal)

    def step(self) -> Step:
        before = {s.spec.id for s in self.scheduler.running}
        if self.lower is not None:
            self.lower.pass_by()
        decoding = {s.spec.id for s in self.scheduler.running if s.owed == 1 and s.generated and not s.cancelled}
        step = self.scheduler.plan(self.now, self.chunk)
        for seq in self.scheduler.waiting:
            if seq.spec.id in before:
                self.preempted[seq.spec.id] = self.preempted.get(seq.spec.id, 0) + 1
        assert step.n_tokens <= self.scheduler.token_budget
        assert len(self.scheduler.running) <= self.scheduler.policy.slots
        if self.chunk is not None and decoding:
            assert step.n_tokens - step.n_decodes <= self.chunk
        for emit in step.ended:
            self._note(emit)
        if step.works:
            for emit in self.scheduler.commit(step, self.memory.execute(step)):
                self._note(emit)
        self.scheduler.check()
        self.steps.append(step)
        self.now += self.tick
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


class Blind(OutputGuess):
    """Thinks that every answer is about to end, so that more are let in than the pool can hold."""

    def remaining(self, generated: int, max_tokens: int) -> int:
        return 1


def misled(h: Harness) -> None:
    h.scheduler.guess = Blind()


class Histories(RuleBasedStateMachine):
    """Any interleaving of orders, cancels, steps and bad guesses: laws 1 and 3 to 6 hold, every answer is right."""

    batching = "continuous"
    tick = 1.0
    harness: type[Harness] = Harness

    @initialize(
        n_pages=st.integers(4, 40),
        max_batch=st.integers(1, 6),
        budget=st.sampled_from([8, 16, 40, 200]),
        lower=st.sampled_from([0, 0, 5, 1000]),
        chunk=st.sampled_from([None, 1, 16]),
    )
    def start(self, n_pages: int, max_batch: int, budget: int, lower: int, chunk: int | None) -> None:
        self.h = self.harness(
            n_pages=n_pages,
            max_batch=max_batch,
            token_budget=max(budget, max_batch),
            lower=lower,
            batching=self.batching,
            chunk=chunk,
            tick=self.tick,
        )
        self.orders: dict[int, GenSpec] = {}
        self.cancelled: set[int] = set()

    @rule(
        prefix=st.integers(0, 2),
        n_prompt=st.integers(0, 120),
        max_tokens=st.integers(1, 60),
        salt=st.sampled_from(["", "", "b"]),
        stop=st.lists(st.integers(0, 49), max_size=2),
        patience=st.sampled_from([None, None, None, 0, 5]),
        ttl=st.sampled_from([0, 20, 1000]),
        public=st.integers(0, 3),
    )
    def submit(
        self,
        prefix: int,
        n_prompt: int,
        max_tokens: int,
        salt: str,
        stop: list[int],
        patience: int | None,
        ttl: int,
        public: int,
    ) -> None:
        id = len(self.orders) + 1
        deadline = None if patience is None else self.h.now + patience * self.tick
        # Few distinct prefixes, so that the tree has much to share.
        ids = [(prefix * 11 + i) % 50 for i in range(n_prompt)] + ([id % 50] if id % 2 else [])
        spec = GenSpec(
            id,
            ids,
            max_tokens,
            stop_ids=stop,
            salt=salt,
            deadline=deadline,
            ttl=ttl * self.tick,
            public=min(public, len(ids) // 16),
        )
        self.orders[id] = spec
        self.h.submit(spec)

    @rule(which=st.integers(0, 30))
    def follow_up(self, which: int) -> None:
        """A second turn: an answer that has ended, and more."""
        done = [id for id, news in self.h.news.items() if news and news[-1].end in (End.STOP, End.LENGTH)]
        if done:
            before = self.orders[done[which % len(done)]]
            id = len(self.orders) + 1
            spec = GenSpec(
                id,
                [*before.ids, *self.h.tokens(before.id), 7],
                10,
                salt=before.salt,
                ttl=before.ttl,
                public=before.public,
            )
            self.orders[id] = spec
            self.h.submit(spec)

    @rule(which=st.integers(0, 30))
    def forget(self, which: int) -> None:
        """Maybe while it runs; its answer must be the same."""
        if self.orders:
            order = self.orders[which % len(self.orders) + 1]
            self.h.scheduler.purge(Realm(order.salt, order.public), order.ids)

    @rule(delay=st.integers(1, 5))
    def slow_down(self, delay: int) -> None:
        if self.h.lower is not None:
            self.h.lower.delay = delay

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        if self.orders:
            id = which % len(self.orders) + 1
            self.cancelled.add(id)
            self.h.scheduler.cancel(id)

    @rule(n=st.integers(1, 12))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.h.step()

    @rule()
    def mislead(self) -> None:
        misled(self.h)

    @rule(which=st.integers(0, 30), pin=st.booleans())
    def evict(self, which: int, pin: bool) -> None:
        self.h.scheduler.tree.evict(which % 4)

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "h"):
            self.h.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.run()
        scheduler = self.h.scheduler
        assert scheduler.pages.running == 0
        assert max(self.h.preempted.values(), default=0) <= 1
        for id, spec in self.orders.items():
            news = self.h.news[id]
            assert news, f"{id} never ended"
            assert news[-1].end is not None
            answer = self.h.tokens(id)
            assert answer == expected(spec)[: len(answer)]
            if id not in self.cancelled and news[-1].end not in (End.REFUSED, End.EXPIRED):
                assert answer == expected(spec)
        scheduler.tree.evict(scheduler.pages.total)
        assert scheduler.pages.free == scheduler.pages.total
