"""More than the server can do, in an open loop: what it still answers in time, and how it says no to the rest.

    python -m forebay.bench.overload [curve] [burst] [fair] [retry] [predict] [--server FLAGS] [--capacity R]

**curve**: goodput at multiples of the capacity; ``--gate-off``: also with a server that refuses nobody. **burst**: ten
times the capacity, and how soon after it all is as before. **fair**: 50 users, and one who asks ten times as often.
**retry**: clients who come back, at once or when told. **predict**: TTFT as the server predicts it, and as it was.

The SLO is a TTFT and a mean gap between tokens; the capacity is the highest rate at which 99 % meet it. It is guessed
by a closed loop of clients, found by bisection with ``--exact``, or given. The last line of the output is JSON; the
exit code is 1 if a criterion was missed.

Where a load is steady, a sixth of ``--seconds`` more goes before it and is not counted: a queue that fills up takes in
more than the server does, and what it has answered after the end would look like more than it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import click
import uvloop

from .. import catalog, config
from ..contract import ForebayError
from ..engine.client import LOOK_AHEAD
from ..engine.profile import with_profile
from . import overload_report as report
from .client import Endpoint
from .load import Plan, run_closed_loop
from .machine import machine, told
from .openloop import Due, Manners, Outcome, Phase, crowd, poisson, run_open_loop, stand_back, steady
from .overload_report import Slo, Verdict
from .report import summarize, wide_console
from .servers import Memory, Server, ServerFailed, busy, free_port, running, stop_on_term
from .workload import draw_seed

MODEL = "smollm2-135m-instruct"
MULTIPLES = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
#: Nobody is refused, and nobody gets less.
GATE_OFF = (
    *("--slo-ttft", "0", "--max-queue", "1000000", "--queue-timeout", "100000"),
    *("--brownout", "false", "--user-share", "0"),
)
_USERS = 50
_HEAVY = "heavy"


@dataclass(frozen=True, slots=True)
class Bench:
    """What is asked of the servers. ``capacity`` in requests per second; ``bound``: of the gate's queue."""

    plan: Plan
    slo: Slo
    seconds: float = 60.0
    manners: Manners = field(default_factory=Manners)
    capacity: float = 0.0
    bound: int = 0
    repeats: int = 3
    multiples: Sequence[float] = MULTIPLES
    load: float = 0.95
    each: int = 10
    peak: float | None = None
    leaves: float = 10.0

    @property
    def fill(self) -> float:
        """Seconds of a steady load before it counts."""
        return self.seconds / 6

    @property
    def grace(self) -> float:
        """Who has no whole answer so long after the end has missed the SLO anyway."""
        return 1.0 + self.slo.ttft + self.slo.itl * self.plan.output_tokens

    def manners_to(self, name: str) -> Manners:
        """A deadline would make the server without a gate refuse, too."""
        return self.manners if name == "gate" else replace(self.manners, headers={})

    def at(self, multiple: float, seconds: float, seed: str) -> list[Due]:
        """A steady load of so many seconds, and its fill."""
        return crowd(poisson([Phase(multiple * self.capacity, self.fill + seconds)], f"{self.plan.seed}/{seed}"))


@dataclass(frozen=True, slots=True)
class Seen:
    """A load on a server: its summary, all outcomes, and the server's own metrics before and after."""

    summary: dict[str, Any]
    outcomes: tuple[Outcome, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]


@dataclass
class Found:
    """What a scenario ends in."""

    result: dict[str, Any]
    verdicts: list[Verdict] = field(default_factory=list)


# ---- one load on one server


