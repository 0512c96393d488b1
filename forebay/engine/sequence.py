"""The nouns of the engine: GenSpec (the frozen order), Sequence (the only mutable one), Emit (the frozen news).

Torch-free: the front imports this file to speak with the engine process.

Owed work of a sequence = ``len(ids) - computed`` (drafts will add to it). That one number is a prefill, a chunk
of it, what a cache hit leaves, or a decode step; the scheduler knows no phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class GenSpec(msgspec.Struct, frozen=True, array_like=True):
    """One order to generate. ``id`` is the client's, unique among open requests.

    ``stop_ids`` end the answer (the end-of-turn ids are among them unless they are to be ignored); the stopping
    token is emitted and counted. ``temperature`` 0 is greedy. ``seed`` is always set: the engine draws no
    randomness of its own. ``deadline`` (monotonic seconds): expires if prefill has not begun by then.
    ``salt`` selects the prefix tree: sequences share pages only under the same salt.
    """

    id: int
    ids: list[int]
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: list[int] = []
    salt: str = ""
    deadline: float | None = None


class End(StrEnum):
    """How a sequence ended. Exactly one per accepted order (law 1)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUSED = "refused"
    ERROR = "error"


class Emit(msgspec.Struct, frozen=True, array_like=True):
    """News of one sequence from one step. ``started`` is set by the loop when prefill began (monotonic s)."""

    id: int
    tokens: list[int] = []
    end: End | None = None
    detail: str = ""
    cached: int = 0
    started: float = 0.0


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


#: All legal transitions. WAITING -> WAITING never happens; RUNNING -> WAITING is a preemption.
TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        (State.WAITING, State.RUNNING),
        (State.WAITING, State.ENDED),
        (State.RUNNING, State.WAITING),
        (State.RUNNING, State.ENDED),
    }
)


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one order. Only the scheduler writes it.

    ``ids`` is prompt + generated; ``computed`` tokens of it have K and V in the pages of ``table``. ``inserted``
    whole pages of the table are in the prefix tree. ``cached`` prompt tokens came from the tree at the first
    admission.
    """

    spec: GenSpec
    arrival: int
    ids: list[int]
    state: State = State.WAITING
    computed: int = 0
    table: list[int] = field(default_factory=list)
    inserted: int = 0
    node: object | None = None
    cached: int = 0
    started: float = 0.0
    preempted: bool = False
    cancelled: bool = False

    @classmethod
    def of(cls, spec: GenSpec, arrival: int) -> Sequence:
        return cls(spec, arrival, list(spec.ids))

    @property
    def owed(self) -> int:
        return len(self.ids) - self.computed

    @property
    def generated(self) -> int:
        return len(self.ids) - len(self.spec.ids)

    @property
    def remaining(self) -> int:
        """Output tokens it may still produce."""
        return self.spec.max_tokens - self.generated

    def move(self, to: State) -> None:
        """Change state. Raises RuntimeError on a transition that is not in the table."""
        if (self.state, to) not in TRANSITIONS:
            raise RuntimeError(f"sequence {self.spec.id}: {self.state} -> {to} is not a legal transition")
        self.state = to
