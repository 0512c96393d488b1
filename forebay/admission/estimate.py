"""When a request's first token will come, from how fast the engine is and what is ahead of it.

A step takes ``base + decode x running + prefill x prompt tokens`` seconds (contract.Pace, measured by the engine). A
place comes free when a running answer ends: the k-th of those that are to be waited for after as many steps as the
k-th shortest rest has tokens, and where more are needed than run, after whole answers more. Meanwhile the prompts that
are ahead are computed in the same steps, so many tokens in each. What the model leaves out (that steps grow with the
context, that answers end early) is learned as one factor: how observed first tokens compare with predicted ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..contract import Load, Pace

_RECENT = 256  # answers whose lengths are remembered
_GUESS = 128  # tokens of an answer while none was seen
_SOME = 8  # answers that make a quantile
_LEARN = 0.1  # weight of the newest observation, at most
_LEARN_SPAN = 2.0  # seconds over which many are learned from
_MOST = math.log(4.0)  # one observation moves the factor as if it were off by no more than that
_LEAST = 0.05  # seconds: shorter predictions are noise
_SURE = 0.12  # what the next may be off by however well the last ones fitted: it is learned a whole wait too late
_LONG = 1.0  # seconds: shorter ones, which refuse nobody, teach the less


class Lengths:
    """Of answers lately, in tokens."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._total = 0

    def add(self, tokens: int) -> None:
        self._recent.append(tokens)
        insort(self._sorted, tokens)
        self._total += tokens
        if len(self._recent) > _RECENT:
            old = self._recent.popleft()
            self._sorted.remove(old)
            self._total -= old

    @property
    def usual(self) -> int | None:
        """Three of four are no longer. None: too few were seen."""
        count = len(self._sorted)
        return self._sorted[min(count - 1, count * 3 // 4)] if count >= _SOME else None

    @property
    def mean(self) -> float | None:
        return self._total / len(self._recent) if self._recent else None

    def expected(self, most: int) -> int:
        """Of an answer of at most ``most``."""
        return max(1, min(most, _GUESS if self.usual is None else self.usual))


class Density:
    """Prompt tokens to be computed per byte that requests came in, lately."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, tokens: int, size: int) -> None:
        if not size:
            return
        self._recent.append(tokens / size)
        insort(self._sorted, tokens / size)
        if len(self._recent) > _RECENT:
            self._sorted.remove(self._recent.popleft())

    def least(self, size: int) -> int:
        """Tokens that nine of ten of that size have at least."""
        count = len(self._sorted)
        return max(1, int(size * self._sorted[count // 10])) if count >= _SOME else 1


class Factor:
    """Observed over predicted times: ``value`` is what they are off by, and nine of ten are off by less than that and
    ``spread``, by which they differ from one another."""

    def __init__(self) -> None:
        self._at = 0.0
        self._log = 0.0  # natural logarithms, as is
        self._off = 0.1  # the mean deviation

    @property
    def value(self) -> float:
        return math.exp(self._log)

    @property
    def spread(self) -> float:
        return math.exp(max(_SURE, 2 * self._off))  # twice the mean deviation

    def learn(self, predicted: float, observed: float, now: float) -> None:
        """``predicted``: without this factor."""
        ratio = math.log(max(observed, _LEAST) / max(predicted, _LEAST))
        off = min(max(ratio - self._log, -_MOST), _MOST)
        # Of hundreds in a second each tells little: they were all predicted by the same light.
        weight = min(_LEARN, (now - self._at) / _LEARN_SPAN) * min(1.0, max(observed, predicted) / _LONG)
        self._at = now
        self._log = min(max(self._log + weight * off, -2 * _MOST), 2 * _MOST)
        self._off += weight * (abs(off) - self._off)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is ahead, as of one moment. ``free``: places that nobody has. ``rests``: tokens still to come of each answer
    that runs, the shortest first; ``owed``: prompt tokens that the engine has not computed; ``length``: tokens of an
    answer."""

    pace: Pace
    slots: int
    free: int
    rests: Sequence[int]
    owed: int
    length: float

    @classmethod
    def of(cls, load: Load, rests: Sequence[int], length: float) -> Outlook | None:
        """None where the engine does not say how fast it is."""
        if load.pace is None or load.slots < 1:
            return None
        free = min(load.slots - load.running - load.waiting, load.credits)
        return cls(load.pace, load.slots, free, rests, load.owed, max(1.0, length))

    def first_token(self, places: int, queued: int, prompt: int) -> float:
        """Seconds until the first token of who is preceded by ``places`` places with ``queued`` prompt tokens and has
        ``prompt`` itself."""
        pace = self.pace
        before = self._steps(places + 1 - self.free)
        running = self.slots if before else max(0, self.slots - max(0, self.free))
        chunk = pace.chunk if running else max(self.owed + queued + prompt, 1)
        ahead = max(before, (self.owed + queued) / chunk)
        steps = ahead + max(1.0, prompt / chunk)
        plain = pace.base + pace.decode * running
        # It comes in the middle of a step, which goes on for another half.
        begun = (plain + pace.prefill * min(chunk, self.owed)) / 2 if running else 0.0
        return begun + steps * plain + pace.prefill * (self.owed + queued + prompt)

    def _steps(self, ends: int) -> float:
        """Until so many answers have ended, where each that ends makes place for another of the usual length."""
        if ends <= 0:
            return 0.0
        rests, length = self.rests or (1,), self.length
        rounds, end = 0, 0.0  # whole lengths that are over
        while (come := bisect_left(rests, end + length)) < ends:
            # Each place that came free within a length comes free again in the next.
            ends -= come
            rounds += 1
            end += length
            if come == len(rests):  # then so in each one
                more, ends = divmod(ends - 1, come)
                rounds, ends = rounds + more, ends + 1
                break
        if not rounds:
            return float(rests[ends - 1])
        within = bisect_left(rests, rounds * length + length)
        return rounds * length + sorted(rest % length for rest in rests[:within])[ends - 1]

    def granted(self, prompt: int) -> float:
        """The same of one whose turn has just come, with all slots taken: a step is underway, and one prompt before."""
        pace = self.pace
        steps = 1.5 + max(1.0, prompt / pace.chunk)
        return steps * (pace.base + pace.decode * self.slots) + pace.prefill * (1.5 * pace.chunk + prompt)

    def work(self, prompt: float, tokens: float) -> float:
        """Seconds that an engine with all slots taken spends on a request: what one more adds to what is to be done."""
        return self.pace.prefill * prompt + tokens * (self.pace.base / self.slots + self.pace.decode)


class Meter:
    """Something per second, over the last ten or so."""

    _SPAN = 10.0

    def __init__(self, now: float) -> None:
        self._sum = 0.0
        self._at = self._begun = now

    def add(self, amount: float, now: float) -> None:
        self._sum = self._sum * math.exp((self._at - now) / self._SPAN) + amount
        self._at = now

    def rate(self, now: float) -> float:
        # A young meter has seen less than its span.
        seen = self._SPAN * (1 - math.exp((self._begun - now) / self._SPAN))
        return self._sum * math.exp((self._at - now) / self._SPAN) / max(seen, 1.0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the server can do for requests as they came lately, and what of it is taken: per second, in tokens, seconds
    and requests. None: not measured yet. ``headroom``: the part of the engine's time that is not asked for."""

    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    prompt_tokens: float | None  # of a request, cached ones not counted
    completion_tokens: float | None
    requests_per_second: float | None
    offered_per_second: float
    admitted_per_second: float
    headroom: float | None
    predicted_ttft: float | None
    running: int
    slots: int
    waiting: int
    max_queue: int
    queued_tokens: int
    max_queued_tokens: int
    brownout_level: int
