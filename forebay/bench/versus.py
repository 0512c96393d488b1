"""Forebay against the baseline, interleaved in one run on one machine.

    python -m forebay.bench.versus --model smollm2-135m-instruct [--repeats 3] [--concurrency 16] [--requests 16]

Both servers stay up the whole time (each idle while the other is measured) and compute in the same dtype. Rounds
alternate, so that a slow minute of the machine hits both; each round has its own prompts, the same for both. The
last line of the output is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import click
from rich.table import Table

from ..contract import ForebayError
from .client import Endpoint
from .compare import Column, ratios
from .load import Plan, run_closed_loop
from .machine import machine, told
from .report import summarize, wide_console
from .servers import ServerFailed, free_port, running, stop_on_term
from .workload import draw_seed

NAMES = ("baseline", "forebay")
_COLUMNS = {
    "requests/s": Column(("requests_per_s",), digits=2),
    "output tok/s": Column(("output_tokens_per_s",)),
    "latency mean s": Column(("e2e", "mean"), digits=2),
    "latency P99 s": Column(("e2e", "p99"), digits=2),
    "TTFT P50 s": Column(("ttft", "p50"), digits=2),
    "ITL mean ms": Column(("itl", "mean"), 1e3),
}


def alternate(endpoints: Mapping[str, Endpoint], plan: Plan, repeats: int) -> list[dict[str, Any]]:
    """``repeats`` rounds over all endpoints in turn -> one {name: summary} per round.

    Only the first round warms up. Raises ServerFailed if any request failed: a ratio would mean nothing.
    """
    rounds = []
    for number in range(repeats):
        this = replace(plan, seed=f"{plan.seed}.{number}", warmup=plan.warmup if number == 0 else 0)
        results = {}
        for name, endpoint in endpoints.items():
            results[name] = summarize(asyncio.run(run_closed_loop(endpoint, this)))
            if results[name]["failed"]:
                raise ServerFailed(f"{name}: requests failed: {results[name]['failures']}")
            click.echo(f"round {number + 1}, {name}: {results[name]['requests_per_s']:.2f} requests/s", err=True)
        rounds.append(results)
    return rounds


def compare(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Requests/s of forebay over those of the baseline: the ratio of the medians, and that of each round."""
    rate = {name: [results[name]["requests_per_s"] for results in rounds] for name in NAMES}
    return {
        "median_requests_per_s": {name: statistics.median(rate[name]) for name in NAMES},
        "ratio_of_medians": statistics.median(rate["forebay"]) / statistics.median(rate["baseline"]),
        "ratio_per_round": ratios(rate["forebay"], rate["baseline"]),
    }


def table(rounds: list[dict[str, Any]]) -> Table:
    view = Table("round", "server", *_COLUMNS)
    for number, results in enumerate(rounds, 1):
        for name in NAMES:
            view.add_row(str(number), name, *(column.cell([results[name]]) for column in _COLUMNS.values()))
    view.add_section()
    for name in NAMES:
        view.add_row(
            "median", name, *(column.cell([results[name] for results in rounds]) for column in _COLUMNS.values())
        )
    return view


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=16, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=16, show_default=True, help="Per round and server.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=300, show_default=True)
@click.option("--output-tokens", type=click.IntRange(1), default=100, show_default=True)
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True)
@click.option("--seed", help="Of the prompts; drawn if not given.")
@click.option("--serve-args", default="", help="More arguments for `forebay serve`, as one string.")
def main(model: str, dtype: str, repeats: int, serve_args: str, **options: Any) -> None:
    stop_on_term()
    options["seed"] = options["seed"] or draw_seed()
    plan = Plan(**options)
    try:
        _compare(model, dtype, repeats, plan, shlex.split(serve_args))
    except ForebayError as error:
        raise click.ClickException(error.message) from None


def _compare(model: str, dtype: str, repeats: int, plan: Plan, serve_args: list[str]) -> None:
    ports = {name: free_port() for name in NAMES}
    commands = {
        "baseline": ["-m", "forebay.bench.baseline", model, "--dtype", dtype, "--port", str(ports["baseline"])],
        "forebay": [
            *("-m", "forebay", "serve", model, "--dtype", dtype),
            *("--port", str(ports["forebay"]), "--state-url", "off"),
            *serve_args,
        ],
    }
    console = wide_console()
    facts = machine()
    console.print(told(facts))
    console.print(
        f"{model}, {dtype}: {plan.concurrency} clients, {plan.requests} requests a round, "
        f"{plan.prompt_tokens} words in, {plan.output_tokens} tokens out, seed {plan.seed}"
    )
    with contextlib.ExitStack() as servers:
        # Forebay first: it pulls the model where that is not here yet.
        for name in reversed(NAMES):
            servers.enter_context(running([sys.executable, *commands[name]], ports[name]))
        endpoints = {name: Endpoint(f"http://127.0.0.1:{port}") for name, port in ports.items()}
        rounds = alternate(endpoints, plan, repeats)
    verdict = compare(rounds)
    console.print(table(rounds))
    each = ", ".join(f"{ratio:.2f}" for ratio in verdict["ratio_per_round"])
    console.print(f"forebay / baseline, requests/s: {verdict['ratio_of_medians']:.2f} x (per round: {each})")
    result = {**verdict, "model": model, "dtype": dtype, "plan": asdict(plan), "machine": facts, "rounds": rounds}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
