"""The front alone, before an engine that only takes its time: what a refusal and a streamed token cost it.

    python -m forebay.bench.front [refusals] [streams] [--wrk PATH] [--server FLAGS]

**refusals**: thousands of small chats a second, far more than the engine takes. Sent by wrk where it is installed
(``apt install wrk``), in a closed loop over its connections; else by the generator of overload.py at ``--rate``.
**streams**: so many streams at once; how fast each flows is up to the profile.

Told are microseconds of the front process for each, and which part of all is the nearest to a whole core: front, engine
or generator. One that is at it limits the others, and its figure is what counts. The last line of the output is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil
import uvloop

from .. import catalog, config
from ..contract import ForebayError
from . import overload_report
from .load import Plan
from .machine import machine, told
from .openloop import Due, Phase, Trace, crowd, poisson, run_open_loop
from .overload import GATE_OFF, MODEL, serving
from .report import wide_console
from .servers import Server, ServerFailed, busy, stop_on_term
from .workload import draw_seed

_FULL = 0.9  # of a core
_USERS = 5000
#: Statuses are counted in each thread of wrk, and added up at the end.
_LUA = """
local threads, n, body = {}, 0, [==[%(body)s]==]
local head = {["Content-Type"] = "application/json", ["x-forebay-cache"] = "off"}
counts = {}
function setup(thread) table.insert(threads, thread) end
function request()
  n = n + 1
  head["x-user-id"] = "user-" .. n %% %(users)d
  return wrk.format("POST", nil, head, body)
end
function response(status) counts[tostring(status)] = (counts[tostring(status)] or 0) + 1 end
function done(summary, latency)
  local all = {}
  for _, thread in ipairs(threads) do
    for status, number in pairs(thread:get("counts")) do all[status] = (all[status] or 0) + number end
  end
  local parts = {}
  for status, number in pairs(all) do table.insert(parts, string.format('"%%s": %%d', status, number)) end
  local e = summary.errors
  print(string.format('{"statuses": {%%s}, "seconds": %%f, "p50": %%f, "p99": %%f, "broken": %%d}',
    table.concat(parts, ", "), summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    e.connect + e.read + e.write + e.timeout))
