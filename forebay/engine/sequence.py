"""The nouns of the engine: GenSpec (the frozen order), Sequence (the only mutable one), Emit (the frozen news).

Torch-free: the front imports this file to speak with the engine process.

Owed work of a sequence = ``len(ids) - computed`` (drafts will add to it). That one number is a prefill, a chunk
of it, what a cache hit leaves, or a decode step; the scheduler knows no phases.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class GenSpec(msgspec.Struct, frozen=True, array_like=True):
    """One order to generate. ``id`` is the client's, unique among open requests.

    ``stop_ids`` end the answer (the end-of-turn ids are among them unless they are to be ignored); the stopping
    token is emitted and counted. ``temperature`` 0 is greedy. ``seed`` is always set: the engine draws no
    randomness of its own. ``deadline`` (monotonic seconds): expires if prefill has not begun by then.
    ``salt`` selects the prefix tree: sequences share pages only under the same salt, but for the first ``public`` pages
    (whole ones), which all may share. ``ttl``: this is a turn of a
    conversation that may go on for so many seconds after it; 0: it is none. ``logit_bias`` maps a token id
    to what is added to its logit; ``bad_words`` are sequences of ids (none empty) whose last may not follow the
    others. What each number of sampling means is in sample.py. ``logprobs``: with each token, log probabilities of it
    and of so many of the likeliest; None: of none.
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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: list[list[int]] = []
    logprobs: int | None = None
    ttl: float = 0.0
    public: int = 0


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities where one token was drawn, as the model itself has them: before biases,
    penalties and temperature. ``ids`` are the likeliest, ``values`` theirs, in falling order."""

    chosen: float
    ids: list[int]
    values: list[float]


class End(StrEnum):
    """How a sequence ended. Exactly one per accepted order (law 1)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUSED = "refused"
    ERROR = "error"


class Emit(msgspec.Struct, frozen=True, array_like=True):
    """News of one sequence from one step. ``started`` is set by the loop when prefill began (monotonic s).
    ``logprobs`` has one entry per token where the order asks for them. ``cached`` tokens of the prompt were not
    computed; ``tier`` is the slowest that had any of them, or nothing."""

    id: int
    tokens: list[int] = []
    end: End | None = None
    detail: str = ""
    cached: int = 0
    started: float = 0.0
    logprobs: list[Logprobs] = []
    tier: str = ""


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


class Tally:
    """The distinct ids of a sequence in order of appearance, and how often each was generated: 0 for those that only
    the prompt has. Takes O(1) per new id, whatever the length."""

    __slots__ = ("_at", "counts", "ids")

    def __init__(self, prompt: Iterable[int]) -> None:
        self.ids = array("q", dict.fromkeys(prompt))
        self.counts = array("q", bytes(8 * len(self.ids)))
        self._at = {id: i for i, id in enumerate(self.ids)}

    @classmethod
    def of(cls, spec: GenSpec) -> Tally | None:
        """None where no penalty asks for it. Only the repetition penalty looks at the prompt."""
        if spec.repetition_penalty == 1:
            return cls(()) if spec.frequency_penalty or spec.presence_penalty else None
        return cls(spec.ids)

    def add(self, id: int) -> None:
        at = self._at.setdefault(id, len(self.ids))
        if at == len(self.ids):
            self.ids.append(id)
            self.counts.append(0)
        self.counts[at] += 1


class BadWords:
    """Which ids would complete one of the sequences that must not be generated. Longer ones are found by their id
    before the last, so that a step looks only at those that could be meant."""

    __slots__ = ("_longer", "_single")

    def __init__(self, words: list[list[int]]) -> None:
        self._single = [word[0] for word in words if len(word) == 1]
        self._longer: dict[int, list[list[int]]] = {}
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)

    def next(self, ids: list[int], generated: int) -> list[int]:
        """Ids that may not come after ``ids``, of which the last ``generated`` are the answer."""
        found = list(self._single)
        for word in self._longer.get(ids[-1], ()):
            before = word[:-1]
            if len(before) <= generated and ids[-len(before) :] == before:
                found.append(word[-1])
        return found


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one order. Only the scheduler writes it.

    ``ids`` is prompt + generated; ``computed`` tokens of it have K and V in the pages of ``table``. ``inserted``
    whole pages of the table are in the prefix tree. ``cached`` prompt tokens were there at the first admission, the
    slowest of them from ``tier``; ``fetch`` brought some. ``tally`` and ``bad_words`` are there only where the order
    asks for them. ``since`` (monotonic s): when it came. ``counted``: of one that was cancelled, so many tokens are of
    use to a later turn; None: all.
    """

    spec: GenSpec
    arrival: int
    ids: list[int]
    since: float = 0.0
    state: State = State.WAITING
    computed: int = 0
    table: list[int] = field(default_factory=list)
    inserted: int = 0
    node: object | None = None
    cached: int = 0
    tier: str = ""
    fetch: object | None = None
    started: float = 0.0
    preempted: bool = False
    cancelled: bool = False
    counted: int | None = None
    tally: Tally | None = None
    bad_words: BadWords | None = None

    @classmethod
    def of(cls, spec: GenSpec, arrival: int, since: float = 0.0) -> Sequence:
        bad_words = BadWords(spec.bad_words) if spec.bad_words else None
        return cls(spec, arrival, list(spec.ids), since, tally=Tally.of(spec), bad_words=bad_words)

    def append(self, token: int) -> None:
        """Take the next token of the answer."""
        self.ids.append(token)
        if self.tally is not None:
            self.tally.add(token)

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
