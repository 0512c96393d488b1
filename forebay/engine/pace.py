"""How long a step takes, and so how much of a prompt fits beside answers that run. No torch, no clock.

A step takes ``base + decode * n + prefill * t`` seconds: ``n`` sequences get one token each, and ``t`` tokens of
prompts are computed. The shape (how the three compare) is fitted once, to the steps of the warm-up. What changes with
the machine's load and with the length of contexts is followed by two factors, one on base and decode, one on prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

#: A step beside answers may take so many times what it would take without prompts: their gaps stay under 3 times.
STRETCH = 2.5
#: Tokens of prompts that a step has room for in any case. Less than a page: behind 5,000 tokens a page of a prompt
#: takes the demo model twice as long as a step of 15 answers.
LEAST = 8
#: After so many steps in a row with prompts beside answers, one without is worth it: what prompts add is only known by
#: what a step takes without them. After a surprise, each second step is one, until they are no surprise.
PROBE = 16
SURPRISE = 4 / 3

_WEIGHT = 0.25  # of the newest step
_CLAMP = 2.0  # one step tells at most that things have become so many times slower or faster
_GUESS = (0.01, 0.001, 0.001)  # the shape until something is known
_TINY = 1e-9  # seconds; nothing takes no time at all


class Timed(NamedTuple):
    """A step that was measured: ``decodes`` works of one token, and ``prefill`` tokens of longer ones."""

    decodes: int
    prefill: int
    seconds: float


class Pace:
    """``points``: steps of the warm-up. Without any, the first steps say how long things take."""

    def __init__(self, points: Sequence[Timed] = ()) -> None:
        self.measured = bool(points)
        self._base, self._decode, self._prefill = _fit(points) if points else _GUESS
        self._decoding = _Factor(known=any(point.decodes for point in points))
        self._prefilling = _Factor(known=any(point.prefill for point in points))
        self._mixed = 0  # steps since the last that had no prompts beside answers
        self._probe = PROBE

    def seconds(self, decodes: int, prefill: int = 0) -> float:
        """What a step takes."""
        beside = self._decoding.value * (self._base + self._decode * decodes)
        return beside + self._prefilling.value * self._prefill * prefill

    def observe(self, decodes: int, prefill: int, seconds: float) -> None:
        """A step took so long. One that tells nothing (a clock that stands still) is passed over."""
        if seconds <= 0 or decodes + prefill <= 0:
            return
        self.measured = True
        surprise = not 1 / SURPRISE < seconds / self.seconds(decodes, prefill) < SURPRISE
        if not prefill or surprise:
            self._probe = 1 if surprise else PROBE
        self._mixed = self._mixed + 1 if decodes and prefill else 0
        beside = self.seconds(decodes)
        if not prefill or seconds <= beside:  # the part without prompts cannot take longer than the whole
            self._decoding.follow(seconds / beside, _WEIGHT)
            return
        # What is left is the prompts'. Where that is little, it is mostly the error of the other part.
        expected = self.seconds(decodes, prefill) - beside
        share = expected / (beside + expected)
        self._prefilling.follow((seconds - beside) / expected, _WEIGHT * min(1.0, 2 * share))

    def chunk(self, decodes: int, max_gap: float) -> int:
        """Tokens of prompts in a step beside ``decodes`` sequences, so that it takes at most ``max_gap`` seconds, or
        2.5 times what it takes without them if that is more. Never under 8."""
        beside = self.seconds(decodes)
        room = max(max_gap, STRETCH * beside) - beside
        return max(LEAST, int(room / (self._prefilling.value * self._prefill)))

    def probe(self) -> bool:
        """Whether it is time for a step with decodes alone. Said once: that step may come to nothing."""
        if self._mixed < self._probe:
            return False
        self._mixed = 0
        return True

    def told(self, slots: int, max_gap: float, budget: int) -> tuple[float, float, float, int] | None:
        """base, decode, prefill and chunk as contract.Pace has them, the chunk beside ``slots`` - 1 sequences and in a
        step of ``budget`` tokens. None: nothing was measured yet."""
        if not self.measured:
            return None
        beside = slots - 1
        chunk = max(1, budget - beside)
        if beside and max_gap:
            chunk = min(chunk, self.chunk(beside, max_gap))
        slow = self._decoding.value
        return slow * self._base, slow * self._decode, self._prefilling.value * self._prefill, chunk


class _Factor:
    """A number that follows what is observed: a threefold change within a dozen steps, a single hiccup hardly."""

    def __init__(self, *, known: bool) -> None:
        self.value = 1.0
        self._known = known

    def follow(self, ratio: float, weight: float) -> None:
        """``ratio``: what was observed, in terms of the value."""
        if self._known:
            ratio = min(max(ratio, 1 / _CLAMP), _CLAMP)
        else:  # anything is better than the guess
            self._known, weight = True, 1.0
        self.value = max(_TINY, self.value * (1 + weight * (ratio - 1)))


def _fit(points: Sequence[Timed]) -> tuple[float, float, float]:
    """base, decode and prefill, none negative, with the least sum of squared relative errors: a point that was held up,
    however long, is then off by at most its whole. Of what explains few points equally well, the fewest terms are
    taken; a prompt's token of which there is no example costs its part of the cheapest step."""
    terms = np.array([[1.0, point.decodes, point.prefill] for point in points])
    terms /= np.array([[max(point.seconds, _TINY)] for point in points])
    best, least = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            found = np.zeros(3)
            found[list(chosen)] = np.linalg.lstsq(terms[:, chosen], np.ones(len(points)), rcond=None)[0]
            error = float(np.square(terms @ found - 1).sum())
            if (found >= 0).all() and error < least - 1e-12:
                best, least = found, error
    base, decode, prefill = map(float, best)
    cheapest = min(max(point.seconds, _TINY) / max(1, point.decodes + point.prefill) for point in points)
    return max(base, _TINY), decode, prefill or cheapest
