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
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import click
from rich.console import Console
from rich.table import Table

from ..contract import ForebayError
from .client import Endpoint
from .load import Plan, run_closed_loop
from .report import summarize
from .workload import draw_seed

NAMES = ("baseline", "forebay")
#: column -> (path in a summary, factor, digits)
_COLUMNS: dict[str, tuple[tuple[str, ...], float, int]] = {
    "requests/s": (("requests_per_s",), 1, 2),
    "output tok/s": (("output_tokens_per_s",), 1, 1),
    "latency mean s": (("e2e", "mean"), 1, 2),
    "latency P99 s": (("e2e", "p99"), 1, 2),
    "TTFT P50 s": (("ttft", "p50"), 1, 2),
    "ITL mean ms": (("itl", "mean"), 1e3, 1),
}


class ServerFailed(ForebayError):
    """A server under test did not come up; the message ends with its last lines."""


@contextlib.contextmanager
def running(command: list[str], port: int, patience: float = 900.0) -> Iterator[None]:
    """A server as a process group of its own, ready at entry and gone at exit, whatever happens.

    Raises ServerFailed if it ends or is not ready after ``patience`` seconds.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            try:
                asyncio.run(_wait_ready(process, f"http://127.0.0.1:{port}/ready", patience))
            except ServerFailed as error:
                log.seek(0)
                raise ServerFailed(f"{error}\n{log.read()[-4000:].decode(errors='replace')}") from None
            yield
        finally:
            _stop(process)


async def _wait_ready(process: subprocess.Popen[bytes], url: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ServerFailed(f"{process.args!r} ended with code {process.returncode}")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise ServerFailed(f"{process.args!r} is not ready after {patience:.0f} s")


def _stop(process: subprocess.Popen[bytes], grace: float = 30.0) -> None:
    """TERM to the group, then KILL to what is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
        "ratio_per_round": [ours / theirs for ours, theirs in zip(rate["forebay"], rate["baseline"], strict=True)],
    }


def table(rounds: list[dict[str, Any]]) -> Table:
    view = Table("round", "server", *_COLUMNS)
    for number, results in enumerate(rounds, 1):
        for name in NAMES:
            view.add_row(str(number), name, *(_cell([results[name]], column) for column in _COLUMNS))
    view.add_section()
    for name in NAMES:
        view.add_row("median", name, *(_cell([results[name] for results in rounds], column) for column in _COLUMNS))
    return view


def _cell(summaries: list[dict[str, Any]], column: str) -> str:
    """The median of one column over summaries; a dash where a server does not have it."""
    path, factor, digits = _COLUMNS[column]
    values = []
    for summary in summaries:
        value: Any = summary
        for key in path:
            value = value and value[key]
        if value is None:
            return "-"
        values.append(value * factor)
    return f"{statistics.median(values):.{digits}f}"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    # In a process of its own: torch's threads and memory have no place in the client that measures.
    ask = "import torch; print(torch.__version__, torch.backends.cpu.get_cpu_capability())"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    torch, capability = answer.stdout.split()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": capability,
        "torch": torch,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    """A TERM leaves through the context managers, which stop the servers."""
    sys.exit(143)


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
    signal.signal(signal.SIGTERM, _terminate)
    options["seed"] = options["seed"] or draw_seed()
    plan = Plan(**options)
    try:
        _compare(model, dtype, repeats, plan, shlex.split(serve_args))
    except ForebayError as error:
        raise click.ClickException(error.message) from None


def _compare(model: str, dtype: str, repeats: int, plan: Plan, serve_args: list[str]) -> None:
    ports = {name: _free_port() for name in NAMES}
    commands = {
        "baseline": ["-m", "forebay.bench.baseline", model, "--dtype", dtype, "--port", str(ports["baseline"])],
        "forebay": ["-m", "forebay", "serve", model, "--dtype", dtype, "--port", str(ports["forebay"]), *serve_args],
    }
    # A file gets the whole table; rich would cut it to 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 120, soft_wrap=True, highlight=False, markup=False)
    facts = machine()
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()))
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
