"""The open loop against servers that stall, refuse and break off, and what is made of its outcomes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import liar as lies
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from forebay.bench import batching, front, load, overload, overload_report
from forebay.bench.client import Endpoint, Unreachable
from forebay.bench.openloop import Due, Manners, Outcome, Phase, Trace, poisson, run_open_loop, steady
from forebay.bench.overload_report import Slo, Verdict
from forebay.bench.servers import MemoryWatch, Server, ServerFailed

PLAN = load.Plan(prompt_tokens=8, output_tokens=4, seed="s")


@pytest.fixture
def liar() -> Iterator[lies.Liar]:
    with lies.serving() as server:
        yield server


def send(
    server: lies.Liar, dues: list[Due], seconds: float = 0.2, manners: Manners | None = None, grace: float = 5.0
) -> Trace:
    return asyncio.run(
        run_open_loop(Endpoint(server.url), PLAN, dues, seconds, manners=manners or Manners(), grace=grace)
    )


def at(*times: float) -> list[Due]:
    return [Due(time, f"u{number}") for number, time in enumerate(times)]


def script(*pieces: bytes | float) -> lies.Script:
    async def play(_body: dict[str, Any]) -> AsyncIterator[bytes | float]:
        for piece in pieces:
            yield piece

    return play


#: status, code, Retry-After
Refusal = tuple[int, str, str | None]


@contextmanager
def gated(say: Callable[[str], Refusal | None]) -> Iterator[lies.Liar]:
    """A liar who refuses whenever ``say``, which gets the request's user, does; None is answered as always."""

    class Gated(lies.Liar):
        async def chat(self, request: web.Request) -> web.StreamResponse:
            refusal = say(request.headers.get("x-user-id", ""))
            if refusal is None:
                return await super().chat(request)
            status, code, later = refusal
            error = {"error": {"message": "no", "type": "t", "code": code}}
            return web.json_response(error, status=status, headers={"Retry-After": later} if later else {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lies, "Liar", Gated)
        with lies.serving() as server:
            yield server


# --- what is sent ---------------------------------------------------------------------------------------------


def test_arrivals_are_those_of_the_seed_at_the_rate_of_each_phase() -> None:
    phases = [Phase(10, 100), Phase(0, 50), Phase(40, 50)]
    times = poisson(phases, "a")
    assert times == poisson(phases, "a") == sorted(times)
    assert times != poisson(phases, "b")
    assert 850 < sum(time < 100 for time in times) < 1150
    assert not any(100 <= time < 150 for time in times)
    assert 1750 < sum(time >= 150 for time in times) < 2250
    assert max(times) < 200


def test_steady_arrivals_are_one_in_each_interval() -> None:
    assert [int(time * 2) for time in steady(2.0, 10.0, "a")] == list(range(20))


def test_requests_are_distinct_of_exact_length_and_name_their_user(liar: lies.Liar) -> None:
    trace = send(liar, at(0.0, 0.01, 0.02), manners=Manners(headers={"x-slo-ttft-ms": "900"}))
    assert [outcome.whole for outcome in trace.outcomes] == [True] * 3
    assert len({body["messages"][0]["content"] for body in liar.requests}) == 3
    body, headers = liar.requests[0], liar.headers[0]
    assert (body["temperature"], body["max_tokens"], body["ignore_eos"], body["stream"]) == (0, 4, True, True)
    assert body["model"] == "liar-1"
    assert (headers["x-user-id"], headers["x-forebay-cache"], headers["x-slo-ttft-ms"]) == ("u0", "off", "900")
    counts = {(o.prompt_tokens, o.cached_tokens, o.completion_tokens, len(o.gaps)) for o in trace.outcomes}
    assert counts == {(30, 16, 4, 3)}


def test_a_request_is_sent_when_it_is_due_whatever_became_of_the_others(liar: lies.Liar) -> None:
    liar.script = script(0.4, lies.text("a", "stop"))
    trace = send(liar, at(*(i / 50 for i in range(10))))
    assert liar.at_once == 10
    assert all(outcome.lag < 0.3 for outcome in trace.outcomes)


def test_latencies_count_from_the_schedule_when_the_server_stalls(liar: lies.Liar) -> None:
    """One request at a time, and the first takes a second: those due meanwhile waited for it."""
    turn = asyncio.Lock()
    naps = iter([1.0])

    async def serial(body: dict[str, Any]) -> AsyncIterator[bytes | float]:
        async with turn:
            yield next(naps, 0.0)
            async for piece in lies.honest(body):
                yield piece

    liar.script = serial
    trace = send(liar, at(0.0, 0.25, 0.5, 0.75), seconds=1.0)
    firsts = [outcome.first or 0.0 for outcome in trace.outcomes]
    for seen, least in zip(firsts, (1.0, 0.75, 0.5, 0.25), strict=True):
        assert least - 0.05 <= seen < least + 0.5
    assert all(outcome.took >= (outcome.first or 9) for outcome in trace.outcomes)


def test_a_generator_that_is_late_says_so_and_its_lateness_is_in_the_latencies(liar: lies.Liar) -> None:
    async def hindered() -> Trace:
        load = asyncio.create_task(run_open_loop(Endpoint(liar.url), PLAN, at(0.0, 0.1, 0.2), 0.3))
        await asyncio.sleep(0.25)  # of which 0.2 are the time before the first
        time.sleep(0.5)  # noqa: ASYNC251 - the loop is to stand still
        return await load

    trace = asyncio.run(hindered())
    found = overload_report.summarize(trace, Slo())
    assert 0.3 <= found["lag"]["max"] < 1.5
    assert found["stall"]["max"] >= 0.3
    assert found["ttft"]["p99"] >= 0.3


# --- what comes back ------------------------------------------------------------------------------------------


def test_refusals_are_counted_by_status_and_code_and_are_no_failures() -> None:
    said = {
        "u0": (503, "queue_full", "2"),
        "u1": (429, "user_share", "7"),
        "u2": (503, "deadline_exceeded", None),
        "u3": (500, "engine_failure", None),
    }
    with gated(said.get) as server:
        trace = send(server, at(0.0, 0.02, 0.04, 0.06, 0.08))
    found = overload_report.summarize(trace, Slo())
    assert found["statuses"] == {"200": 1, "429": 1, "500": 1, "503": 2}
    assert found["codes"] == {"503 queue_full": 1, "429 user_share": 1, "503 deadline_exceeded": 1}
    assert (found["admitted"], found["refused"], found["expired"], found["failed"]) == (1, 3, 1, 1)
    assert found["failures"] == {"500 t: no": 1}
    # Who was refused after waiting is not among those who are told how long a refusal took.
    assert found["refusal"]["n"] == 2
    assert set(found["refusal_by_code"]) == {"queue_full", "user_share", "deadline_exceeded"}
    assert [outcome.retry_after for outcome in trace.outcomes[:3]] == [2.0, 7.0, None]
    assert found["offered"] == pytest.approx(5 / 0.2)
    assert found["goodput"] == pytest.approx(1 / 0.2)


@pytest.mark.parametrize(
    ("pieces", "reason", "code"),
    [
        (
            [lies.text("a"), b'data: {"error": {"message": "too late", "code": "deadline_exceeded"}}\n\n'],
            "error frame: too late",
            "deadline_exceeded",
        ),
        ([lies.text("a"), lies.DONE], "stream broke off", ""),
        ([lies.text("a")], "stream broke off", ""),
        ([], "stream broke off", ""),
        ([b"data: {oops\n\n"], "not a chat frame", ""),
        ([b"data: []\n\n"], "not a chat frame", ""),
    ],
)
def test_a_stream_that_does_not_end_well_is_a_failure(
    liar: lies.Liar, pieces: list[bytes], reason: str, code: str
) -> None:
    liar.script = script(*pieces)
    trace = send(liar, at(0.0, 0.05))
    found = overload_report.summarize(trace, Slo())
    assert (found["failed"], found["whole"], found["goodput"], found["refused"]) == (2, 0, 0.0, 0)
    assert found["expired"] == (2 if code else 0)
    assert {outcome.code for outcome in trace.outcomes} == {code}
    (failure,) = found["failures"]
    assert reason in failure


def test_the_ttft_is_the_first_text_not_the_role(liar: lies.Liar) -> None:
    liar.script = script(lies.ROLE, 0.2, lies.text("a"), 0.3, lies.text("b c d", "length"), lies.usage())
    (outcome,) = send(liar, at(0.0)).outcomes
    assert 0.2 <= (outcome.first or 0) < 0.45
    assert 0.1 <= outcome.gap < 0.2  # three tokens a gap


def test_who_is_not_answered_at_the_end_is_left_and_its_wait_counts(liar: lies.Liar) -> None:
    liar.script = script(30.0, lies.text("a", "stop"))
    trace = send(liar, at(0.0, 0.1), grace=0.5)
    found = overload_report.summarize(trace, Slo())
    assert (found["left"], found["failed"], found["whole"], found["goodput"]) == (2, 0, 0, 0.0)
    assert 0.5 <= found["ttft"]["p50"] < 2


def test_who_has_no_patience_goes_before_the_first_text_but_not_after_it(liar: lies.Liar) -> None:
    naps = iter([0.0, 5.0])

    async def slow(body: dict[str, Any]) -> AsyncIterator[bytes | float]:
        yield next(naps)
        yield lies.text("a")
        yield 0.6
        yield lies.text("b", "stop")

    liar.script = slow
    first, second = send(liar, at(0.0, 0.15), manners=Manners(leaves=0.4)).outcomes
    assert first.whole
    assert (second.left, second.failure) == (True, None)
    assert 0.4 <= second.took < 2


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(Unreachable):
        asyncio.run(run_open_loop(Endpoint("http://127.0.0.1:1"), PLAN, at(0.0), 1.0))


def test_a_prediction_is_read_from_the_header_and_held_against_the_ttft(monkeypatch: pytest.MonkeyPatch) -> None:
    class Predicts(lies.Liar):
        async def chat(self, request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"x-forebay-predicted-ttft-ms": "100"})
            await response.prepare(request)
            await asyncio.sleep(0.3)
            await response.write(lies.text("a", "stop"))
            return response

    monkeypatch.setattr(lies, "Liar", Predicts)
    with lies.serving() as server:
        trace = send(server, at(0.0))
    found = overload_report.predictions(trace.outcomes)
    assert found is not None
    assert found["n"] == 1
    assert 3 <= found["p50"] < 10
    assert found["within_2x"] == 0


