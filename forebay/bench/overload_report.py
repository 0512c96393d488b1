"""What an open loop found: goodput, refusals, fairness, recovery, verdicts; a table and a picture of the curve.

**Goodput** is answers per second of offered time that came in full, as long as asked, and met the SLO: the first text
in time, and the mean gap between tokens too. Answers that met it but were shorter than asked are told apart.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from .compare import Column, Run
from .openloop import Outcome, Trace
from .report import percentile, spread

#: Codes of those that were refused only after they had waited.
_WAITED = ("deadline_exceeded",)
#: What a person reads above it -> the figure of a point. Rates are per second, TTFT in s, the rest of times in ms.
COLUMNS: dict[str, Column] = {
    "offered": Column(("offered",), digits=2),
    "goodput": Column(("goodput",), digits=2),
    "let in": Column(("admitted",), digits=0),
    "refused": Column(("refused",), digits=0),
    "expired": Column(("expired",), digits=0),
    "failed": Column(("failed",), digits=0),
    "short": Column(("short",), digits=0),
    "left": Column(("left",), digits=0),
    "TTFT P50": Column(("ttft", "p50"), digits=2),
    "P99": Column(("ttft", "p99"), digits=2),
    "ITL": Column(("itl", "mean"), 1e3),
    "ITL P99": Column(("itl", "p99"), 1e3),
    "no P99": Column(("refusal", "p99"), 1e3),
    "lag P99": Column(("lag", "p99"), 1e3),
    "waiting": Column(("most_waiting",), digits=0),
    "PSS MiB": Column(("memory_after", "pss"), 2**-20, 0),
}


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds to the first text, and per token after it in the mean."""

    ttft: float = 4.0
    itl: float = 0.15

    def met(self, outcome: Outcome) -> bool:
        return outcome.whole and outcome.first is not None and outcome.first <= self.ttft and outcome.gap <= self.itl


@dataclass(frozen=True, slots=True)
class Verdict:
    """One criterion: what was seen, and the limit it was held against; ``ok`` None where nothing was seen."""

    name: str
    seen: float | None
    limit: float
    ok: bool | None

    @classmethod
    def most(cls, name: str, seen: float | None, limit: float) -> Verdict:
        return cls(name, seen, limit, None if seen is None else seen <= limit)

    @classmethod
    def least(cls, name: str, seen: float | None, limit: float) -> Verdict:
        return cls(name, seen, limit, None if seen is None else seen >= limit)

    def line(self) -> str:
        state = {True: "ok", False: "MISSED", None: "not seen"}[self.ok]
        seen = "-" if self.seen is None else f"{self.seen:.4g}"
        return f"{state:8} {self.name}: {seen} (limit {self.limit:.4g})"


def summarize(trace: Trace, slo: Slo) -> dict[str, Any]:
    """All of a trace as JSON-ready values. Each attempt counts as a request of its own, in all but ``offered``."""
    tried = trace.outcomes
    refused = [outcome for outcome in tried if outcome.refused]
    admitted = [outcome for outcome in tried if not outcome.refused and outcome.failure is None]
    at_once = [outcome for outcome in refused if outcome.code not in _WAITED]
    met = [outcome for outcome in admitted if slo.met(outcome)]
    whole = [outcome for outcome in admitted if outcome.whole]
    good = [outcome for outcome in met if outcome.completion_tokens >= trace.plan.output_tokens]
    failures = Counter(outcome.failure for outcome in tried if outcome.failure is not None)
    return {
        "seconds": trace.seconds,
        "offered": sum(not outcome.attempt for outcome in tried) / trace.seconds,
        "attempted": len(tried) / trace.seconds,
        "goodput": len(good) / trace.seconds,
        "goodput_with_short": len(met) / trace.seconds,
        "admitted": len(admitted),
        "whole": len(whole),
        "short": sum(outcome.completion_tokens < trace.plan.output_tokens for outcome in whole),
        "left": sum(outcome.left for outcome in tried),
        "refused": len(refused),
        "codes": codes(refused),
        "expired": sum(outcome.code in _WAITED for outcome in tried),
        "failed": sum(failures.values()),
        "failures": dict(failures),
        "statuses": {
            str(status): count for status, count in sorted(Counter(o.status for o in tried).items()) if status
        },
        "ttft": spread(_first_texts(admitted)),
        "itl": spread(gap for outcome in whole for gap in outcome.gaps),
        "e2e": spread(outcome.took for outcome in whole),
        "refusal": spread(outcome.took for outcome in at_once),
        "refusal_from_sending": spread(outcome.took - outcome.lag for outcome in at_once),
        "refusal_by_code": {
            code: spread(outcome.took for outcome in refused if outcome.code == code)
            for code in sorted({outcome.code for outcome in refused})
        },
        "retry_after": spread(outcome.retry_after for outcome in refused if outcome.retry_after is not None),
        "lag": _with_most(outcome.lag for outcome in tried),
        "stall": _with_most(trace.stalls),
        "retried": sum(outcome.attempt == 1 for outcome in tried),
        "first_retry_success": share(outcome.whole for outcome in tried if outcome.attempt == 1),
        "predicted": predictions(tried),
    }


