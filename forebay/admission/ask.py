"""What a request asks of the gate, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import inf


class Rank(IntEnum):
    """Who comes first."""

    LIVE = 0  # a turn of a conversation that goes on
    FIRST = 1
    BATCH = 2


@dataclass(frozen=True, slots=True)
class Ask:
    """``user``: (tenant, user), among whom capacity is shared. ``prompt``: tokens that are to be computed; ``most``: of
    each of ``places`` answers. ``arrival`` in seconds on the gate's clock; ``slo``: seconds from there to the first
    token that are promised, or nothing is done; inf: no promise. ``strict``: the client named it, so an idle
    server refuses, too, what it cannot keep. ``patience``: seconds that it may wait in any case. ``size``: bytes that
    it came in; 0: that says nothing."""

    arrival: float
    user: tuple[str, str] = ("", "")
    rank: Rank = Rank.FIRST
    prompt: int = 0
    most: int = 1
    places: int = 1
    slo: float = inf
    strict: bool = False
    patience: float = inf
    size: int = 0


@dataclass(slots=True, eq=False)
class Ticket:
    """Of one who was let in, or waits to be, since it ``asked``. ``expected``: tokens of each answer; ``tokens``: all
    that came. ``tag`` is its place in the order of users, for ``cost`` tokens. ``predicted``: seconds from arrival to
    the first token, None where nothing was measured yet; ``modelled``: from when it asked, as the model alone has it.
    By ``due`` its first token was promised, and it waits no longer than ``until``: seconds on the gate's clock."""

    ask: Ask
    asked: float
    expected: int
    cost: float
    tag: float
    until: float
    due: float = inf
    predicted: float | None = None
    modelled: float = 0.0
    tokens: int = 0
    first: float | None = None
    granted: bool = False

    @property
    def rest(self) -> int:
        """Tokens that each answer has probably still to come; of one that is longer than expected, a little."""
        so_far = self.tokens // self.ask.places
        return max(self.expected - so_far, min(self.expected // 4, self.ask.most - so_far), 1)