def test_predictions_have_quantiles_and_a_share_within_a_factor_of_two() -> None:
    made = [Outcome(0, 0.0, lag=0.5, first=0.5 + ratio, predicted=1.0) for ratio in (0.4, 0.5, 1.0, 2.0, 2.1)]
    found = overload_report.predictions([*made, Outcome(0, 0.0, first=1.0)])
    assert found is not None
    assert (found["n"], found["p50"], found["within_2x"]) == (5, 1.0, 0.6)
    assert overload_report.predictions([]) is None


# --- who comes back -------------------------------------------------------------------------------------------


def test_who_retries_at_once_does_so_as_often_as_it_may() -> None:
    with gated(lambda _: (503, "queue_full", "5")) as server:
        trace = send(server, at(0.0), manners=Manners(retry="at once", most=3))
    assert [outcome.attempt for outcome in trace.outcomes] == [0, 1, 2, 3]
    assert trace.outcomes[-1].at < 2
    found = overload_report.summarize(trace, Slo())
    assert (found["offered"], found["attempted"]) == (pytest.approx(5), pytest.approx(20))
    assert (found["retried"], found["first_retry_success"]) == (1, 0.0)


def test_who_retries_at_once_stops_with_success() -> None:
    refusals = iter([(503, "queue_full", None)] * 2)
    with gated(lambda _: next(refusals, None)) as server:
        trace = send(server, at(0.0), manners=Manners(retry="at once"))
    assert [outcome.status for outcome in trace.outcomes] == [503, 503, 200]