def _first_texts(admitted: Iterable[Outcome]) -> Iterator[float]:
    """Who left without a text waited at least so long for it."""
    for outcome in admitted:
        if outcome.first is not None:
            yield outcome.first
        elif outcome.left:
            yield outcome.took


def _with_most(values: Iterable[float]) -> dict[str, float] | None:
    found = list(values)
    whole = spread(found)
    return None if whole is None else {**whole, "max": max(found)}


def codes(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Statuses, with the code of those that have one: ``503 queue_full``."""
    return dict(Counter(f"{outcome.status} {outcome.code}".strip() for outcome in outcomes))


def share(values: Iterable[bool]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def predictions(outcomes: Iterable[Outcome]) -> dict[str, float] | None:
    """TTFT as it was (from the sending) over what the server had said; None where it said nothing."""
    ratios = sorted(
        (outcome.first - outcome.lag) / outcome.predicted
        for outcome in outcomes
        if outcome.first is not None and outcome.predicted
    )
    if not ratios:
        return None
    within = sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios)
    return {"n": len(ratios), **{f"p{p}": percentile(ratios, p) for p in (10, 50, 90)}, "within_2x": within}


def jain(values: Sequence[float]) -> float | None:
    """1 where all have the same, 1/n where one has everything (Jain, Chiu and Hawe, 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def served(outcomes: Iterable[Outcome], users: Iterable[str]) -> dict[str, int]:
    """Tokens of each user's whole answers, prompts included."""
    tokens = dict.fromkeys(users, 0)
    for outcome in outcomes:
        if outcome.whole:
            tokens[outcome.user] += outcome.prompt_tokens + outcome.completion_tokens
    return tokens


def recovery(outcomes: Sequence[Outcome], begin: float, end: float, window: int = 5) -> dict[str, float | None]:
    """Seconds after a burst from ``begin`` to ``end`` until all is as before it.

    ``admitted``: until the first request after which none is refused or fails any more. ``ttft``: until the first from
    which on the median TTFT of every ``window`` requests in a row is within 1.5 x the median before the burst. The
    greater counts (``seconds``). None: not within what was offered.
    """
    before = [o.first for o in outcomes if o.at < begin and o.whole and o.first is not None]
    after = sorted((o for o in outcomes if o.at >= end), key=lambda o: o.at)
    usual = statistics.median(before) if before else None
    found: dict[str, float | None] = {"usual_ttft": usual, "admitted": None, "ttft": None, "seconds": None}
    if not after or usual is None:
        return found
    found["admitted"] = _since(
        [o.at - end for o in after], [o.whole or (o.left and o.first is not None) for o in after]
    )
    texts = [(o.at - end, o.first) for o in after if o.first is not None]
    medians = (
        [statistics.median(first for _, first in texts[i : i + window]) for i in range(max(1, len(texts) - window + 1))]
        if texts
        else []
    )
    found["ttft"] = _since([at for at, _ in texts], [middle <= 1.5 * usual for middle in medians])
    if found["admitted"] is not None and found["ttft"] is not None:
        found["seconds"] = max(found["admitted"], found["ttft"])
    return found


def _since(times: Sequence[float], good: Sequence[bool]) -> float | None:
    """The first time from which on all is good; 0 if it always was."""
    if not good or not good[-1]:
        return None
    last_bad = max((i for i, fine in enumerate(good) if not fine), default=None)
    return 0.0 if last_bad is None else times[last_bad + 1]


def dead(before: Mapping[str, float], after: Mapping[str, float], outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Tokens that the server computed for nobody, by its /metrics before and after, both taken while it was idle.

    ``computed``: all tokens of all engine steps (``vllm:iteration_tokens_total_sum``): prompts as far as they were not
    cached, and one for each token of an answer but the first, which comes with the prompt's last. ``received``: the
    same of the answers that came in full, by their usage. ``told``: generation_tokens + prompt_tokens, which the server
    counts from a request's first token on, against the usage of these answers: what was computed before a first token
    is not in it.
    """

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    whole = [outcome for outcome in outcomes if outcome.whole]
    computed = grown("vllm:iteration_tokens_total_sum")
    received = sum(o.prompt_tokens - o.cached_tokens + max(0, o.completion_tokens - 1) for o in whole)
    told = grown("vllm:generation_tokens_total") + grown("vllm:prompt_tokens_total")
    told_received = sum(o.prompt_tokens + o.completion_tokens for o in whole)
    return {
        "computed": computed,
        "received": received,
        "share": (computed - received) / computed if computed else None,
        "told": told,
        "told_received": told_received,
        "told_share": (told - told_received) / told if told else None,
    }


def medians(points: Sequence[Run]) -> list[dict[str, Any]]:
    """One row for each variant and multiple, in order: medians over the repeats."""
    keys = {(point["variant"], point["multiple"]) for point in points}
    rows = []
    for variant, multiple in sorted(keys, key=lambda key: (key[0] != "gate", key[0], key[1])):
        these = [point for point in points if (point["variant"], point["multiple"]) == (variant, multiple)]
        figures = {name: column.median(these) for name, column in COLUMNS.items()}
        rates = [point["goodput"] for point in these]
        rows.append({"variant": variant, "multiple": multiple, "goodputs": rates, **figures})
    return rows


def judge(points: Sequence[Run], slo: Slo, bound: int) -> list[Verdict]:
    """The criteria of the curve, of the points with the gate on. ``bound``: requests that may wait."""
    gated = [point for point in points if point["variant"] == "gate"]
    rows = medians(gated)
    peak = max((row["goodput"] for row in rows), default=0.0)
    loaded = [row["goodput"] / peak for row in rows if row["multiple"] >= 1 and peak]
    odd = sum(count for p in gated for status, count in p["statuses"].items() if status not in ("200", "429", "503"))
    failed = sum(point["failed"] for point in gated)
    memory = [point["memory_after"]["pss"] or point["memory_after"]["rss"] for point in gated]
    growth = max(memory[1:]) / memory[1] - 1 if len(memory) > 2 else None
    waiting = [point["most_waiting"] for point in gated if point["most_waiting"] is not None]
    return [
        Verdict.least("goodput over its peak, worst at >= 1 x", min(loaded, default=None), 0.9),
        Verdict.most("TTFT P99 of the admitted, s, worst", _worst(rows, "P99"), slo.ttft),
        Verdict.most("refusal P99, s, worst", _worst(rows, "no P99"), 0.05),
        Verdict.most("statuses other than 200, 429, 503", odd, 0),
        Verdict.most("failures", failed, 0),
        Verdict.most("growth of memory from the second point on", growth, 0.05),
        Verdict.most("most requests waiting", max(waiting, default=None), bound),
    ]


def _worst(rows: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def table(points: Sequence[Run]) -> Table:
    """Medians of the curve, a row for each variant and multiple of the capacity."""
    view = Table(title="requests/s, TTFT in s, ITL, refusals and lag in ms", title_justify="left")
    view.add_column("server", no_wrap=True)
    for name in ("x", *COLUMNS):
        view.add_column(name, justify="right")
    for row in medians(points):
        view.add_row(
            row["variant"], f"{row['multiple']:g}", *(column.shown(row[name]) for name, column in COLUMNS.items())
        )
    return view


def picture(points: Sequence[Run], slo: Slo, title: str, path: Path) -> None:
    """Goodput and P99 TTFT over what was offered, in multiples of the capacity."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow, and only in the bench extra

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rates, waits = figure.subplots(1, 2)
    rows = medians(points)
    for variant in dict.fromkeys(row["variant"] for row in rows):
        these = [row for row in rows if row["variant"] == variant]
        x = [row["multiple"] for row in these]
        middle = [row["goodput"] for row in these]
        low = [row["goodput"] - min(row["goodputs"]) for row in these]
        high = [max(row["goodputs"]) - row["goodput"] for row in these]
        rates.errorbar(x, middle, yerr=[low, high], marker="o", capsize=3, label=variant)
        with_text = [row for row in these if row["P99"] is not None]
        waits.plot([r["multiple"] for r in with_text], [r["P99"] for r in with_text], marker="o", label=variant)
    ticks = sorted({row["multiple"] for row in rows})
    waits.axhline(slo.ttft, color="grey", linestyle="--", linewidth=1, label=f"SLO {slo.ttft:g} s")
    rates.set_ylabel("answers/s that met the SLO (median; lines: range)")
    waits.set_ylabel("P99 of TTFT of the admitted, s")
    rates.set_ylim(bottom=0)
    waits.set_yscale("log")
    for axes in (rates, waits):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
        axes.set_xlabel("offered / capacity")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130, format="png")
