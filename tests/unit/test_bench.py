"""The benchmark against servers that behave, and servers that do not."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import liar as lies
import pytest
from click.testing import CliRunner

from forebay.bench import load, machine, report, versus, workload
from forebay.bench.client import Endpoint
from forebay.cli import main

PLAN = load.Plan(concurrency=2, requests=5, prompt_tokens=8, output_tokens=4, warmup=1, seed="s")


@pytest.fixture
def liar() -> Iterator[lies.Liar]:
    with lies.serving() as server:
        yield server


def measure(liar: lies.Liar, plan: load.Plan = PLAN) -> dict[str, Any]:
    return report.summarize(asyncio.run(load.run_closed_loop(Endpoint(liar.url), plan)))


def script(*pieces: bytes | float) -> lies.Script:
    async def play(_body: dict[str, Any]) -> AsyncIterator[bytes | float]:
        for piece in pieces:
            yield piece

    return play


def test_every_request_is_counted_once_and_the_warm_up_not(liar: lies.Liar) -> None:
    summary = measure(liar)
    assert len(liar.requests) == 6
    assert (summary["completed"], summary["failed"]) == (5, 0)
    assert (summary["prompt_tokens"], summary["output_tokens"], summary["cached_tokens"]) == (150, 20, 80)
    assert summary["ttft"]["n"] == summary["e2e"]["n"] == 5
    assert summary["itl"]["n"] == 15
    assert summary["requests_per_s"] == pytest.approx(5 / summary["seconds"])
    assert summary["total_tokens_per_s"] == pytest.approx(170 / summary["seconds"])
    assert summary["plan"]["model"] == "liar-1"


def test_requests_are_greedy_of_exact_length_and_distinct(liar: lies.Liar) -> None:
    measure(liar)
    body = liar.requests[0]
    assert (body["temperature"], body["max_tokens"], body["ignore_eos"], body["stream"]) == (0, 4, True, True)
    assert len({request["messages"][0]["content"] for request in liar.requests}) == 6


def test_each_request_has_a_connection_of_its_own(liar: lies.Liar) -> None:
    measure(liar)
    assert {headers["Connection"] for headers in liar.headers} == {"close"}
    assert {headers["x-forebay-cache"] for headers in liar.headers} == {"off"}


def test_shared_prompts_strict_openai_and_no_stream(liar: lies.Liar) -> None:
    summary = measure(liar, replace(PLAN, prompts="shared", strict_openai=True, stream=False))
    assert len({request["messages"][0]["content"] for request in liar.requests}) == 1
    assert not any("ignore_eos" in request or "stream_options" in request for request in liar.requests)
    assert (summary["completed"], summary["output_tokens"]) == (5, 20)
    assert summary["ttft"] is summary["itl"] is None


def test_as_many_clients_at_once_as_asked(liar: lies.Liar) -> None:
    liar.script = script(0.05, lies.text("a", "stop"))
    measure(liar, replace(PLAN, concurrency=3, requests=7, warmup=0))
    assert liar.at_once == 3


def test_ttft_is_the_first_text_not_the_role(liar: lies.Liar) -> None:
    liar.script = script(lies.ROLE, 0.06, lies.text("a"), lies.text("b", "length"), lies.usage())
    ttft = measure(liar)["ttft"]
    assert ttft["n"] == 5
    assert ttft["p50"] >= 0.06


def test_frames_that_carry_several_tokens_count_as_so_many() -> None:
    assert load._per_token_gaps([1.0, 2.0, 4.0], tokens=7) == pytest.approx((1 / 3, 2 / 3))
    # The mean over tokens is exact: from first to last text over the tokens after the first.
    assert load._per_token_gaps([0.0, 1.0, 2.0], tokens=3) == (1.0, 1.0)
    assert load._per_token_gaps([0.0], tokens=3) == load._per_token_gaps([0.0, 1.0], tokens=1) == ()


def test_merged_frames_over_http(liar: lies.Liar) -> None:
    liar.script = script(lies.text("a"), 0.2, lies.text("b c d", "length"), lies.usage(completion_tokens=4))
    itl = measure(liar)["itl"]
    assert itl["n"] == 5
    assert 0.2 / 3 <= itl["mean"] < 0.2


def test_bytes_may_be_cut_anywhere_and_lines_may_end_in_crlf(liar: lies.Liar) -> None:
    whole = b": comment\r\n\r\n" + lies.text("né").replace(b"\n", b"\r\n") + lies.text("e", "stop") + lies.usage()
    pieces: list[bytes | float] = []
    for i in range(0, len(whole), 7):
        pieces += [whole[i : i + 7], 0.001]
    liar.script = script(*pieces)

    async def read() -> str:
        async with (endpoint := Endpoint(liar.url + "/v1/")).session() as session:
            return "".join([chunk.text async for chunk in endpoint.chat(session, {"stream": True})])

    assert asyncio.run(read()) == "née"


def test_without_usage_frames_are_counted_and_said_so(liar: lies.Liar) -> None:
    liar.script = script(lies.text("a"), lies.text("b"), lies.text("", "stop"), lies.DONE)
    summary = measure(liar)
    assert (summary["usage_missing"], summary["output_tokens"], summary["short_answers"]) == (5, 10, 5)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (
            [lies.text("a"), b'data: {"error": {"message": "the engine died"}}\n\n', lies.DONE],
            "error frame: the engine died",
        ),
        ([lies.text("a"), lies.DONE], "stream broke off"),
        ([lies.text("a")], "stream broke off"),
        ([], "stream broke off"),
        ([b"data: {oops\n\n"], "not a chat frame"),
        ([b"data: []\n\n"], "not a chat frame"),
    ],
)
def test_a_stream_that_does_not_end_well_is_a_failure(liar: lies.Liar, pieces: list[bytes], reason: str) -> None:
    liar.script = script(*pieces)
    summary = measure(liar)
    assert (summary["completed"], summary["failed"], summary["output_tokens"]) == (0, 5, 0)
    assert summary["ttft"] is summary["e2e"] is None
    (found,) = summary["failures"]
    assert reason in found


def test_a_refusal_and_a_timeout_are_failures_with_their_reason(liar: lies.Liar) -> None:
    liar.script = script(5.0)
    assert measure(liar, replace(PLAN, timeout=0.1, requests=2))["failures"] == {"timeout": 2}
    liar.status = 503
    assert measure(liar)["failures"] == {"503 overloaded_error: the queue is full": 5}


def bench(liar: lies.Liar, *options: str) -> tuple[int, list[str]]:
    size = ["--concurrency", "2", "--requests", "3", "--prompt-tokens", "5", "--output-tokens", "4"]
    result = CliRunner().invoke(main, ["bench", "--url", liar.url, *size, *options])
    return result.exit_code, result.stdout.splitlines()


def test_the_command_ends_in_one_json_line(liar: lies.Liar) -> None:
    code, lines = bench(liar, "--api-key", "k", "--model", "other")
    summary = json.loads(lines[-1])
    assert code == 0
    assert (summary["completed"], summary["plan"]["model"]) == (3, "other")
    assert liar.headers[0]["Authorization"] == "Bearer k"
    assert any("TTFT" in line for line in lines)


def test_the_command_fails_when_a_request_did(liar: lies.Liar) -> None:
    liar.status = 503
    code, lines = bench(liar)
    assert code == 1
    assert json.loads(lines[-1])["failed"] == 3
    assert any("failed: 3 x 503 overloaded_error: the queue is full" in line for line in lines)


def test_two_runs_without_a_seed_share_no_prompt(liar: lies.Liar) -> None:
    bench(liar)
    bench(liar)
    assert len({request["messages"][0]["content"] for request in liar.requests}) == 10


def test_prompts_are_a_function_of_seed_and_index() -> None:
    assert workload.prompt("a", 0, 50) == workload.prompt("a", 0, 50)
    assert len({workload.prompt(seed, index, 50) for seed in "ab" for index in range(20)}) == 40
    assert len(workload.prompt("a", 0, 50).split()) == 50
    assert len(set(workload.WORDS)) == len(workload.WORDS) > 200


def test_percentiles() -> None:
    values = [float(i) for i in range(1, 102)]
    assert report.spread(reversed(values)) == {
        "n": 101,
        "mean": 51.0,
        "p50": 51.0,
        "p90": 91.0,
        "p95": 96.0,
        "p99": 100.0,
    }
    assert report.percentile([1.0, 2.0], 50) == 1.5
    assert report.percentile([3.0], 99) == 3.0
    assert report.spread([]) is None


# --- versus ---------------------------------------------------------------------------------------------------


def rounds(*rates: tuple[float, float]) -> list[dict[str, Any]]:
    latency = {"mean": 2.0, "p50": 2.0, "p99": 3.0}
    rest = {"output_tokens_per_s": 10.0, "e2e": latency, "ttft": latency, "itl": None}
    return [{name: {"requests_per_s": rate, **rest} for name, rate in zip(versus.NAMES, pair)} for pair in rates]  # noqa: B905


def test_the_ratio_is_of_medians_and_of_each_round() -> None:
    verdict = versus.compare(rounds((1.0, 4.0), (2.0, 6.0), (4.0, 5.0)))
    assert verdict["median_requests_per_s"] == {"baseline": 2.0, "forebay": 5.0}
    assert verdict["ratio_of_medians"] == 2.5
    assert verdict["ratio_per_round"] == [4.0, 3.0, 1.25]


def test_the_table_has_a_row_per_round_and_server_and_the_medians() -> None:
    view = versus.table(rounds((1.0, 4.0), (2.0, 6.0), (4.0, 5.0)))
    columns = {str(column.header): list(column.cells) for column in view.columns}
    assert columns["requests/s"] == ["1.00", "4.00", "2.00", "6.00", "4.00", "5.00", "2.00", "5.00"]
    assert columns["latency P99 s"][-1] == "3.00"
    assert columns["ITL mean ms"][-1] == "-"


def test_rounds_alternate_with_the_same_new_prompts_for_both(liar: lies.Liar) -> None:
    with lies.serving() as other:
        order: list[str] = []
        for name, server in (("baseline", liar), ("forebay", other)):

            async def note(body: dict[str, Any], name: str = name) -> AsyncIterator[bytes | float]:
                order.append(name)
                async for piece in lies.honest(body):
                    yield piece

            server.script = note
        endpoints = {"baseline": Endpoint(liar.url), "forebay": Endpoint(other.url)}
        results = versus.alternate(endpoints, replace(PLAN, requests=2, warmup=1), repeats=2)
    assert order == ["baseline"] * 3 + ["forebay"] * 3 + ["baseline"] * 2 + ["forebay"] * 2
    prompts = [{request["messages"][0]["content"] for request in server.requests} for server in (liar, other)]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 5
    assert [sorted(result) for result in results] == [["baseline", "forebay"]] * 2


def test_no_ratio_of_runs_with_failures(liar: lies.Liar) -> None:
    liar.status = 503
    with pytest.raises(versus.ServerFailed, match=r"baseline: requests failed.*queue is full"):
        versus.alternate({"baseline": Endpoint(liar.url)}, PLAN, repeats=1)


def test_the_machine_is_told() -> None:
    facts = machine.machine()
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert all(facts.values())
    assert facts["torch"][0].isdigit()
