"""Serial, window and continuous batching of one model, side by side under the same load.

    python -m forebay.bench.batching [--rounds 3] [--seconds 60] [--server FLAGS]

All three servers are up the whole time, one is loaded at a time, and each round begins with another. In a round each
gets a closed loop of 16 clients, then an open loop at 0.8 x what continuous batching can do, with the same arrivals
and prompts for all. Nobody is refused. Where the open loop is more than a server can do, its queue grows to the end of
it: such latencies grow with ``--seconds``. Medians over rounds count. The last line of the output is JSON.

The most that serial can do is arithmetic: 1 / the time of a request that is alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from .. import catalog, config
from ..contract import ForebayError
from . import overload_report
from .compare import Column
from .load import Plan, run_closed_loop
from .machine import machine, told
from .openloop import Due, Phase, crowd, poisson, run_open_loop
from .overload import GATE_OFF, MODEL, serving
from .report import summarize, wide_console
from .servers import Server, ServerFailed, busy, stop_on_term
from .workload import draw_seed

KINDS = ("serial", "window", "continuous")
_PART = 0.8  # of what continuous batching can do
_PATIENCE = 1800.0  # for the queue of the slowest
_COLUMNS = {
    "closed: requests/s": Column(("closed", "requests_per_s"), digits=2),
    "latency mean s": Column(("closed", "e2e", "mean"), digits=2),
    "open: offered/s": Column(("open", "offered"), digits=2),
    "latency P50 s": Column(("open", "e2e", "p50"), digits=2),
    "latency P99 s": Column(("open", "e2e", "p99"), digits=2),
    "TTFT P50 s": Column(("open", "ttft", "p50"), digits=2),
    "TTFT P99 s": Column(("open", "ttft", "p99"), digits=2),
    "ITL mean ms": Column(("open", "itl", "mean"), 1e3),
    "goodput/s": Column(("open", "goodput"), digits=2),
}


def closed(server: Server, plan: Plan) -> dict[str, Any]:
    summary = summarize(asyncio.run(run_closed_loop(server.endpoint, plan)))
    if summary["failed"]:
        raise ServerFailed(f"requests failed: {summary['failures']}")
    return summary


def opened(server: Server, plan: Plan, dues: Sequence[Due], seconds: float) -> dict[str, Any]:
    trace = asyncio.run(run_open_loop(server.endpoint, plan, dues, seconds, grace=_PATIENCE))
    return overload_report.summarize(trace, overload_report.Slo())


def run_round(
    servers: Mapping[str, Server], plan: Plan, number: int, rate: float | None, seconds: float
) -> dict[str, Any]:
    """{kind: {closed, open}}. ``rate`` of the open loop; None: from this round's closed loops."""
    kinds = [*KINDS[number % 3 :], *KINDS[: number % 3]]
    this = replace(plan, seed=f"{plan.seed}/{number}")
    found: dict[str, Any] = {kind: {"closed": closed(servers[kind], this)} for kind in kinds}
    rate = rate or _PART * found["continuous"]["closed"]["requests_per_s"]
    dues = crowd(poisson([Phase(rate, seconds)], this.seed))
    for kind in kinds:
        found[kind]["open"] = opened(servers[kind], replace(this, seed=f"{this.seed}/open"), dues, seconds)
        shown = ", ".join(f"{name} {column.shown(column.of(found[kind]))}" for name, column in _COLUMNS.items())
        click.echo(f"round {number + 1}, {kind}: {shown}", err=True)
    return found


def verdict(rounds: Sequence[Mapping[str, Any]], alone: float) -> dict[str, Any]:
    """Medians by kind, and continuous over serial at its best. ``alone``: seconds of one request by itself."""
    rate = _COLUMNS["closed: requests/s"].median([found["continuous"] for found in rounds])
    return {
        "alone_s": alone,
        "serial_at_best_per_s": 1 / alone,
        "continuous_over_serial_at_best": None if rate is None else rate * alone,
        "medians": {
            kind: {name: column.median([found[kind] for found in rounds]) for name, column in _COLUMNS.items()}
            for kind in KINDS
        },
    }


def table(rounds: Sequence[Mapping[str, Any]]) -> Table:
    view = Table("batching", *_COLUMNS)
    for kind in KINDS:
        view.add_row(kind, *(column.cell([found[kind] for found in rounds]) for column in _COLUMNS.values()))
    return view


@click.command(help=__doc__)
@click.option("--model", default=MODEL, show_default=True, help="As for forebay serve.")
@click.option("--server", "flags", default="", help="More flags of forebay serve, as one string.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--clients", type=click.IntRange(1), default=16, show_default=True, help="Of the closed loop.")
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Of the closed loop.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Of the open loop. [default: 0.8 x capacity]")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="Of the open loop.")
@click.option("--words", type=click.IntRange(1), default=300, show_default=True, help="Words of a prompt.")
@click.option("--tokens", type=click.IntRange(1), default=100, show_default=True, help="Tokens of an answer.")
@click.option("--seed", help="Of prompts and arrivals; drawn if not given.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Everything, indented.")
def main(
    model: str,
    flags: str,
    rounds: int,
    clients: int,
    requests: int,
    rate: float | None,
    seconds: float,
    words: int,
    tokens: int,
    seed: str | None,
    file: Path | None,
) -> None:
    stop_on_term()
    facts = machine() | {"busy": busy()}
    click.echo(told(facts), err=True)
    path = catalog.resolve(model, config.load().paths.data_dir).path
    plan = Plan(clients, requests, words, tokens, 0, seed or draw_seed())
    done: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        servers = {
            kind: stack.enter_context(serving(path, ["--batching", kind, *GATE_OFF, *shlex.split(flags)], plan))
            for kind in KINDS
        }
        single = replace(plan, concurrency=1, requests=4, seed=f"{plan.seed}/alone")
        alone = closed(servers["serial"], single)["e2e"]["p50"]
        for number in range(rounds):
            done.append(run_round(servers, plan, number, rate, seconds))
            # The same rate in all rounds: medians should be of one load.
            rate = rate or _PART * done[0]["continuous"]["closed"]["requests_per_s"]
    found = verdict(done, alone)
    console = wide_console()
    console.print(table(done))
    console.print(
        f"one request alone takes {alone:.2f} s: serial can do {found['serial_at_best_per_s']:.2f} requests/s at best, "
        f"continuous does {found['continuous_over_serial_at_best']:.2f} x that"
    )
    answer = {"bench": "batching", "machine": facts, "model": model, "server": flags, "plan": asdict(plan), **found}
    if file:
        file.write_text(json.dumps({**answer, "rounds": done}, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps({**answer, "rounds": done}))


if __name__ == "__main__":
    try:
        main()
    except ForebayError as error:
        click.echo(f"error: {error.message}", err=True)
        sys.exit(1)
