"""Which sequence does how much in the next step. No torch, no clock, no I/O.

``plan(now, chunk) -> Step`` decides, the runner executes, ``commit(step, drawn) -> [Emit]`` accounts for it. A step
places decodes first (one token each) and fills the rest of the token budget with chunks of prefill, in order of
precedence: sequences that were preempted before, then by arrival. Beside answers that run, prefill gets at most
``chunk`` tokens of the budget. Who may join at all, a JoinPolicy says (join.py).

Memory: a sequence joins if the predicted peak of all that run fits the pool. Where the prediction was wrong, the
youngest sequence that has never been preempted gives its pages back and is computed again later (its whole pages
stay in the prefix tree while there is room). The second time it joins only when its *whole* need is covered, so
it is preempted at most once, and those that come first can always go on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import islice

from .join import Continuous, JoinPolicy
from .kv.capacity import OutputGuess, pages_of, predicted_peak
from .kv.pages import PAGE_SIZE, Pages
from .kv.radix import Node
from .kv.tiers import NoTiers, Realm, Tiers
from .kv.traffic import Fetch, Traffic
from .sequence import Emit, End, GenSpec, Logprobs, Sequence, State
from .step import Drawn, Step, Work


class Scheduler:
    """Owner of all sequences and pages. ``max_context`` bounds prompt + answer of one sequence, in tokens. Without a
    ``policy``, sequences may join in any step."""

    def __init__(
        self,
        *,
        n_pages: int,
        max_batch: int,
        token_budget: int,
        max_context: int,
        tiers: Tiers | None = None,
        policy: JoinPolicy | None = None,
    ) -> None:
        if token_budget < max_batch:
            raise ValueError(f"token_budget ({token_budget}) must be at least max_batch ({max_batch})")
        self.pages = Pages(n_pages)
        self.traffic = Traffic(self.pages, tiers or NoTiers())
        self.tree = self.traffic.tree
        self.policy = policy or Continuous(max_batch)
        self.token_budget = token_budget
        self.max_context = min(max_context, n_pages * PAGE_SIZE)
        self.guess = OutputGuess()
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._by_id: dict[int, Sequence] = {}
        self._arrivals = 0
        self._in_flight: Step | None = None
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    # ---- what comes in

    def submit(self, spec: GenSpec, now: float = 0.0) -> Emit | None:
        """Take an order that comes ``now`` (monotonic s). Returns the refusal if it can never be served (law 6), else
        None."""
        total = len(spec.ids) + spec.max_tokens
        if not spec.ids:
            return Emit(spec.id, end=End.REFUSED, detail="the prompt has no tokens")
        if spec.max_tokens < 1:
            return Emit(spec.id, end=End.REFUSED, detail="max_tokens must be at least 1")
        if total > self.max_context:
            why = f"prompt ({len(spec.ids)}) + max_tokens ({spec.max_tokens}) exceed {self.max_context} tokens"
            return Emit(spec.id, end=End.REFUSED, detail=why)
        if spec.id in self._by_id:
            return Emit(spec.id, end=End.REFUSED, detail="the id is in use")
        seq = self._by_id[spec.id] = Sequence.of(spec, self._arrivals, now)
        self._arrivals += 1
        self.waiting.append(seq)
        return None

    def cancel(self, id: int, tokens: int | None = None) -> None:
        """Flag it; the next plan() or commit() ends it. Unknown ids have ended already. ``tokens``: so many of prompt
        and answer count; what a conversation's turn has computed behind them is not kept."""
        if seq := self._by_id.get(id):
            seq.cancelled, seq.counted = True, tokens

    def purge(self, realm: Realm, ids: list[int], spare: int = 0) -> None:
        """Keep no page that only this sequence of tokens has, but the first ``spare``."""
        self.traffic.forget(realm, ids, max(spare, realm.public))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting) or self.traffic.busy

    def due(self, now: float) -> float:
        """Seconds until a step could do something: 0 where it can now, infinity where there is nothing to do."""
        if self.running or self.traffic.busy or any(seq.cancelled for seq in self.waiting):
            return 0.0
        return self.policy.due(self.waiting, now) if self.waiting else math.inf

    @property
    def decoding(self) -> int:
        """Sequences whose answers go on in the next step. (The last token of a prompt, and an answer that is computed
        again after a preemption, let nobody wait who reads.)"""
        return sum(seq.owed == 1 and seq.generated > 0 for seq in self.running)

    @property
    def owed(self) -> int:
        """Tokens of prompts, and of answers that were preempted, that are to be computed yet. What waits counts whole:
        how much of it is cached is known when it joins."""
        return sum(seq.owed for seq in self.running if seq.owed > 1) + sum(seq.owed for seq in self.waiting)

    def credits(self) -> int:
        """How many more orders could start soon: free slots less those already waiting for one, and no more than
        the predicted free pages hold, going by the sequences that are here. Negative: too many wait already."""
        here = [*self.running, *self.waiting]
        slots = self.policy.vacancies(len(self.running), len(self.waiting))
        if not here:
            return slots
        loads = [(len(seq.ids), self._to_come(seq)) for seq in here]
        free = self._room - (predicted_peak(loads) - self._shared_pages())
        typical = max(1, sum(pages_of(now + to_come) for now, to_come in loads) // len(loads))
        return min(slots, free // typical)

    # ---- plan

    def plan(self, now: float, chunk: int | None = None) -> Step:
        """The next step. ``now`` (monotonic s) is compared with deadlines and stamped on what starts. If answers go on
        in it, it has at most ``chunk`` tokens of prefill; 0: none, in this step."""
        if self._in_flight is not None:
            raise RuntimeError("the last step has not been committed")
        self.traffic.work(now)
        ended = self._reap(now)
        works: list[Work] = []
        # Decodes are owed one token each, whatever else happens.
        spare = self.token_budget - sum(seq.owed == 1 for seq in self.running)
        if chunk is not None and self.decoding:
            spare = min(spare, chunk)
        order = sorted(self.running, key=_precedence)
        while order:
            seq = order.pop(0)
            count = min(seq.owed, max(spare, 1 if seq.owed == 1 else 0))
            if count and self._grow(seq, seq.computed + count, order):
                works.append(_work(seq, count))
                spare -= count if seq.owed > 1 else 0
        held_back: list[Sequence] = []
        # Those that are held back keep their places: they are earlier than what comes after them.
        may = tuple(islice(self.waiting, self.policy.open(len(self.running), self.waiting, now)))
        filling = [seq for seq in self.running if seq.owed > 1] if may else []
        most = sum(map(self._most, self.running)) if may else 0
        for seq in may:
            if spare <= 0:
                break
            path = self.tree.match(_realm(seq), seq.ids, (len(seq.ids) - 1) // PAGE_SIZE)
            most += self._most(seq)
            if self._about_to_be_shared(seq, path, filling):
                held_back.append(seq)
                continue
            # Where all of them at their longest fit, nobody has to predict.
            if self.running and most > self._room * PAGE_SIZE and not self._fits(seq, path, held_back):
                break
            if self._about_to_arrive(seq, path):
                held_back.append(seq)
                continue
            self._join(seq, path, now)
            filling.append(seq)
            count = min(seq.owed, spare)
            if not self._grow(seq, seq.computed + count, []):
                break
            works.append(_work(seq, count))
            spare -= count
        step = Step(tuple(works), tuple(ended))
        if works:
            self._in_flight = step
        return step

    def _reap(self, now: float) -> list[Emit]:
        """End what was cancelled, and what waited past its deadline without ever having started."""
        ended = [self._end(seq, End.CANCELLED) for seq in self.running if seq.cancelled]
        for seq in self.waiting:
            if seq.cancelled:
                ended.append(self._end(seq, End.CANCELLED))
            elif seq.spec.deadline is not None and now >= seq.spec.deadline and not seq.started:
                ended.append(self._end(seq, End.EXPIRED, detail="waited longer than its deadline"))
        if ended:
            self._drop_ended()
        return ended

    def _grow(self, seq: Sequence, tokens: int, after: list[Sequence]) -> bool:
        """Give ``seq`` pages for ``tokens`` tokens, if need be from sequences ``after`` it in precedence.

        False: it does nothing in this step (it was preempted itself, or must wait for those before it).
        """
        need = pages_of(tokens) - len(seq.table)
        while not self._take(seq, need):
            victim = next((s for s in reversed(after) if not s.preempted), None)
            if victim is None:
                if not seq.preempted and len(self.running) > 1:
                    self._preempt(seq)
                return False
            after.remove(victim)
            self._preempt(victim)
        return True

    def _take(self, seq: Sequence, need: int) -> bool:
        if need <= 0:
            return True
        if need > self.pages.free:
            self.tree.evict(need - self.pages.free)
        taken = self.pages.take(need)
        if taken is None:
            return False
        seq.table += taken
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._release(seq)
        seq.preempted = True
        seq.move(State.WAITING)
        self.running.remove(seq)
        # Before everything that has not been preempted, behind those that were.
        at = sum(s.preempted for s in self.waiting)
        self.waiting.insert(at, seq)
        self.preemptions += 1

    def _about_to_be_shared(self, seq: Sequence, path: list[Node], filling: list[Sequence]) -> bool:
        """Whether one of those whose prompts are being computed has at least half of what ``seq`` lacks: then it is
        cheaper to wait for it (choices of one prompt, a prompt that many send at once). It is earlier, so it would get
        the budget first."""
        if seq.preempted:
            return False
        known, most = len(path), (len(seq.ids) - 1) // PAGE_SIZE
        lacking = len(seq.ids) - known * PAGE_SIZE
        for other in filling:
            same = other.spec.salt == seq.spec.salt
            shared = most if same else min(most, seq.spec.public, other.spec.public)
            if other.owed > 1 and shared > known:
                common = _common_pages(seq.ids, other.ids, shared)
                coming = other.computed < common * PAGE_SIZE
                if coming and 2 * (common - known) * PAGE_SIZE >= lacking:
                    return True
        return False

    def _about_to_arrive(self, seq: Sequence, path: list[Node]) -> bool:
        """Whether pages of ``seq`` are on their way from a lower tier. That is tried once: what does not come, or is
        gone again when it is needed, is computed."""
        if seq.fetch is None and not seq.preempted:
            seq.fetch = self.traffic.fetch(_realm(seq), seq.ids, path, (len(seq.ids) - 1) // PAGE_SIZE, seq.spec.ttl)
        return isinstance(seq.fetch, Fetch) and seq.fetch.underway

    def _join(self, seq: Sequence, path: list[Node], now: float) -> None:
        """Move a waiting sequence to running, with ``path``, what the prefix tree has of it."""
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.move(State.RUNNING)
        self.pages.share(node.page for node in path)
        self.tree.touch(path, *self.traffic.worth(seq.spec.ttl))
        seq.table = [node.page for node in path]
        seq.node = path[-1] if path else None
        seq.inserted = len(path)
        seq.computed = len(path) * PAGE_SIZE
        if not seq.started:
            seq.started = now
            seq.cached = seq.computed
            self.prefix_queries += len(seq.ids)
            self.prefix_hits += seq.computed
            if path:
                fetched = isinstance(seq.fetch, Fetch) and seq.fetch.arrival.pages
                seq.tier = seq.fetch.tier if isinstance(seq.fetch, Fetch) and fetched else "device"

    def _fits(self, seq: Sequence, path: list[Node], held_back: list[Sequence]) -> bool:
        """Whether the predicted peak with ``seq`` (whose first pages are ``path``) stays inside the pool."""
        room = self._room
        shared = self._shared_pages() + sum(self.pages.refs(node.page) > 0 for node in path)
        loads = [(len(s.ids), self._to_come(s)) for s in (*self.running, *held_back, seq)]
        if predicted_peak(loads) - shared > room:
            return False
        if not seq.preempted:
            return True
        # A second preemption is not allowed: everything that may not be preempted must fit to its very end.
        return sum(pages_of(len(s.ids) + s.remaining) for s in (*self.running, seq) if s.preempted) <= room

    def _most(self, seq: Sequence) -> int:
        """Tokens that it could come to hold, rounded up as predicted_peak does it."""
        return len(seq.ids) + self._to_come(seq) + PAGE_SIZE - 1

    @property
    def _room(self) -> int:
        """Pages that sequences could have between them."""
        return self.pages.total - self.pages.pinned

    def _shared_pages(self) -> int:
        """By how much the tables' lengths count shared pages too often."""
        return sum(map(len, self._tables())) - self.pages.running

    def _tables(self) -> list[list[int]]:
        """Of all that hold pages."""
        return [*(seq.table for seq in self.running), *(fetch.table for fetch in self.traffic.fetches)]

    def _to_come(self, seq: Sequence) -> int:
        if seq.preempted:
            return seq.remaining
        return self.guess.remaining(seq.generated, seq.spec.max_tokens)

    # ---- commit

    def commit(self, step: Step, drawn: Drawn, failures: Mapping[int, str] | None = None) -> list[Emit]:
        """Account for an executed step. ``failures`` maps an index of a work to why it failed: its sequence ends, the
        others do not notice."""
        if step is not self._in_flight:
            raise RuntimeError("not the step in flight")
        self._in_flight = None
        emits: list[Emit] = []
        for i, work in enumerate(step.works):
            seq = work.seq
            if failures and i in failures:
                emits.append(self._end(seq, End.ERROR, detail=failures[i]))
                continue
            seq.computed += work.count
            self._insert(seq)
            if seq.cancelled:
                emits.append(self._end(seq, End.CANCELLED))
            elif work.samples:
                token = drawn.tokens[i]
                seq.append(token)
                end = _ending(seq, token)
                known = [drawn.logprobs[i]] if i in drawn.logprobs else []
                emits.append(
                    self._end(seq, end, tokens=[token], logprobs=known)
                    if end
                    else Emit(
                        seq.spec.id, [token], cached=seq.cached, started=seq.started, logprobs=known, tier=seq.tier
                    )
                )
        self._drop_ended()
        return emits

    def _insert(self, seq: Sequence) -> None:
        """Put newly completed pages into the tree, at once: the next with the same prefix need not wait."""
        for i in range(seq.inserted, seq.computed // PAGE_SIZE):
            own = seq.table[i]
            parent = seq.node if isinstance(seq.node, Node) else None
            realm = _realm(seq)
            key = realm.key(seq.ids, i)
            node = self.tree.insert(realm, parent, key, own, *self.traffic.worth(seq.spec.ttl))
            if node.page != own:
                self.pages.share([node.page])
                seq.table[i] = node.page
                self.pages.drop([own])
            seq.node = node
            seq.inserted = i + 1

    def _release(self, seq: Sequence) -> None:
        self.tree.idle(self.pages.drop(seq.table))
        seq.table = []
        seq.node = None
        seq.inserted = seq.computed = 0

    def _end(
        self,
        seq: Sequence,
        end: End,
        *,
        tokens: list[int] | None = None,
        logprobs: list[Logprobs] | None = None,
        detail: str = "",
    ) -> Emit:
        path = _path(seq.node) if seq.spec.ttl and end is not End.ERROR else []
        counted = len(path) if seq.counted is None else seq.counted // PAGE_SIZE
        self.traffic.keep(path[:counted])
        self._release(seq)
        self.tree.prune(path[counted:])
        seq.move(State.ENDED)
        del self._by_id[seq.spec.id]
        if end in (End.STOP, End.LENGTH):
            self.guess.record(seq.generated)
        return Emit(seq.spec.id, tokens or [], end, detail, seq.cached, seq.started, logprobs or [], seq.tier)

    def _drop_ended(self) -> None:
        self.running = [seq for seq in self.running if seq.state is not State.ENDED]
        self.waiting = deque(seq for seq in self.waiting if seq.state is not State.ENDED)

    def check(self) -> None:
        """Law 5 from scratch. Raises RuntimeError; for tests and debugging, O(pages)."""
        self.pages.check(self._tables(), self.tree.all_pages())
        for seq in self.waiting:
            if seq.table:
                raise RuntimeError(f"waiting sequence {seq.spec.id} holds pages")


def _path(node: object) -> list[Node]:
    """The nodes from the root down to this one."""
    path: list[Node] = []
    while isinstance(node, Node):
        path.append(node)
        node = node.parent
    return path[::-1]


def _realm(seq: Sequence) -> Realm:
    return Realm(seq.spec.salt, seq.spec.public)


def _precedence(seq: Sequence) -> tuple[bool, int]:
    return (not seq.preempted, seq.arrival)


def _common_pages(a: list[int], b: list[int], most: int) -> int:
    """How many whole pages, at most ``most``, two sequences have in common from the start."""
    for i in range(min(most, len(b) // PAGE_SIZE)):
        page = slice(i * PAGE_SIZE, (i + 1) * PAGE_SIZE)
        if a[page] != b[page]:
            return i
    return min(most, len(b) // PAGE_SIZE)


def _work(seq: Sequence, count: int) -> Work:
    return Work(seq, seq.computed, count, samples=seq.computed + count == len(seq.ids))


def _ending(seq: Sequence, token: int) -> End | None:
    if token in seq.spec.stop_ids and seq.generated > seq.spec.min_tokens:
        return End.STOP
    if seq.generated >= seq.spec.max_tokens:
        return End.LENGTH
    return None
