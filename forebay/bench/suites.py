"""The suites: servers side by side under six kinds of load, over HTTP, as a client sees them.

    python -m forebay.bench.suites [CONTESTANT ...] [--suite batch] [--rounds 3] [--plot FILE] [--json FILE]

A CONTESTANT is ``forebay:NAME=FLAGS`` (``forebay:int8=--quantize int8``; flags of ``forebay serve``), one of the peers
(openvino, openvino-int8, llamacpp, llamacpp-q8_0, llamacpp-q4_1; see forebay.bench.peers), or ``peers`` for all of
them. Without any: forebay and peers.

One server runs at a time. In each round each server is started once, goes through all suites, and is stopped; the next
round begins with another. Prompts are new in each round and the same for all. Medians over rounds count, and ratios
within one round. What fails is shown as failed. The last line of the output is JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from ..contract import ForebayError
from . import suites_report
from .contestants import BadContestant, Contestant, Start, forebay
from .load import Plan, run_closed_loop
from .machine import machine, told
from .peers import PEERS
from .report import summarize, wide_console
from .servers import Server, busy, free_port, running, stop_on_term
from .workload import draw_seed

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Size:
    """Words in, tokens out, and by how much clients and requests are divided: 1 but for a trial."""

    words: int = 300
    tokens: int = 100
    shrink: int = 1


@dataclass(frozen=True, slots=True)
class Suite:
    """``requests`` in all, or conversations where there are ``turns``."""

    about: str
    clients: int
    requests: int
    prompts: str | int = "distinct"
    turns: int = 1
    cache: bool = False

    def plan(self, size: Size, seed: str, timeout: float) -> Plan:
        later = min(60, size.words), min(60, size.tokens)
        return Plan(
            concurrency=max(1, self.clients // size.shrink),
            requests=max(1, self.requests // size.shrink),
            prompt_tokens=size.words,
            output_tokens=size.tokens if self.turns == 1 else later[1],
            warmup=0,
            seed=seed,
            prompts=self.prompts,
            turns=self.turns,
            turn_words=later[0],
            timeout=timeout,
            cache=self.cache,
        )


SUITES: dict[str, Suite] = {
    "single": Suite("one client", clients=1, requests=4),
    "batch": Suite("16 clients", clients=16, requests=32),
    "burst": Suite("64 at once", clients=64, requests=64),
    "multiturn": Suite("16 users, 4 turns, history sent along", clients=16, requests=16, turns=4),
    "repeat": Suite("16 clients, 64 requests from 4 prompts", clients=16, requests=64, prompts=4),
    "cached": Suite("the same, and answers may come from a cache", clients=16, requests=64, prompts=4, cache=True),
}


def choose(texts: Sequence[str], model: str, folder: Path | None) -> list[Contestant]:
    """Contestants by their text, in order. Raises BadContestant."""
    found: list[Contestant] = []
    for text in texts or ("forebay", "peers"):
        names = list(PEERS) if text == "peers" else [text] if text in PEERS else []
        if names and model != MODEL:
            raise BadContestant(f"{text}: the peers have {MODEL}, not {model}")
        if ours := forebay(text, model):
            found.append(ours)
        elif not names:
            known = ", ".join(("forebay[:NAME][=FLAGS]", "peers", *PEERS))
            raise BadContestant(f"{text!r} is no contestant; there are: {known}")
        found += [PEERS[name].contestant(name, folder) for name in names]
    names = [contestant.name for contestant in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadContestant(f"{twice} is there twice: name them apart, as in forebay:a=... forebay:b=...")
    return found


def order(contestants: Sequence[Contestant], number: int) -> list[Contestant]:
    """Those that take part, in the order of a round: each round begins with another."""
    present = [contestant for contestant in contestants if not contestant.skipped]
    first = number % len(present) if present else 0
    return [*present[first:], *present[:first]]


def context_of(plan: Plan) -> int:
    """Tokens that the longest request of a plan may need with its answer: generous, in steps of 256."""
    words = plan.prompt_tokens + (plan.turns - 1) * plan.turn_words
    tokens = int(1.3 * words) + plan.turns * (plan.output_tokens + 16) + 64
    return -(-tokens // 256) * 256


def starts(contestant: Contestant, plans: Mapping[str, Plan]) -> list[tuple[int, list[str]]]:
    """How often the server is started: (requests at once, the suites it then goes through)."""
    if not contestant.fixed_slots:
        return [(max(plan.concurrency for plan in plans.values()), list(plans))]
    # One that was made for 16 serves one client as well, one for 64 would divide its memory more than 16 need.
    small = [name for name, plan in plans.items() if plan.concurrency <= 16]
    large = [name for name in plans if name not in small]
    return [(max(plans[name].concurrency for name in names), names) for names in (small, large) if names]


def run_server(
    contestant: Contestant, plans: Mapping[str, Plan], told_of: Callable[[str, Any], None]
) -> dict[str, Any]:
    """All suites on one contestant -> start (seconds to ready, or None), error, busy (the share of the cores that
    others had before it), and suites: name -> run (see compare.py)."""
    result: dict[str, Any] = {"start": None, "error": None, "busy": busy(), "suites": {}}
    runs = result["suites"]
    for slots, names in starts(contestant, plans):
        port = free_port()
        context = max(context_of(plans[name]) for name in names)
        command = contestant.command(Start(port, slots, context))
        try:
            with running(command, port, ready=contestant.ready, environ=contestant.environ) as server:
                result["start"] = result["start"] or server.start
                _warm_up(server, plans[names[0]])
                for name in names:
                    runs[name] = _run(server, plans[name])
                    told_of(name, runs[name])
        except ForebayError as error:
            result["error"] = error.message
            missing = [name for name in names if name not in runs]
            failed = {"error": suites_report.brief(error.message)}
            runs.update(dict.fromkeys(missing, failed))
            told_of(", ".join(missing), failed)
    return result


def _warm_up(server: Server, plan: Plan) -> None:
    """Two requests with prompts of their own: what they leave in a prefix cache is no help afterwards."""
    warm = Plan(2, 2, plan.prompt_tokens, min(16, plan.output_tokens), 0, f"{plan.seed}/warm", timeout=plan.timeout)
    asyncio.run(run_closed_loop(server.endpoint, warm))


def _run(server: Server, plan: Plan) -> dict[str, Any]:
    server.memory.take()
    try:
        run = summarize(asyncio.run(run_closed_loop(server.endpoint, plan)))
    except ForebayError as error:
        run = {"error": suites_report.brief(error.message)}
    return {**run, "memory": asdict(server.memory.take())}


def run_rounds(
    contestants: Sequence[Contestant],
    plans_of: Callable[[int], Mapping[str, Plan]],
    rounds: int,
    after: Callable[[list[dict[str, Any]]], object],
) -> list[dict[str, Any]]:
    """One {name: result of run_server} per round. ``after`` gets those that are done, after each."""
    done: list[dict[str, Any]] = []
    for number in range(rounds):
        done.append({})
        for contestant in order(contestants, number):
            head = f"round {number + 1} of {rounds}, {contestant.name}"

            def told_of(suite: str, run: Any, head: str = head) -> None:
                click.echo(f"{head}, {suite}: {suites_report.line(run)}", err=True)

            done[-1][contestant.name] = run_server(contestant, plans_of(number), told_of)
        after(done)
    return done


def _plotter() -> Callable[[dict[str, Any], Path], None]:
    """Asked for at the start: better missed now than after an hour."""
    try:
        from .plot import save  # noqa: PLC0415 - slow
    except ImportError as error:
        raise click.UsageError(f"--plot needs the bench extra, pip install 'forebay[bench]' ({error})") from None
    return save


@click.command(help=__doc__)
@click.argument("contestants", nargs=-1)
@click.option("--suite", "chosen", type=click.Choice(list(SUITES)), multiple=True, help="[default: all]")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--model", default=MODEL, show_default=True, help="What forebay serves.")
@click.option("--peers", type=click.Path(path_type=Path), envvar="PEERS", show_envvar=True, help="Folder of the peers.")
@click.option("--words", type=click.IntRange(1), default=300, show_default=True, help="Words of a prompt.")
@click.option("--tokens", type=click.IntRange(1), default=100, show_default=True, help="Tokens of an answer.")
@click.option("--shrink", type=click.IntRange(1), default=1, help="Divide clients and requests, to see that it works.")
@click.option("--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds per request.")
@click.option("--seed", help="Of the prompts; drawn if not given.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="A PNG of tokens/s.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Everything, after each round.")
def main(
    contestants: tuple[str, ...],
    chosen: tuple[str, ...],
    rounds: int,
    model: str,
    peers: Path | None,
    words: int,
    tokens: int,
    shrink: int,
    timeout: float,
    seed: str | None,
    plot: Path | None,
    file: Path | None,
) -> None:
    stop_on_term()
    try:
        found = choose(contestants, model, peers)
    except BadContestant as error:
        raise click.UsageError(str(error)) from None
    save = _plotter() if plot else None
    for path in filter(None, (plot, file)):
        path.parent.mkdir(parents=True, exist_ok=True)
    size, seed, suites = Size(words, tokens, shrink), seed or draw_seed(), chosen or tuple(SUITES)
    console, facts = wide_console(), machine()
    settings = {"model": model, "seed": seed, "rounds": rounds, "suites": list(suites), **asdict(size)}
    about = {contestant.name: {"about": contestant.about, "skipped": contestant.skipped} for contestant in found}
    console.print(told(facts))
    for contestant in found:
        console.print(f"{contestant.name}: {contestant.about}", style="dim" if contestant.skipped else None)
        if contestant.skipped:
            console.print(f"  skipped: {contestant.skipped}", style="yellow")

    def plans_of(number: int) -> dict[str, Plan]:
        return {name: SUITES[name].plan(size, f"{seed}/{number}/{name}", timeout) for name in suites}

    def told_all(done: list[dict[str, Any]]) -> dict[str, Any]:
        verdict = suites_report.verdict(done, [contestant.name for contestant in found if not contestant.skipped])
        answer = {"machine": facts, "settings": settings, "contestants": about, **verdict}
        if file:
            file.write_text(json.dumps({**answer, "rounds": done}, indent=1) + "\n", encoding="utf-8")
        return answer

    answer = told_all(run_rounds(found, plans_of, rounds, told_all))
    for name in suites:
        console.print(suites_report.table(answer, name, SUITES[name].about))
    console.print(suites_report.starts_table(answer))
    for style, lines in (("yellow", answer["warnings"]), ("red", answer["problems"])):
        for line in lines:
            console.print(line, style=style)
    if save and plot:
        save(answer, plot)
    print(json.dumps(answer), flush=True)
    sys.exit(1 if answer["problems"] else 0)


if __name__ == "__main__":
    main()