def measure(
    server: Server,
    bench: Bench,
    dues: Sequence[Due],
    seconds: float,
    seed: str,
    manners: Manners | None = None,
    fill: float = 0.0,
) -> Seen:
    """Send ``dues``, which fall within ``fill`` + ``seconds``, then wait until the server is idle again. What falls due
    in the first part is not counted."""
    plan = replace(bench.plan, seed=f"{bench.plan.seed}/{seed}")

    async def whole() -> Seen:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            before, memory = await scrape(session, server.endpoint), Memory.of(server.pid)
            scrapes: list[dict[str, float]] = []
            watch = asyncio.create_task(_watch(session, server.endpoint, scrapes))
            try:
                trace = await run_open_loop(
                    server.endpoint, plan, dues, fill + seconds, manners=manners or bench.manners, grace=bench.grace
                )
            finally:
                watch.cancel()
            after = await _settle(session, server.endpoint)
        trace = replace(trace, seconds=seconds, outcomes=tuple(o for o in trace.outcomes if o.at >= fill))
        waiting = [found.get("vllm:num_requests_waiting", 0.0) for found in scrapes]
        summary = {
            **report.summarize(trace, bench.slo),
            "most_waiting": max(waiting, default=None),
            "over_bound": sum(number > bench.bound for number in waiting),
            "scrapes": len(scrapes),
            "memory_before": asdict(memory),
            "memory_after": asdict(Memory.of(server.pid)),
        }
        return Seen(summary, trace.outcomes, before, after)

    return uvloop.run(whole())


async def scrape(session: aiohttp.ClientSession, server: Endpoint) -> dict[str, float]:
    """/metrics by name; series of one name are added up."""
    found: dict[str, float] = {}
    async with session.get(server.base.removesuffix("/v1") + "/metrics") as response:
        text = await response.text()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def _watch(session: aiohttp.ClientSession, server: Endpoint, found: list[dict[str, float]]) -> None:
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            found.append(await scrape(session, server))
        await asyncio.sleep(1)


async def _settle(session: aiohttp.ClientSession, server: Endpoint, patience: float = 120.0) -> dict[str, float]:
    """The metrics once nothing runs or waits any more."""
    for _ in range(int(patience / 0.5)):
        found = await scrape(session, server)
        if not found.get("vllm:num_requests_running") and not found.get("vllm:num_requests_waiting"):
            await asyncio.sleep(1)  # the last news of the engine may be on its way
            return await scrape(session, server)
        await asyncio.sleep(0.5)
    raise ServerFailed(f"{server.url} still works {patience:.0f} s after its clients have gone")


def estimate(server: Server, plan: Plan, clients: int, seconds: float) -> float:
    """Requests/s of a closed loop: what the server can do, whatever the SLO says of it. Raises ServerFailed."""
    rate = 0.0
    for number in range(2):  # the first tells how many the second needs
        requests = max(clients, int(rate * seconds))
        this = replace(plan, concurrency=clients, requests=requests, warmup=0, seed=f"{plan.seed}/estimate {number}")
        summary = summarize(asyncio.run(run_closed_loop(server.endpoint, this)))
        if summary["failed"]:
            raise ServerFailed(f"requests failed while the capacity was guessed: {summary['failures']}")
        rate = summary["requests_per_s"]
    return rate


def confirm(server: Server, bench: Bench, guess: float, seconds: float = 30.0, steps: int = 4) -> float:
    """The highest rate at which 99 % meet the SLO, by bisection around a guess; to a sixteenth of it."""
    low, high = 0.5 * guess, 1.5 * guess
    for step in range(steps):
        rate = (low + high) / 2
        dues = replace(bench, capacity=rate).at(1.0, seconds, f"confirm {step}")
        seen = measure(server, bench, dues, seconds, f"confirm {step}", fill=bench.fill)
        met = seen.summary["goodput"] / seen.summary["offered"]
        click.echo(f"{rate:.2f} requests/s: {met:.1%} met the SLO", err=True)
        low, high = (rate, high) if met >= 0.99 else (low, rate)
    return low


# ---- scenarios


def curve(servers: Mapping[str, Server], bench: Bench) -> Found:
    points: list[dict[str, Any]] = []
    names = list(servers)
    for repeat in range(bench.repeats):
        for multiple in bench.multiples:
            seed = f"curve {repeat}/{multiple}"
            dues = bench.at(multiple, bench.seconds, seed)
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                seen = measure(servers[name], bench, dues, bench.seconds, seed, bench.manners_to(name), bench.fill)
                points.append({"variant": name, "multiple": multiple, "repeat": repeat, **seen.summary})
                _tell(f"{name} {multiple:g} x", seen)
    return Found({"points": points}, report.judge(points, bench.slo, bench.bound))


