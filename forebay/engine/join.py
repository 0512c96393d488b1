"""When waiting sequences may join those that run. No torch, no clock: ``now`` is an argument.

Three policies on the same queue, prefix cache and kernels, so that what batching itself gives can be measured.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import islice, takewhile
from typing import Protocol

from .sequence import Sequence, State

#: Seconds that the oldest waits for company, and where requests come in bursts.
WINDOW = 0.1
BURST_WINDOW = 0.01
#: So many that came within the last WINDOW are a burst.
BURST = 4
#: Sequences of one batch.
WINDOW_BATCH = 8


class JoinPolicy(Protocol):
    """``waiting`` is the scheduler's queue: those that were preempted, then by arrival."""

    slots: int
    """Sequences that run at once, at most."""

    def open(self, running: int, waiting: Many[Sequence], now: float) -> int:
        """How many of those waiting, from the first on, may join in this step."""
        ...

    def due(self, waiting: Many[Sequence], now: float) -> float:
        """Seconds until some may join while none runs: 0 where they may now. ``waiting`` is not empty."""
        ...

    def vacancies(self, running: int, waiting: int) -> int:
        """How many more should be sent here (may be negative)."""
        ...


class Continuous:
    """In any step, while there is a slot. With one slot: one by one."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def open(self, running: int, waiting: Many[Sequence], now: float) -> int:
        return max(0, self.slots - running)

    def due(self, waiting: Many[Sequence], now: float) -> float:
        return 0.0

    def vacancies(self, running: int, waiting: int) -> int:
        return self.slots - running - waiting


class Window:
    """Batches: when none runs, and a full batch waits or the oldest has waited 100 ms, those begin, and nobody joins
    until all of them have ended. The 100 ms are 10 where requests come in bursts: at least 4 of those waiting came
    within the last 100 ms.

    One that is preempted still belongs to its batch. Those of a batch need not all join in its first step: the token
    budget may hold few of their prompts.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._batch: set[Sequence] = set()

    def open(self, running: int, waiting: Many[Sequence], now: float) -> int:
        self._batch = {seq for seq in self._batch if seq.state is not State.ENDED}
        if not self._batch and waiting and self._wait(waiting, now) <= 0:
            self._batch = set(islice(waiting, self.slots))
        # They are the first in the queue: preempted, or the oldest that there were.
        return sum(1 for _ in takewhile(self._batch.__contains__, waiting))

    def due(self, waiting: Many[Sequence], now: float) -> float:
        if any(seq.state is not State.ENDED for seq in self._batch):
            return 0.0
        return max(0.0, self._wait(waiting, now))

    def vacancies(self, running: int, waiting: int) -> int:
        # A whole batch may wait here while another runs. Else the two that are sent ahead would be all that the next
        # one finds: it would begin with them, and those in the front's queue would wait for the one after it.
        return self.slots - waiting

    def _wait(self, waiting: Many[Sequence], now: float) -> float:
        """Seconds until a batch is begun, or less than none."""
        if len(waiting) >= self.slots:
            return 0.0
        burst = sum(now - seq.since <= WINDOW for seq in waiting) >= BURST
        return waiting[0].since + (BURST_WINDOW if burst else WINDOW) - now


def policy(batching: str, max_batch: int) -> JoinPolicy:
    """That of the setting ``batching``."""
    if batching == "window":
        return Window(min(WINDOW_BATCH, max_batch))
    return Continuous(1 if batching == "serial" else max_batch)