end
"""


@dataclass(frozen=True, slots=True)
class Cpu:
    """Seconds of CPU so far: the front (the server's first process), all below it, and this program with its own."""

    at: float
    front: float
    engine: float
    generator: float

    @classmethod
    def of(cls, server: Server) -> Cpu:
        root = psutil.Process(server.pid)
        times = root.cpu_times()
        engine = 0.0
        for child in root.children(recursive=True):
            of_child = child.cpu_times()
            engine += of_child.user + of_child.system
        own = os.times()
        # Of children, only those count that have ended: wrk has, the server has not.
        generator = own.user + own.system + own.children_user + own.children_system
        return cls(time.monotonic(), times.user + times.system, engine, generator)

    def since(self, before: Cpu) -> dict[str, float]:
        """Shares of one core by part."""
        seconds = self.at - before.at
        return {
            part: (getattr(self, part) - getattr(before, part)) / seconds for part in ("front", "engine", "generator")
        }


def first_full(shares: Mapping[str, float]) -> str:
    """Which part is the nearest to a whole core, in words."""
    part = max(shares, key=lambda name: shares[name])
    state = "full" if shares[part] >= _FULL else "not full; something else limits, or nothing"
    return f"{part} ({shares[part]:.0%} of a core, {state})"


def with_wrk(server: Server, wrk: str, plan: Plan, seconds: int, connections: int) -> dict[str, Any]:
    """statuses, seconds, p50, p99 (seconds), broken."""
    body = msgspec.json.encode({**plan.body([plan.message(0)]), "model": asyncio.run(_model(server))}).decode()
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_LUA % {"body": body, "users": _USERS})
        script.flush()
        # Of as many threads as a generator may take cores from the server: one.
        load = ["-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "60s", "--script", script.name]
        command = [wrk, *load, f"{server.endpoint.base}/chat/completions"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerFailed(f"wrk: {done.stderr.strip() or done.stdout.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


async def _model(server: Server) -> str:
    async with server.endpoint.session() as session:
        return await server.endpoint.first_model(session)


def with_own(server: Server, plan: Plan, seconds: int, rate: float) -> dict[str, Any]:
    dues = crowd(poisson([Phase(rate, seconds)], plan.seed), _USERS)
    begin = time.monotonic()
    trace: Trace = uvloop.run(run_open_loop(server.endpoint, plan, dues, seconds, grace=1.0))
    summary = overload_report.summarize(trace, overload_report.Slo())
    refusal = summary["refusal"] or {"p50": None, "p99": None}
    return {
        "statuses": summary["statuses"],
        "seconds": time.monotonic() - begin,
        "p50": refusal["p50"],
        "p99": refusal["p99"],
        "broken": summary["failed"],
        "lag": summary["lag"],
    }


def refusals(server: Server, plan: Plan, send: Callable[[Server, Plan], dict[str, Any]]) -> dict[str, Any]:
    before = Cpu.of(server)
    found = send(server, plan)
    after = Cpu.of(server)
    shares = after.since(before)
    number = sum(found["statuses"].values())
    refused = sum(found["statuses"].get(status, 0) for status in ("429", "503"))
    return {
        **found,
        "responses_per_s": number / found["seconds"],
        "refusals_per_s": refused / found["seconds"],
        "refused_share": refused / number if number else None,
        "front_us_per_response": 1e6 * (after.front - before.front) / number if number else None,
        "shares": shares,
        "first_full": first_full(shares),
    }


def streams(server: Server, plan: Plan, number: int) -> dict[str, Any]:
    """All of them begin within two seconds."""
    dues: Sequence[Due] = crowd([2 * i / number for i in range(number)], number)
    before = Cpu.of(server)
    trace: Trace = uvloop.run(run_open_loop(server.endpoint, plan, dues, 2.0, grace=600.0))
    after = Cpu.of(server)
    shares = after.since(before)
    summary = overload_report.summarize(trace, overload_report.Slo())
    whole = [outcome for outcome in trace.outcomes if outcome.whole]
    tokens = sum(outcome.completion_tokens for outcome in whole)
    frames = sum(len(outcome.gaps) + 1 for outcome in whole)
    gap = summary["itl"]
    return {
        "streams": number,
        "whole": len(whole),
        "failures": summary["failures"],
        "codes": summary["codes"],
        "tokens_per_s": tokens / (after.at - before.at),
        "tokens_per_s_of_a_stream": 1 / gap["mean"] if gap else None,
        "tokens_per_frame": tokens / frames if frames else None,
        "front_us_per_token": 1e6 * (after.front - before.front) / tokens if tokens else None,
        "gap": gap,
        "ttft": summary["ttft"],
        "stall": summary["stall"],
        "shares": shares,
        "first_full": first_full(shares),
    }


@click.command(help=__doc__)
@click.argument("parts", nargs=-1, type=click.Choice(["refusals", "streams"]))
@click.option("--model", default=MODEL, show_default=True, help="Whose tokenizer and template are used.")
@click.option("--server", "flags", default="", help="More flags of forebay serve, as one string.")
@click.option("--wrk", help="The program. [default: as the PATH has it; `none`: the own generator]")
@click.option("--rate", type=click.FloatRange(1), default=3000.0, show_default=True, help="Of the own generator, /s.")
@click.option("--connections", type=click.IntRange(1), default=128, show_default=True, help="Of wrk.")
@click.option("--refusing", default="cpu", show_default=True, help="Profile of the engine that refuses most.")
@click.option("--streaming", default="8xa100", show_default=True, help="Profile of the engine that streams.")
@click.option("--streams", "number", type=click.IntRange(1), default=500, show_default=True, help="At once.")
@click.option("--tokens", type=click.IntRange(2), default=400, show_default=True, help="Of each stream.")
@click.option("--words", type=click.IntRange(1), default=12, show_default=True, help="Of a prompt.")
@click.option("--seconds", type=click.IntRange(1), default=20, show_default=True, help="Of the refusals.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="The result, indented.")
def main(
    parts: tuple[str, ...],
    model: str,
    flags: str,
    wrk: str | None,
    rate: float,
    connections: int,
    refusing: str,
    streaming: str,
    number: int,
    tokens: int,
    words: int,
    seconds: int,
    file: Path | None,
) -> None:
    stop_on_term()
    facts = machine() | {"busy": busy()}
    click.echo(told(facts), err=True)
    path = catalog.resolve(model, config.load().paths.data_dir).path
    plan = Plan(prompt_tokens=words, output_tokens=16, seed=draw_seed())
    program = None if wrk == "none" else wrk or shutil.which("wrk")
    result: dict[str, Any] = {"bench": "front", "machine": facts, "server": flags}
    console = wide_console()

    def send(server: Server, plan: Plan) -> dict[str, Any]:
        if program:
            return with_wrk(server, program, plan, seconds, connections)
        return with_own(server, plan, seconds, rate)

    if "refusals" in (parts or ("refusals",)):
        if not program:
            click.echo("wrk is not here (apt install wrk): the own generator takes more of the CPU", err=True)
        # A short queue: whoever waits in it holds a connection that wrk could use.
        short = ["--engine", f"simulated:{refusing}", "--max-queue", "16", *shlex.split(flags)]
        chats = Plan(prompt_tokens=words, output_tokens=16, seed=plan.seed, stream=False)
        with serving(path, short, plan) as server:
            found = refusals(server, chats, send)
        result["refusals"] = {"by": "wrk" if program else "own", **found}
        console.print(
            f"refusals: {found['responses_per_s']:.0f} responses/s, {found['statuses']}, "
            f"{found['front_us_per_response'] or 0:.0f} us of the front each; {found['first_full']}"
        )
    if "streams" in (parts or ("streams",)):
        patient = ["--engine", f"simulated:{streaming}", *GATE_OFF, *shlex.split(flags)]
        with serving(path, patient, plan) as server:
            flows = streams(server, Plan(prompt_tokens=words, output_tokens=tokens, seed=plan.seed), number)
        result["streams"] = flows
        gap = flows["gap"] or {"p99": float("nan")}
        console.print(
            f"streams: {flows['whole']} of {number} whole, {flows['tokens_per_s_of_a_stream'] or 0:.1f} tokens/s each, "
            f"{flows['front_us_per_token'] or 0:.0f} us of the front a token, gap P99 {gap['p99'] * 1e3:.0f} ms; "
            f"{flows['first_full']}"
        )
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except ForebayError as error:
        click.echo(f"error: {error.message}", err=True)
        sys.exit(1)