def test_who_obeys_comes_back_when_told_and_its_latency_counts_from_then() -> None:
    refusals = iter([(429, "user_share", "1")])
    with gated(lambda _: next(refusals, None)) as server:
        trace = send(server, at(0.0), manners=Manners(retry="after"))
    first, second = trace.outcomes
    assert (first.number, first.user) == (second.number, second.user) == (0, "u0")
    assert 1.0 <= second.at - first.at < 2
    assert (second.first or 9) < 0.5
    assert overload_report.summarize(trace, Slo())["first_retry_success"] == 1.0


# --- what is made of it ---------------------------------------------------------------------------------------


def answer(at: float, first: float = 0.2, user: str = "", gap: float = 0.05, tokens: int = 4) -> Outcome:
    return Outcome(
        0, at, user, status=200, first=first, took=1.0, gaps=(gap,) * 3, prompt_tokens=10, completion_tokens=tokens
    )


def refusal(at: float, took: float = 0.01) -> Outcome:
    return Outcome(0, at, status=503, code="queue_full", took=took)


def test_goodput_is_of_answers_in_full_in_time_over_what_was_offered() -> None:
    outcomes = (
        answer(0.0),
        answer(0.1, first=4.1),  # too late
        answer(0.2, gap=0.16),  # too slow
        answer(0.3, tokens=3),  # shorter than asked
        refusal(0.4),
        replace(answer(0.5), failure="error frame: x"),
        replace(answer(0.6), left=True),
    )
    found = overload_report.summarize(Trace(PLAN, 2.0, outcomes), Slo())
    assert (found["goodput"], found["goodput_with_short"], found["offered"]) == (0.5, 1.0, 3.5)
    assert (found["short"], found["whole"], found["admitted"]) == (1, 4, 5)


