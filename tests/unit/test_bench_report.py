"""What is made of the suites: medians, ratios within rounds, and failures that nobody can overlook."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.bench import load, plot, report, suites_report


def run(rate: float, failed: int = 0, **more: Any) -> dict[str, Any]:
    sample = load.Sample(e2e=1.0, ttft=0.5, itl=(0.1, 0.1), completion_tokens=int(rate))
    bad = load.Sample(e2e=1.0, failure="timeout")
    plan = load.Plan(output_tokens=1)
    summary = report.summarize(load.Result(plan, "", 1.0, (sample, *[bad] * failed)))
    return {**summary, "memory": {"rss": 3 * 2**20, "pss": 2**21}, **more}


def rounds_of(**rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = len(next(iter(rates.values())))
    return [
        {
            name: {"start": 1.0 + i, "error": None, "busy": 0.3 * i, "suites": {"batch": runs[i]}}
            for name, runs in rates.items()
        }
        for i in range(count)
    ]


def test_medians_and_ratios_within_rounds() -> None:
    rounds = rounds_of(us=[run(40), run(60), run(80)], them=[run(20), run(10), run(80)])
    found = suites_report.verdict(rounds, ["us", "them"])
    us, them = found["suites"]["batch"]["us"], found["suites"]["batch"]["them"]
    assert (us["output_tokens_per_s"], them["output_tokens_per_s"]) == (60, 20)
    assert them["ratio_per_round"] == [2, 6, 1]
    assert them["ratio"] == 2  # of the rounds; the ratio of the medians would be 3
    assert us["ratio_per_round"] == [1, 1, 1]
    assert (us["ttft_p95_s"], us["itl_mean_s"], us["peak_pss_bytes"]) == (0.5, pytest.approx(0.1), 2**21)
    assert found["starts"] == {"us": 2.0, "them": 2.0}
    assert found["problems"] == []
    assert found["warnings"] == [
        f"{name}, round {number}: {busy} of the cores were busy before it was started"
        for number, busy in ((2, "30%"), (3, "60%"))
        for name in ("us", "them")
    ]


def test_a_run_with_failures_is_told_and_has_no_ratio() -> None:
    lost = {"error": "ended with code 1"}
    rounds = rounds_of(us=[run(40), run(60), lost], them=[run(20), run(30, failed=3), run(10)])
    found = suites_report.verdict(rounds, ["us", "them"])
    us, them = found["suites"]["batch"]["us"], found["suites"]["batch"]["them"]
    assert them["ratio_per_round"] == [2, None, None]
    assert (them["ratio"], us["output_tokens_per_s"]) == (2, 50)
    assert (us["failed_runs"], us["requests"]) == (1, 2)
    assert (them["failed_requests"], them["requests"]) == (3, 6)
    assert found["problems"] == [
        "them, round 2, batch: 3 of 4 requests failed: timeout",
        "us, round 3, batch: failed: ended with code 1",
    ]
    view = suites_report.table(found, "batch", "16 clients")
    columns = {str(column.header): list(column.cells) for column in view.columns}
    assert columns["server"] == ["us", "them"]
    assert columns["failed"] == ["1 of 3 rounds", "3 of 6 requests"]
    assert columns["us / it (rounds)"] == ["", "2.00 (2.00, -, -)"]
    assert columns["ITL mean ms"] == ["100.0", "100.0"]
    assert columns["PSS MiB"] == ["2", "2"]


def test_where_everything_failed_there_are_dashes_and_not_zeros() -> None:
    lost = {"error": "not ready after 900 s"}
    found = suites_report.verdict(rounds_of(us=[lost], them=[run(10)]), ["us", "them"])
    view = suites_report.table(found, "batch", "")
    columns = {str(column.header): list(column.cells) for column in view.columns}
    assert columns["tok/s"] == ["-", "10.0"]
    assert columns["us / it (rounds)"] == ["", "-"]
    assert plot.bars(found, "us") == [("batch", 0.0, 0.0, 0.0)]


def test_short_answers_and_missing_usage_are_told() -> None:
    found = suites_report.verdict(rounds_of(us=[run(4, short_answers=2, usage_missing=1)]), ["us"])
    assert [line.partition(": ")[2] for line in found["problems"]] == [
        "2 answers are shorter than asked",
        "no usage from the server: tokens are counted as frames",
    ]


def test_an_error_in_one_line() -> None:
    assert suites_report.brief("['python', '-m', 'x[1] y'] ended with code 2\nTraceback\n\nBoom: why\n") == (
        "ended with code 2: Boom: why"
    )
    assert suites_report.brief("no server answers") == "no server answers"


def test_bars_reach_from_the_worst_round_to_the_best() -> None:
    found = suites_report.verdict(rounds_of(us=[run(40), run(60), run(90), {"error": "gone"}]), ["us"])
    assert plot.bars(found, "us") == [("batch", 60, 20, 30)]
