"""What a request asks of the gate, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    token that are promised, or nothing is done; inf: no promise. ``strict``: the client named it, so also an idle server
    refuses what it cannot keep. ``patience``: seconds that it may wait in any case."""

    arrival: float
    user: tuple[str, str] = ("", "")
    rank: Rank = Rank.FIRST
    prompt: int = 0
    most: int = 1
    places: int = 1
    slo: float = inf
    strict: bool = False
    patience: float = inf


@dataclass(slots=True, eq=False)
class Ticket:
    """Of one who was let in. Whoever has it says how it goes: ``saw`` with all that comes."""

    ask: Ask
    predicted: float | None  # seconds from arrival to the first token; None: nothing was measured yet
    expected: int  # tokens of each answer
    tokens: int = 0
    first: float | None = field(default=None)  # when the first token came, on the gate's clock