def test_jains_index() -> None:
    assert overload_report.jain([5, 5, 5, 5]) == pytest.approx(1.0)
    assert overload_report.jain([8, 0, 0, 0]) == pytest.approx(0.25)
    assert overload_report.jain([0, 0]) is None
    assert overload_report.jain([]) is None


def test_served_tokens_are_those_of_whole_answers() -> None:
    outcomes = [answer(0, user="a"), answer(1, user="a"), replace(answer(2, user="b"), left=True)]
    assert overload_report.served(outcomes, ["a", "b"]) == {"a": 28, "b": 0}


def test_recovery_is_when_nobody_is_refused_and_the_ttft_is_as_before() -> None:
    calm = [answer(i) for i in range(10)]
    storm = [refusal(10 + i / 10) for i in range(50)]
    slow = [answer(15.5 + i, first=0.2 if i > 3 else 2.0) for i in range(20)]
    found = overload_report.recovery([*calm, *storm, refusal(15.2), *slow], 10, 15)
    assert found["usual_ttft"] == pytest.approx(0.2)
    assert found["admitted"] == pytest.approx(0.5)  # the first after the last refusal
    # Of five in a row, three must be as before: so from the third but last slow one on.
    assert found["ttft"] == pytest.approx(2.5)
    assert found["seconds"] == pytest.approx(2.5)
    at_once = overload_report.recovery([*calm, *storm, *(answer(15 + i) for i in range(9))], 10, 15)
    assert at_once["seconds"] == 0.0


def test_there_is_no_recovery_within_what_was_offered_or_without_a_before() -> None:
    calm = [answer(i) for i in range(10)]
    assert overload_report.recovery([*calm, *(answer(15 + i, first=3.0) for i in range(9))], 10, 15)["ttft"] is None
    assert overload_report.recovery([*calm, answer(15), refusal(16)], 10, 15)["seconds"] is None
    assert overload_report.recovery([*calm], 10, 15)["seconds"] is None
    assert overload_report.recovery([answer(15)], 10, 15)["seconds"] is None


def test_tokens_for_nobody_are_those_of_steps_less_those_of_whole_answers() -> None:
    before = {"vllm:iteration_tokens_total_sum": 100.0, "vllm:generation_tokens_total": 10.0}
    after = {
        "vllm:iteration_tokens_total_sum": 130.0,
        "vllm:generation_tokens_total": 15.0,
        "vllm:prompt_tokens_total": 10.0,
    }
    cached = replace(answer(0), cached_tokens=2)
    found = overload_report.dead(before, after, [cached, replace(answer(1), left=True), refusal(2)])
    assert (found["computed"], found["received"]) == (30.0, 10 - 2 + 3)
    assert found["share"] == pytest.approx(19 / 30)
    assert (found["told"], found["told_received"]) == (15.0, 14)
    assert overload_report.dead({}, {}, [])["share"] is None


# --- verdicts -------------------------------------------------------------------------------------------------


