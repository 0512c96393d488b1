"""What a request gets less of while requests wait for long (see admission/brownout.py), and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..admission.brownout import Level
from ..admission.gate import Gate
from ..contract import GenRequest
from .conversation import KEEP
from .metrics import Result

#: An answer may always have so many tokens.
SHORTEST = 16


class Savings:
    """For one request, as things stand when it comes. ``made``: what it really got less of."""

    def __init__(self, gate: Gate) -> None:
        self._usual = gate.usual() if gate.level >= Level.SHORT else None
        self.lean = gate.level >= Level.LEAN
        self.made: list[str] = []

    def shorten(self, asked: GenRequest) -> GenRequest:
        """Its answer is no longer than answers usually are."""
        if self._usual is None:
            return asked
        most = max(self._usual, asked.min_tokens, SHORTEST)
        if asked.max_tokens is not None and asked.max_tokens <= most:
            return asked
        if "max_tokens" not in self.made:
            self.made.append("max_tokens")
        return replace(asked, max_tokens=most)

    def window(self, context: int) -> int:
        """Tokens that the prompt of a conversation may have before turns are left out."""
        return int(KEEP * context) if self.lean else context


def degraded(made: Sequence[str], result: Result) -> dict[str, str]:
    """The header that tells of it; ``result`` is what the answer cache did."""
    told = [*made, *(["cache"] if result == "stale" else [])]
    return {"x-forebay-degraded": ", ".join(told)} if told else {}
