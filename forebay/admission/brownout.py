"""Doing with less for everybody while requests wait for long, a step at a time, and taking it back.

It goes by the *shortest* wait of a while, as CoDel does ("Controlling Queue Delay", Nichols and Jacobson, 2012): a
queue that was short at any moment of it only took up a burst, and one that never was is a standing queue.
"""

from __future__ import annotations

from enum import IntEnum
from math import inf

#: Seconds of waiting too long, for one step more, and of waiting little, for one step back.
UP, DOWN = 2.0, 0.5


class Level(IntEnum):
    """Each has all that the lower ones have."""

    NORMAL = 0
    NO_SPECULATION = 1
    SHORT = 2  # answers no longer than usual
    LEAN = 3  # older turns are left out of conversations, and older answers told again
    NO_BATCH = 4  # batch work is refused
    FEW_NEW = 5  # a new conversation is let in only if it waits half as long as it may


class Brownout:
    """``target``: seconds that a queue may stand. Below half of it, all is well."""

    def __init__(self, target: float) -> None:
        self.level = Level.NORMAL
        self._target = target
        self._since: float | None = None  # when the while began
        self._least = inf

    def waited(self, seconds: float) -> None:
        """Somebody got a turn after so long."""
        self._least = min(self._least, seconds)

    def look(self, now: float, oldest: float | None) -> Level:
        """To be asked often. ``oldest``: seconds that the one who came first of all who wait has waited; None: nobody
        waits."""
        if self._since is None:
            self._since = now
        if oldest is None:
            self._least = 0.0
        spent = now - self._since
        # Who waits still counts where nobody was let in: that is the worst of all queues.
        least = min(self._least, oldest if oldest is not None else 0.0)
        if least < self._target / 2 and spent >= DOWN:
            self._step(now, -1)
        elif spent >= UP:
            self._step(now, 1 if least > self._target else 0)
        return self.level

    def _step(self, now: float, by: int) -> None:
        self.level = Level(min(max(self.level + by, Level.NORMAL), Level.FEW_NEW))
        self._since, self._least = now, inf