def point(multiple: float, goodput: float, variant: str = "gate", **more: Any) -> dict[str, Any]:
    return {
        "variant": variant,
        "multiple": multiple,
        "goodput": goodput,
        "offered": multiple * 2,
        "ttft": {"p50": 1.0, "p99": 3.0},
        "refusal": {"p99": 0.01},
        "statuses": {"200": 10, "503": 5},
        "failed": 0,
        "memory_after": {"pss": 1000, "rss": 2000},
        "most_waiting": 50.0,
        **more,
    }


def judged(*points: dict[str, Any]) -> dict[str, bool | None]:
    return {verdict.name.split(",")[0]: verdict.ok for verdict in overload_report.judge(points, Slo(), 80)}


GOOD = (point(0.5, 1.0), point(1, 2.0), point(2, 1.9), point(10, 1.85))


def test_a_good_curve_is_all_well_whatever_the_server_without_a_gate_does() -> None:
    bad = point(10, 0.1, "no gate", failed=7, most_waiting=900.0, ttft={"p99": 60.0})
    assert set(judged(*GOOD, bad).values()) == {True}


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (point(5, 1.7), "goodput over its peak"),
        (point(5, 2.0, ttft={"p99": 4.2}), "TTFT P99 of the admitted"),
        (point(5, 2.0, refusal={"p99": 0.06}), "refusal P99"),
        (point(5, 2.0, statuses={"200": 1, "500": 1}), "statuses other than 200"),
        (point(5, 2.0, failed=1), "failures"),
        (point(5, 2.0, memory_after={"pss": 1060, "rss": 1}), "growth of memory from the second point on"),
        (point(5, 2.0, most_waiting=81.0), "most requests waiting"),
    ],
)
def test_each_criterion_is_missed_by_its_own_fault_only(bad: dict[str, Any], name: str) -> None:
    found = judged(*GOOD, bad)
    assert [key for key, ok in found.items() if ok is False] == [name]


def test_what_below_the_capacity_is_low_is_no_fault_and_what_was_not_seen_is_not_judged() -> None:
    assert judged(point(0.1, 0.2), point(1, 2.0))["goodput over its peak"] is True
    unseen = judged(point(1, 2.0, refusal=None, most_waiting=None))
    assert unseen["refusal P99"] is unseen["most requests waiting"] is None
    assert unseen["growth of memory from the second point on"] is None
    assert Verdict.most("x", None, 1.0).line().startswith("not seen")
    assert Verdict.least("x", 0.5, 1.0).line() == "MISSED   x: 0.5 (limit 1)"