def burst(servers: Mapping[str, Server], bench: Bench) -> Found:
    scale = bench.seconds / 60
    calm, storm, after = 20 * scale, 30 * scale, 40 * scale
    phases = [Phase(multiple * bench.capacity, s) for multiple, s in ((0.5, calm), (10.0, storm), (0.5, after))]
    found = Found({})
    for name, server in servers.items():
        dues = crowd(poisson(phases, f"{bench.plan.seed}/burst"))
        impatient = replace(bench.manners_to(name), leaves=bench.leaves or None)
        seen = measure(server, bench, dues, calm + storm + after, "burst", impatient)
        back = report.recovery(seen.outcomes, calm, calm + storm)
        wasted = report.dead(seen.before, seen.after, seen.outcomes)
        found.result[name] = {**seen.summary, "recovery": back, "dead": wasted}
        _tell(f"burst, {name}", seen)
        if name == "gate":
            found.verdicts += [
                Verdict.most("burst: seconds until all was as before", back["seconds"], 5.0),
                Verdict.most("burst: share of tokens computed for nobody", wasted["share"], 0.02),
                Verdict.most("burst: failures", seen.summary["failed"], 0),
            ]
    return found


def fair(servers: Mapping[str, Server], bench: Bench) -> Found:
    """All ask in even intervals: with arrivals as they fall, few requests a user would differ by themselves."""
    rate = bench.load * bench.capacity / (_USERS + 1)
    seconds = max(bench.each, round(bench.seconds * rate)) / rate
    fill = math.ceil(bench.fill * rate) / rate
    rates = {**{f"user-{number}": rate for number in range(_USERS)}, _HEAVY: 10 * rate}
    dues = sorted(
        (Due(at, user) for user, of in rates.items() for at in steady(of, fill + seconds, f"{bench.plan.seed}/{user}")),
        key=lambda due: due.at,
    )
    seen = measure(servers["gate"], bench, dues, seconds, "fair", fill=fill)
    normal = [outcome for outcome in seen.outcomes if outcome.user != _HEAVY]
    heavy = [outcome for outcome in seen.outcomes if outcome.user == _HEAVY]
    tokens = report.served(seen.outcomes, rates)
    answered = report.share(outcome.whole for outcome in normal)
    index = report.jain(list(tokens.values()))
    _tell("fair", seen)
    result = {
        **seen.summary,
        "normal_answered": answered,
        "normal_met_slo": report.share(bench.slo.met(outcome) for outcome in normal),
        "heavy_answered": report.share(outcome.whole for outcome in heavy),
        "heavy_codes": report.codes(heavy),
        "normal_codes": report.codes(normal),
        "jain": index,
        "served_tokens": {"heavy": tokens.pop(_HEAVY), "least": min(tokens.values()), "most": max(tokens.values())},
    }
    return Found(
        result,
        [
            Verdict.least("fair: share of normal users' requests answered", answered, 0.99),
            Verdict.least("fair: Jain's index of served tokens", index, 0.95),
        ],
    )


def retry(servers: Mapping[str, Server], bench: Bench) -> Found:
    server, scale = servers["gate"], bench.seconds / 60
    storm, after = 20 * scale, 40 * scale
    phases = [Phase(3 * bench.capacity, storm), Phase(0.5 * bench.capacity, after)]
    dues = crowd(poisson(phases, f"{bench.plan.seed}/retry"))
    result: dict[str, Any] = {}

    def load(name: str, dues: Sequence[Due], seconds: float, manners: Manners, fill: float = 0.0) -> dict[str, Any]:
        seen = measure(server, bench, dues, seconds, f"retry {name}", manners, fill)
        _tell(f"retry, {name}", seen)
        result[name] = seen.summary
        return seen.summary

    peak = bench.peak
    if peak is None:
        dues_at_1 = bench.at(1.0, bench.seconds, "peak")
        peak = load("peak, 1 x", dues_at_1, bench.seconds, bench.manners, bench.fill)["goodput"]
    at_once, obeys = replace(bench.manners, retry="at once"), replace(bench.manners, retry="after")
    load("gives up", dues, storm + after, bench.manners)
    load("at once", dues, storm + after, at_once)
    told_to = load("as told", dues, storm + after, obeys)
    dues_at_2 = bench.at(2.0, bench.seconds, "pressed")
    pressed = load("at once, 2 x", dues_at_2, bench.seconds, at_once, bench.fill)
    kept = pressed["goodput"] / peak if peak else None
    return Found(
        {"peak": peak, **result},
        [
            Verdict.least("retry: goodput over the peak, 2 x and retries at once", kept, 0.85),
            Verdict.least("retry: first retries as told that succeed", told_to["first_retry_success"], 0.9),
        ],
    )


