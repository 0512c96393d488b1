"""What fits: how many pages the memory holds, and how full they will get."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .pages import PAGE_SIZE


def pages_of(tokens: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // PAGE_SIZE)


def pool_pages(memory: int | float, free_bytes: int, page_bytes: int, useful: int) -> int:
    """Pages of a pool. ``memory`` is bytes (int) or a fraction of ``free_bytes`` (float).

    A fraction is cut at ``useful`` pages: more than the batch could fill several times over helps nobody. Bytes
    are taken at their word.
    """
    if isinstance(memory, float):
        return min(int(free_bytes * memory) // page_bytes, useful)
    return memory // page_bytes


def predicted_peak(loads: Iterable[tuple[int, int]]) -> int:
    """Most pages in use at any time, if each (tokens held, tokens still to come) grows by one token a step and
    gives everything back at its end.

    The peak falls on the end of some sequence: just before the i-th longest ends, the i longest are alive and each
    has grown by what the i-th had to come. So it is the maximum of one sum per sequence, not the sum of all maxima
    (the idea is LightLLM's). Rounded up by a page per sequence.
    """
    peak = held = 0
    for i, (now, to_come) in enumerate(sorted(loads, key=lambda load: -load[1]), start=1):
        held += now
        peak = max(peak, held + i * (to_come + PAGE_SIZE - 1))
    return peak // PAGE_SIZE


class OutputGuess:
    """How long answers get: the 90 % quantile of the last finished ones, and at most what was asked for.

    Until 32 answers have ended the guess is the maximum. A sequence that has passed the guess is expected to
    double. Guessing low costs a preemption, guessing high costs idle slots.
    """

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=256)
        self._quantile: int | None = None

    def record(self, generated: int) -> None:
        self._seen.append(generated)
        if len(self._seen) >= 32:
            self._quantile = sorted(self._seen)[len(self._seen) * 9 // 10]

    def remaining(self, generated: int, max_tokens: int) -> int:
        """Tokens still to come, for a sequence that has ``generated`` some."""
        if self._quantile is None:
            return max_tokens - generated
        total = self._quantile if generated < self._quantile else 2 * generated
        return min(max_tokens, max(total, generated + 1)) - generated
