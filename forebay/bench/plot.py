"""A picture of the suites: tokens/s by suite and server, with the range of the rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Bar = tuple[str, float, float, float]


def bars(answer: dict[str, Any], name: str) -> list[Bar]:
    """(suite, median, how far below it the worst round is, how far above it the best), 0 where all rounds failed."""
    found = []
    for suite, of_server in answer["suites"].items():
        rates = [rate for rate in of_server[name]["tokens_per_s_per_round"] if rate is not None]
        middle = of_server[name]["output_tokens_per_s"] or 0.0
        found.append((suite, middle, middle - min(rates, default=middle), max(rates, default=middle) - middle))
    return found


def save(answer: dict[str, Any], path: Path) -> None:
    """``answer`` is what the suites end in."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    names, suites = list(answer["starts"]), list(answer["suites"])
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        found = bars(answer, name)
        places = [suite + (i - (len(names) - 1) / 2) * width for suite in range(len(suites))]
        error = [[low for _, _, low, _ in found], [high for _, _, _, high in found]]
        drawn = axes.bar(places, [middle for _, middle, _, _ in found], width, yerr=error, label=name, capsize=2)
        labels = [f"{middle:.0f}" if middle else "failed" for _, middle, _, _ in found]
        axes.bar_label(drawn, labels=labels, fontsize=7, padding=2, rotation=90)
    axes.set_xticks(range(len(suites)), suites)
    axes.margins(y=0.15)
    axes.set_ylabel("output tokens/s (median; lines: range of the rounds)")
    machine = answer["machine"]
    axes.set_title(f"{answer['settings']['model']}, {machine['cpu']}, {machine['cores']} cores", fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130, format="png")
