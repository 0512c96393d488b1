"""Several runs side by side: the median of a figure over rounds, and ratios round by round.

A run is a summary of ``report.summarize``, perhaps with more keys, or ``{"error": reason}``. What a run does not have
is None here and a dash in a table.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One figure: where it is in a run, and how it is shown."""

    path: tuple[str, ...]
    factor: float = 1.0
    digits: int = 1

    def of(self, run: Run) -> float | None:
        value: Any = run
        for key in self.path:
            value = value.get(key) if value else None
        return None if value is None else float(value)

    def median(self, runs: Sequence[Run]) -> float | None:
        """Over the runs that have it."""
        values = [value for run in runs if (value := self.of(run)) is not None]
        return statistics.median(values) if values else None

    def cell(self, runs: Sequence[Run]) -> str:
        return self.shown(self.median(runs))

    def shown(self, value: float | None) -> str:
        return "-" if value is None else f"{value * self.factor:.{self.digits}f}"


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float | None]:
    """Ours over theirs, round by round; None where one of them is missing or nothing was done."""
    return [a / b if a is not None and b else None for a, b in zip(ours, theirs, strict=True)]