def predict(servers: Mapping[str, Server], bench: Bench) -> Found:
    result = {}
    for multiple in (0.5, 0.9, 2.0):
        name = f"{multiple:g} x"
        dues = bench.at(multiple, bench.seconds, f"predict {multiple}")
        seen = measure(servers["gate"], bench, dues, bench.seconds, f"predict {multiple}", fill=bench.fill)
        result[name] = {**(seen.summary["predicted"] or {"n": 0}), "ttft": seen.summary["ttft"]}
        click.echo(f"predict, {name}: observed / predicted TTFT {seen.summary['predicted']}", err=True)
    return Found(result)


SCENARIOS: dict[str, Callable[[Mapping[str, Server], Bench], Found]] = {
    "curve": curve,
    "burst": burst,
    "fair": fair,
    "retry": retry,
    "predict": predict,
}


def _tell(name: str, seen: Seen) -> None:
    found = seen.summary
    ttft = found["ttft"]["p99"] if found["ttft"] else float("nan")
    click.echo(
        f"{name}: {found['offered']:.2f}/s offered, {found['goodput']:.2f}/s good, TTFT P99 {ttft:.2f} s, "
        f"{found['codes']} {found['failures'] or ''}",
        err=True,
    )


# ---- the command


@contextlib.contextmanager
def serving(model: Path, flags: Sequence[str], plan: Plan) -> Iterator[Server]:
    """`forebay serve` with these flags, on a data folder of its own, after a few requests."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = [sys.executable, "-m", "forebay", "serve", str(model), "--port", str(port), "--data-dir", folder]
        with running([*command, "--state-url", "off", "--log-level", "warning", *flags], port) as server:
            warm = replace(plan, concurrency=4, requests=4, warmup=0, seed=f"{plan.seed}/warm")
            asyncio.run(run_closed_loop(server.endpoint, warm))
            yield server


def most_waiting(flags: Sequence[str]) -> int:
    """How many may wait in a server with these flags: in the gate's queue, and in the engine for their first step."""
    words = [word for flag in flags for word in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    names = [word.removeprefix("--") for word in words[::2]]
    settings = config.load(dict(zip(names, words[1::2], strict=True)))
    settings = settings.model_copy(update={"engine": with_profile(settings.engine)})
    return settings.max_queue + settings.engine.max_batch + LOOK_AHEAD


@click.command(help=__doc__)
@click.argument("scenarios", nargs=-1, type=click.Choice(list(SCENARIOS)))
@click.option("--model", default=MODEL, show_default=True, help="As for forebay serve.")
@click.option("--server", "flags", default="", help="More flags of forebay serve, as one string.")
@click.option("--gate-off", is_flag=True, help="curve, burst: also a server that refuses nobody.")
@click.option("--capacity", type=click.FloatRange(min=0, min_open=True), help="Requests/s. [default: a closed loop's]")
@click.option("--clients", type=click.IntRange(1), default=16, show_default=True, help="Of that closed loop.")
@click.option("--exact", is_flag=True, help="Find the capacity by bisection.")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True, help="A point; all else scales.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="curve: of each point.")
@click.option("--at", "multiples", type=float, multiple=True, help="curve: multiples of the capacity.")
@click.option("--words", type=click.IntRange(1), default=300, show_default=True, help="Words of a prompt.")
@click.option("--tokens", type=click.IntRange(1), default=100, show_default=True, help="Tokens of an answer.")
@click.option("--slo-ttft", type=float, default=4.0, show_default=True, help="Seconds to the first text.")
@click.option("--slo-itl", type=float, default=0.15, show_default=True, help="Seconds per token, in the mean.")
@click.option(
    "--load", "part", type=float, default=0.95, show_default=True, help="fair: of the capacity, for 51 users."
)
@click.option("--each", type=click.IntRange(1), default=10, show_default=True, help="fair: requests a user at least.")
@click.option("--peak", type=float, help="retry: goodput to compare with. [default: measured at 1 x]")
@click.option("--leaves", type=float, default=10.0, show_default=True, help="burst: seconds of patience; 0: no end.")
@click.option("--deadline-ms", type=int, help="Sent with each request, as x-slo-ttft-ms.")
@click.option("--connections", type=click.Choice(["kept", "new"]), default="kept", show_default=True)
@click.option("--nice", type=click.IntRange(0, 19), default=0, show_default=True, help="Of this program.")
@click.option("--seed", help="Of prompts and arrivals; drawn if not given.")
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), help="curve: a PNG.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Everything, indented.")
def main(
    scenarios: tuple[str, ...],
    model: str,
    flags: str,
    gate_off: bool,
    capacity: float | None,
    clients: int,
    exact: bool,
    words: int,
    tokens: int,
    slo_ttft: float,
    slo_itl: float,
    part: float,
    multiples: tuple[float, ...],
    deadline_ms: int | None,
    connections: str,
    nice: int,
    seed: str | None,
    picture: Path | None,
    file: Path | None,
    **rest: Any,
) -> None:
    stop_on_term()
    facts = machine() | {"busy": busy()}
    given = shlex.split(flags)
    path = catalog.resolve(model, config.load().paths.data_dir).path
    headers = {} if deadline_ms is None else {"x-slo-ttft-ms": str(deadline_ms)}
    bench = Bench(
        Plan(prompt_tokens=words, output_tokens=tokens, seed=seed or draw_seed()),
        Slo(slo_ttft, slo_itl),
        manners=Manners(headers=headers, keep=connections == "kept"),
        multiples=multiples or MULTIPLES,
        bound=most_waiting(given),
        load=part,
        **rest,
    )
    click.echo(told(facts), err=True)
    variants = {"gate": given} | ({"no gate": [*given, *GATE_OFF]} if gate_off else {})
    rate = capacity or 0.0
    if not rate:  # on a server that refuses nobody
        with serving(path, [*given, *GATE_OFF], bench.plan) as patient:
            rate = estimate(patient, bench.plan, clients, min(30.0, bench.seconds))
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(serving(path, these, bench.plan)) for name, these in variants.items()}
        stand_back(nice)
        if exact:
            rate = confirm(servers["gate"], bench, rate, min(30.0, bench.seconds))
        bench = replace(bench, capacity=rate)
        click.echo(f"capacity {rate:.2f} requests/s", err=True)
        found = {name: SCENARIOS[name](servers, bench) for name in scenarios or ("curve",)}
    verdicts = [verdict for scenario in found.values() for verdict in scenario.verdicts]
    answer = {
        "bench": "overload",
        "machine": facts,
        "settings": {**asdict(bench), "model": model, "server": variants, "nice": nice},
        "capacity": rate,
        **{name: scenario.result for name, scenario in found.items()},
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    _show(found, bench, f"{model} {flags}, capacity {rate:.2f}/s, {facts['cpu']}", picture)
    if file:
        file.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    click.echo(json.dumps(answer))
    if any(verdict.ok is False for verdict in verdicts):
        sys.exit(1)


def _show(found: Mapping[str, Found], bench: Bench, title: str, picture: Path | None) -> None:
    console = wide_console()
    if "curve" in found:
        points = found["curve"].result["points"]
        console.print(report.table(points))
        if picture:
            report.picture(points, bench.slo, title, picture)
    for scenario in found.values():
        for verdict in scenario.verdicts:
            console.print(verdict.line(), style=None if verdict.ok else "red")


if __name__ == "__main__":
    try:
        main()
    except ForebayError as error:
        click.echo(f"error: {error.message}", err=True)
        sys.exit(1)
