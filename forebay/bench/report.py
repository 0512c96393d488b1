"""What a run is told as: a table for people, one JSON line for machines."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .load import Plan, Result, Sample

_LATENCIES = {"ttft": "TTFT", "itl": "ITL per token", "e2e": "end to end"}


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks, linearly. ``values`` must be sorted and not empty."""
    position = (len(values) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Count, mean and percentiles, in the unit of the values; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        "n": len(ordered),
        "mean": statistics.fmean(ordered),
        **{f"p{p}": percentile(ordered, p) for p in (50, 90, 95, 99)},
    }


def summarize(result: Result) -> dict[str, Any]:
    """All of a run as JSON-ready values: seconds, tokens, and rates per second over the whole run."""
    good = [sample for sample in result.samples if sample.failure is None]
    prompt = sum(sample.prompt_tokens for sample in good)
    output = sum(sample.completion_tokens for sample in good)
    return {
        "url": result.url,
        "plan": asdict(result.plan),
        "seconds": result.seconds,
        "completed": len(good),
        "failed": len(result.samples) - len(good),
        "failures": dict(Counter(sample.failure for sample in result.samples if sample.failure)),
        "short_answers": sum(sample.completion_tokens < result.plan.output_tokens for sample in good),
        "usage_missing": sum(sample.usage_missing for sample in good),
        "prompt_tokens": prompt,
        "cached_tokens": sum(sample.cached_tokens for sample in good),
        "output_tokens": output,
        "requests_per_s": len(good) / result.seconds,
        "output_tokens_per_s": output / result.seconds,
        "total_tokens_per_s": (prompt + output) / result.seconds,
        "ttft": spread(sample.ttft for sample in good if sample.ttft is not None),
        "itl": spread(gap for sample in good for gap in sample.itl),
        "e2e": spread(sample.e2e for sample in good),
    }


def show(summary: dict[str, Any]) -> None:
    """The table, then the JSON as the last line of stdout."""
    console = Console()
    plan = summary["plan"]
    console.print(
        f"{summary['url']}  {plan['model']}: {plan['concurrency']} clients, {plan['requests']} requests, "
        f"{plan['prompts']} prompts, seed {plan['seed']}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(_rates(summary))
    console.print(_latencies(summary))
    for warning in _warnings(summary):
        console.print(warning, style="yellow", markup=False, soft_wrap=True)
    print(json.dumps(summary), flush=True)


def _rates(summary: dict[str, Any]) -> Table:
    table = Table("", "total", "per second")
    for name in ("requests", "output tokens", "total tokens"):
        rate = summary[f"{name.replace(' ', '_')}_per_s"]
        table.add_row(name, f"{rate * summary['seconds']:.0f}", f"{rate:.2f}")
    if summary["completed"]:
        table.add_row("prompt tokens each", f"{summary['prompt_tokens'] / summary['completed']:.0f}", "")
    table.add_row("wall time", f"{summary['seconds']:.2f} s", "")
    return table


def _latencies(summary: dict[str, Any]) -> Table:
    table = Table("ms", "mean", "P50", "P90", "P99")
    for key, label in _LATENCIES.items():
        if values := summary[key]:
            table.add_row(label, *(f"{values[column] * 1e3:.1f}" for column in ("mean", "p50", "p90", "p99")))
    return table


def _warnings(summary: dict[str, Any]) -> Iterator[str]:
    for reason, count in summary["failures"].items():
        yield f"failed: {count} x {reason}"
    if summary["short_answers"]:
        yield f"{summary['short_answers']} answers are shorter than asked"
    if summary["usage_missing"]:
        yield "the server sends no usage: tokens are counted as frames"
    if summary["cached_tokens"]:
        yield f"{summary['cached_tokens']} of {summary['prompt_tokens']} prompt tokens came from the prefix cache"


def wide_console() -> Console:
    """Of stdout, for plain text: a name like "x:a:" is no emoji. A file gets whole tables; rich would cut them."""
    width = None if sys.stdout.isatty() else 160
    return Console(width=width, soft_wrap=True, highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def progress(plan: Plan) -> Iterator[Callable[[Sample], None]]:
    """A progress bar on stderr, where that is a terminal; the value is to be called after each request."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=plan.requests * plan.turns)
        yield lambda _: bar.advance(task)
