"""The gate before a simulated engine, in virtual time: minutes take seconds, and rates come that no laptop could send.

    python -m forebay.bench.virtual [--profile 8xa100] [--rates 200,410,3000] [--seconds 20] [--repeats 3]

The gate's decisions, the scheduler and the accounting of pages are the server's own; HTTP, text and the wall between
the processes are left out, and steps take the time that the profile says. Prompts and answers have one length each, and
share nothing. Goodput, TTFT and verdicts are those of ``overload.py``. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import click

from ..admission.ask import Ask, Ticket
from ..admission.queue import Queue
from ..config import AdmissionSettings, EngineSettings, Settings, SettingsError
from ..contract import Load, Pace, TryLater
from ..engine.client import LOOK_AHEAD
from ..engine.kv.pages import PAGE_SIZE
from ..engine.profile import Profile, profile_of, with_profile
from ..engine.sequence import GenSpec
from ..engine.simulated import VirtualClock, simulated_engine
from ..engine.wire import Frame
from . import overload_report as report
from .load import Plan
from .openloop import Due, Outcome, Phase, Trace, crowd, poisson
from .overload_report import Slo
from .report import wide_console
from .workload import draw_seed

MULTIPLES = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


class VirtualServer:
    """Queue and engine between them, on one clock. ``between``: called after each step with the time, to change
    something about the engine, say."""

    def __init__(self, profile: Profile, settings: Settings, between: Callable[[float], None] = lambda _: None) -> None:
        self._settings = settings
        self.clock = VirtualClock()
        engine = settings.engine
        self.engine = simulated_engine(profile, self.clock, self.clock.sleep, max_gap=engine.max_gap)
        self._slots = profile.max_batch
        self._between = between
        self._draw = random.Random(0).random  # noqa: S311 - nobody is to be surprised by it
        self._inbox: list[GenSpec] = []
        self._frame = self.engine.frame([])
        self.queue = Queue(
            settings.admission, settings.max_queue, settings.max_queued_tokens, self._load, self._draw, self.clock()
        )
        self._tickets: dict[int, tuple[Ticket, Outcome, list[float]]] = {}
        self._waiting: dict[Ticket, tuple[Outcome, GenSpec]] = {}

    def run(self, dues: Sequence[Due], plan: Plan, seconds: float) -> Trace:
        """Until all that fell due is over."""
        outcomes = [Outcome(number, due.at, due.user) for number, due in enumerate(dues)]
        begin, come = self.clock(), 0
        while True:
            if not self._inbox and not self.engine.has_work:
                if come == len(dues):
                    break
                self.clock.now = max(self.clock.now, begin + dues[come].at)
                self._arrive(outcomes[come], plan, begin)
                come += 1
                continue
            orders, self._inbox = self._inbox, []
            for spec in orders:
                self.engine.submit(spec)
            frame = self.engine.step()
            # Who came while it ran was answered while it ran, by what the front knew then.
            while come < len(dues) and begin + dues[come].at <= self.clock():
                self._arrive(outcomes[come], plan, begin)
                come += 1
            self._take(frame, begin)
            self._between(self.clock() - begin)
        return Trace(plan, seconds, tuple(outcomes))

    def _load(self) -> Load:
        """As engine/client.py tells it."""
        frame, sent = self._frame, len(self._inbox)
        return Load(
            ready=True,
            state="ready",
            running=frame.running,
            waiting=frame.waiting + sent,
            credits=frame.credits + LOOK_AHEAD - sent,
            pages=frame.pages,
            page_size=PAGE_SIZE,
            slots=self._slots,
            owed=frame.owed + sum(len(spec.ids) for spec in self._inbox),
            pace=Pace(*frame.pace) if frame.pace else None,
        )

    def _arrive(self, outcome: Outcome, plan: Plan, begin: float) -> None:
        now, settings = begin + outcome.at, self._settings.admission
        ask = Ask(
            now,
            user=("", outcome.user),
            prompt=plan.prompt_tokens,
            most=plan.output_tokens,
            slo=settings.slo_ttft or inf,
            patience=settings.queue_timeout,
        )
        try:
            self.queue.check(now, ask.rank, 1)
            ticket = self.queue.enter(now, ask)
        except TryLater as error:
            _refused(outcome, error, 0.0)
            return
        outcome.predicted = ticket.predicted
        ids = [2 + (outcome.number + i) % 30_000 for i in range(plan.prompt_tokens)]
        self._waiting[ticket] = outcome, GenSpec(outcome.number, ids, plan.output_tokens)
        self._grant(now)

    def _grant(self, now: float) -> None:
        while (ticket := self.queue.next(now)) is not None:
            outcome, spec = self._waiting.pop(ticket)
            self.queue.submitted(ticket)
            self._inbox.append(spec)
            self._tickets[spec.id] = ticket, outcome, []

    def _expire(self, now: float) -> None:
        for ticket in self.queue.overdue(now):
            self.queue.drop(ticket, now)
            outcome, _ = self._waiting.pop(ticket)
            _refused(outcome, self.queue.too_late(now), now - ticket.ask.arrival)

    def _take(self, frame: Frame, begin: float) -> None:
        self._frame, now = frame, self.clock()
        for emit in frame.emits:
            ticket, outcome, times = self._tickets[emit.id]
            self.queue.saw(ticket, len(emit.tokens), now)
            times += [now] * bool(emit.tokens)
            if emit.end is not None:
                del self._tickets[emit.id]
                self.queue.leave(ticket, now)
                outcome.status, outcome.took = 200, now - begin - outcome.at
                outcome.first = times[0] - begin - outcome.at
                outcome.prompt_tokens, outcome.completion_tokens = ticket.ask.prompt, len(times)
                outcome.gaps = ((times[-1] - times[0]) / (len(times) - 1),) if len(times) > 1 else ()
        self.queue.look(now)
        self._expire(now)
        self._grant(now)


def _refused(outcome: Outcome, error: TryLater, took: float) -> None:
    outcome.status, outcome.code, outcome.took = error.status, error.code or "", took
    outcome.retry_after = error.retry_after


def capacity(profile: Profile, plan: Plan) -> float:
    """Requests per second of a full batch, by the profile's own arithmetic."""
    answer = plan.output_tokens * (profile.base / profile.max_batch + profile.decode)
    return 1 / (profile.prefill * plan.prompt_tokens + answer)


