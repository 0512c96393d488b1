"""One step between scheduler and runner: what is to be computed, and what was drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .sequence import Emit, Logprobs, Sequence

#: Drawn where the logits are broken.
FAILED = -1


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: compute ``count`` tokens from ``start``; ``samples``: and draw the next."""

    seq: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """``works`` to execute (may be none), and the endings that planning itself decided."""

    works: tuple[Work, ...]
    ended: tuple[Emit, ...] = ()

    @property
    def n_tokens(self) -> int:
        return sum(work.count for work in self.works)

    @property
    def n_decodes(self) -> int:
        """Works of one token, whatever it is: they cost the same."""
        return sum(work.count == 1 for work in self.works)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What executing a step gave: a token id per work (without meaning where it does not sample), and by index of
    the work what its order wants to know of log probabilities."""

    tokens: list[int]
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)


class Runner(Protocol):
    """What the loop needs of whatever computes steps."""

    def execute(self, step: Step) -> Drawn:
        """Token ids are 0 where the work does not sample, FAILED where its logits are broken. Executing a step again
        gives the same: nothing but the works' own pages is written."""
        ...