def test_medians_of_repeats_a_table_and_a_picture(tmp_path: Path) -> None:
    points = [point(m, g, v) for v in ("no gate", "gate") for m in (1, 2) for g in (1.0, 3.0, 2.0)]
    rows = overload_report.medians(points)
    assert [(row["variant"], row["multiple"], row["goodput"]) for row in rows] == [
        ("gate", 1, 2.0),
        ("gate", 2, 2.0),
        ("no gate", 1, 2.0),
        ("no gate", 2, 2.0),
    ]
    assert overload_report.table(points).row_count == 4
    overload_report.picture([*points, point(3, 0.0, ttft=None)], Slo(), "t", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_bound_is_that_of_the_flags() -> None:
    assert overload.most_waiting([]) == 5 * 16 + 16 + overload.LOOK_AHEAD
    assert overload.most_waiting(["--max-queue", "7", "--max-batch=4"]) == 7 + 4 + overload.LOOK_AHEAD


def test_what_waits_so_that_nobody_is_refused_are_flags_of_the_server() -> None:
    assert overload.most_waiting(overload.GATE_OFF) > 10**6


# --- batching and the front -----------------------------------------------------------------------------------


def test_serial_at_best_is_one_request_after_the_other() -> None:
    closed = {"requests_per_s": 2.0, "e2e": {"mean": 5.0}}
    rounds = [{kind: {"closed": closed, "open": {"offered": 1.0}} for kind in batching.KINDS}] * 2
    found = batching.verdict(rounds, 2.5)
    assert (found["serial_at_best_per_s"], found["continuous_over_serial_at_best"]) == (0.4, 5.0)
    assert found["medians"]["window"]["closed: requests/s"] == 2.0
    assert batching.table(rounds).row_count == 3


def test_shares_of_a_core_and_which_part_is_full() -> None:
    shares = front.Cpu(12.0, 3.0, 2.0, 1.0).since(front.Cpu(10.0, 1.0, 1.0, 1.0))
    assert shares == {"front": 1.0, "engine": 0.5, "generator": 0.0}
    assert front.first_full(shares) == "front (100% of a core, full)"
    assert "not full" in front.first_full({"front": 0.4, "engine": 0.5})


def test_wrk_is_told_of_the_last_line(tmp_path: Path, liar: lies.Liar) -> None:
    program = tmp_path / "wrk"
    program.write_text('#!/bin/sh\necho "Running 1s test"\necho \'{"statuses": {"503": 3}, "seconds": 1.0}\'\n')
    program.chmod(0o755)
    server = Server(Endpoint(liar.url), os.getpid(), 0.0, MemoryWatch(os.getpid()))
    assert front.with_wrk(server, str(program), PLAN, 1, 8)["statuses"] == {"503": 3}
    program.write_text("#!/bin/sh\necho 'no such host' >&2; exit 1\n")
    with pytest.raises(ServerFailed, match="wrk: no such host"):
        front.with_wrk(server, str(program), PLAN, 1, 8)


# --- the whole, on a server that behaves ----------------------------------------------------------------------

METRICS = '# HELP x\nvllm:num_requests_waiting{model_name="m"} 3.0\nforebay:a{b="1"} 1\nforebay:a{b="2"} 2\n'


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """With metrics, on which nothing runs or waits once it was looked at twice."""
    looks = itertools.count()

    async def scrape(*_: object) -> dict[str, float]:
        return {"vllm:num_requests_waiting": 5.0 if next(looks) < 2 else 0.0}

    monkeypatch.setattr(overload, "scrape", scrape)
    with lies.serving() as server:
        yield Server(Endpoint(server.url), os.getpid(), 0.0, MemoryWatch(os.getpid()))


def test_series_of_one_name_are_added_up() -> None:
    async def whole() -> dict[str, float]:
        app = web.Application()

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=METRICS)

        app.router.add_get("/metrics", metrics)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            return await overload.scrape(session, Endpoint(str(server.make_url("/"))))

    assert asyncio.run(whole()) == {"vllm:num_requests_waiting": 3.0, "forebay:a": 3.0}


def bench(**more: Any) -> overload.Bench:
    return overload.Bench(PLAN, Slo(), seconds=0.5, capacity=20.0, repeats=1, bound=80, each=1, **more)


def test_the_curve_goes_through_all_points_of_all_servers_and_sees_who_waits(measured: Server) -> None:
    found = overload.curve({"gate": measured, "no gate": measured}, bench(multiples=(0.5, 2.0)))
    points = found.result["points"]
    assert [(p["variant"], p["multiple"]) for p in points] == [
        (variant, multiple) for multiple in (0.5, 2.0) for variant in ("gate", "no gate")
    ]
    assert points[0]["most_waiting"] == 5.0
    assert all(p["whole"] == p["admitted"] > 0 for p in points)
    assert points[0]["offered"] == points[1]["offered"]
    json.dumps(points)


def test_users_of_equal_demand_have_an_equal_part_but_for_the_heavy_one(measured: Server) -> None:
    found = overload.fair({"gate": measured}, bench())
    assert found.result["normal_answered"] == found.result["heavy_answered"] == 1.0
    tokens = found.result["served_tokens"]
    assert tokens["heavy"] == 10 * tokens["least"] == 10 * tokens["most"]
    assert found.result["jain"] == pytest.approx(60**2 / (51 * 150))
    assert [verdict.ok for verdict in found.verdicts] == [True, False]


def test_the_other_scenarios_end_in_verdicts(measured: Server) -> None:
    servers = {"gate": measured}
    assert overload.burst(servers, bench()).result["gate"]["recovery"].keys() >= {"admitted", "ttft", "seconds"}
    assert overload.retry(servers, bench(peak=20.0)).result["peak"] == 20.0
    assert overload.predict(servers, bench()).result["2 x"]["n"] == 0


def test_a_scenario_that_is_none_is_a_usage_error() -> None:
    result = CliRunner().invoke(overload.main, ["flood"])
    assert result.exit_code == 2
    assert "'curve', 'burst', 'fair', 'retry', 'predict'" in result.output