def point(profile: Profile, settings: Settings, plan: Plan, rate: float, seconds: float, seed: str) -> dict[str, Any]:
    """One load on a server of its own."""
    server = VirtualServer(profile, settings)
    begun = time.perf_counter()
    trace = server.run(crowd(poisson([Phase(rate, seconds)], seed)), plan, seconds)
    return report.summarize(trace, Slo()) | {"real_seconds": time.perf_counter() - begun}


@click.command(help=__doc__)
@click.option("--profile", "name", default="8xa100", show_default=True)
@click.option("--rates", help="Requests per second, with commas between. Default: multiples of the capacity.")
@click.option("--seconds", default=20.0, show_default=True, help="Of virtual time, for each point.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--prompt-tokens", default=300, show_default=True)
@click.option("--output-tokens", default=100, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
@click.option("--picture", type=click.Path(path_type=Path))
def main(
    name: str,
    rates: str | None,
    seconds: float,
    repeats: int,
    prompt_tokens: int,
    output_tokens: int,
    path: Path | None,
    picture: Path | None,
) -> None:
    try:
        engine = with_profile(EngineSettings(engine=f"simulated:{name}"))
        profile = profile_of(engine)
    except (SettingsError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if profile is None:
        raise click.ClickException("a profile is needed")
    settings = Settings(engine=engine, admission=AdmissionSettings())
    plan = Plan(prompt_tokens=prompt_tokens, output_tokens=output_tokens, seed=draw_seed())
    can = capacity(profile, plan)
    offered = [float(rate) for rate in rates.split(",")] if rates else [multiple * can for multiple in MULTIPLES]
    points = []
    for repeat in range(repeats):
        for rate in offered:
            found = point(profile, settings, plan, rate, seconds, f"{plan.seed}/{repeat}/{rate}")
            points.append({"variant": "gate", "multiple": rate / can, "repeat": repeat, **found, **_NOT_SEEN})
            click.echo(
                f"{rate:.0f}/s: {found['goodput']:.1f}/s good, {found['codes']}, {found['real_seconds']:.1f} s",
                err=True,
            )
    wide_console().print(report.table(points))
    verdicts = report.judge(points, Slo(), settings.max_queue)
    for verdict in verdicts:
        click.echo(verdict.line())
    if picture:
        title = f"{name}{' (an estimate)' if profile.estimate else ''}, virtual time"
        report.picture(points, Slo(), title, picture)
    result = {"profile": name, "estimate": profile.estimate, "capacity": can, "points": report.medians(points)}
    text = json.dumps(result | {"verdicts": [vars_of(verdict) for verdict in verdicts]})
    if path:
        path.write_text(text + "\n")
    click.echo(text)
    sys.exit(any(verdict.ok is False for verdict in verdicts))


#: What only a real process has.
_NOT_SEEN = {"memory_after": {"pss": 0, "rss": 0}, "most_waiting": None}


def vars_of(verdict: report.Verdict) -> dict[str, Any]:
    return {"name": verdict.name, "seen": verdict.seen, "limit": verdict.limit, "ok": verdict.ok}


if __name__ == "__main__":
    main()
