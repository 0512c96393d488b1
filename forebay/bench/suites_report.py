"""What the suites found: medians over rounds, ratios within them, tables, and every failure by name."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from .compare import Column, Run, ratios
from .servers import BUSY

_RATE = Column(("output_tokens_per_s",))
#: key in the answer -> what a person reads above it, and the figure
COLUMNS: dict[str, tuple[str, Column]] = {
    "output_tokens_per_s": ("tok/s", _RATE),
    "requests_per_s": ("req/s", Column(("requests_per_s",), digits=2)),
    "ttft_p50_s": ("TTFT p50 s", Column(("ttft", "p50"), digits=2)),
    "ttft_p95_s": ("TTFT p95 s", Column(("ttft", "p95"), digits=2)),
    "itl_mean_s": ("ITL mean ms", Column(("itl", "mean"), 1e3)),
    "itl_p50_s": ("ITL p50 ms", Column(("itl", "p50"), 1e3)),
    "peak_pss_bytes": ("PSS MiB", Column(("memory", "pss"), 2**-20, 0)),
    "peak_rss_bytes": ("RSS MiB", Column(("memory", "rss"), 2**-20, 0)),
}


def brief(message: str) -> str:
    """An error with a command line before it and a log behind it, in one line."""
    lines = message.strip().splitlines()
    first = lines[0].rpartition("] ")[2]
    return first if len(lines) == 1 else f"{first}: {lines[-1].strip()}"


def line(run: Run) -> str:
    """One run in a few words."""
    if "error" in run:
        return f"failed: {run['error']}"
    text = f"{run['output_tokens_per_s']:.1f} tokens/s"
    return f"{text}, {run['failed']} of {_asked(run)} failed" if run["failed"] else text


def _asked(run: Run) -> int:
    return int(run["completed"] + run["failed"])


def verdict(rounds: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """``rounds`` as of run_rounds -> suites: {suite: {name: figures}}, starts: {name: median seconds}, warnings
    and problems.

    The first of ``names`` is compared with the others: its tokens/s over theirs. A run in which a request failed has
    no ratio: it would mean nothing.
    """
    suites = list(
        dict.fromkeys(suite for results in rounds for result in results.values() for suite in result["suites"])
    )
    of_suite = {}
    for suite in suites:
        runs = {name: [results[name]["suites"][suite] for results in rounds] for name in names}
        clean = {name: [_clean_rate(run) for run in runs[name]] for name in names}
        of_suite[suite] = {name: _figures(runs[name], ratios(clean[names[0]], clean[name])) for name in names}
    starts = {name: [results[name]["start"] for results in rounds] for name in names}
    return {
        "base": names[0] if names else None,
        "suites": of_suite,
        "starts": {name: _median(times) for name, times in starts.items()},
        "warnings": list(_warnings(rounds)),
        "problems": list(_problems(rounds)),
    }


def _clean_rate(run: Run) -> float | None:
    return None if run.get("failed") else _RATE.of(run)


def _figures(runs: Sequence[Run], ratio: list[float | None]) -> dict[str, Any]:
    return {
        **{key: column.median(runs) for key, (_, column) in COLUMNS.items()},
        "tokens_per_s_per_round": [_RATE.of(run) for run in runs],
        "ratio": _median(ratio),
        "ratio_per_round": ratio,
        "requests": sum(_asked(run) for run in runs if "error" not in run),
        "failed_requests": sum(run["failed"] for run in runs if "error" not in run),
        "failed_runs": sum("error" in run for run in runs),
    }


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _warnings(rounds: Sequence[dict[str, Any]]) -> Iterator[str]:
    for number, results in enumerate(rounds, 1):
        for name, result in results.items():
            if result["busy"] > BUSY:
                yield f"{name}, round {number}: {result['busy']:.0%} of the cores were busy before it was started"


def _problems(rounds: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each thing that went wrong with a server in a round, and in which suites."""
    for number, results in enumerate(rounds, 1):
        for name, result in results.items():
            suites: dict[str, list[str]] = {}
            for suite, run in result["suites"].items():
                for what in _wrong(run):
                    suites.setdefault(what, []).append(suite)
            for what, where in suites.items():
                yield f"{name}, round {number}, {', '.join(where)}: {what}"


def _wrong(run: Run) -> Iterator[str]:
    if "error" in run:
        yield f"failed: {run['error']}"
        return
    for reason, count in run["failures"].items():
        yield f"{count} of {_asked(run)} requests failed: {reason}"
    if run["short_answers"]:
        yield f"{run['short_answers']} answers are shorter than asked"
    if run["usage_missing"]:
        yield "no usage from the server: tokens are counted as frames"


def table(answer: dict[str, Any], suite: str, about: str) -> Table:
    """Medians of one suite, one server a row."""
    base = answer["base"]
    view = Table(title=f"{suite}: {about}", title_justify="left")
    view.add_column("server", no_wrap=True)
    for label, _ in COLUMNS.values():
        view.add_column(label, justify="right")
    view.add_column("failed")
    view.add_column(f"{base} / it (rounds)", min_width=24)
    for name, figures in answer["suites"].get(suite, {}).items():
        cells = [column.shown(figures[key]) for key, (_, column) in COLUMNS.items()]
        view.add_row(name, *cells, _failed(figures), "" if name == base else _ratio(figures))
    return view


def _failed(figures: dict[str, Any]) -> str:
    parts = []
    if runs := figures["failed_runs"]:
        parts.append(f"{runs} of {len(figures['ratio_per_round'])} rounds")
    if requests := figures["failed_requests"]:
        parts.append(f"{requests} of {figures['requests']} requests")
    return ", ".join(parts) or "-"


def _ratio(figures: dict[str, Any]) -> str:
    if figures["ratio"] is None:
        return "-"
    each = ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in figures["ratio_per_round"])
    return f"{figures['ratio']:.2f} ({each})"


def starts_table(answer: dict[str, Any]) -> Table:
    """All contestants, the skipped too: seconds from spawning to ready."""
    view = Table("server", "start s", "what", title="start: spawned to ready", title_justify="left")
    for name, contestant in answer["contestants"].items():
        seconds = answer["starts"].get(name)
        state = "skipped" if contestant["skipped"] else "failed" if seconds is None else f"{seconds:.1f}"
        view.add_row(name, state, contestant["about"])
    return view
