"""The suites: who takes part, in which order, what is sent, and what is made of it, failures above all."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import liar as lies
import pytest
from click.testing import CliRunner

from forebay.bench import load, report, suites, suites_report
from forebay.bench.client import Endpoint
from forebay.bench.contestants import BadContestant, Contestant, Start, forebay

START = Start(port=1234, slots=16, context=768)


# --- who takes part -------------------------------------------------------------------------------------------


def test_forebay_with_a_name_and_flags() -> None:
    contestant = forebay("forebay:int8=--quantize int8 --api-key 'a b'", "tiny.gguf")
    assert contestant is not None
    assert contestant.name == "forebay:int8"
    command = contestant.command(START)
    assert command[:5] == [sys.executable, "-m", "forebay", "serve", "tiny.gguf"]
    assert command[5:7] == ["--port", "1234"]
    # What is given comes last, so that it wins over what the suites set.
    assert command[-4:] == ["--quantize", "int8", "--api-key", "a b"]
    assert "--queue-timeout" in command


def test_forebay_without_and_what_is_something_else() -> None:
    plain = forebay("forebay", "m")
    assert plain is not None
    assert (plain.name, plain.about) == ("forebay", "forebay serve")
    assert forebay("forebay:x", "m").name == "forebay:x"  # type: ignore[union-attr]
    assert forebay("forebayx", "m") is forebay("forebay:a b=", "m") is forebay("openvino", "m") is None
    with pytest.raises(BadContestant, match="No closing quotation"):
        forebay("forebay:x=--model 'a", "m")


def test_contestants_stand_in_the_order_given_and_peers_is_all_of_them() -> None:
    names = [c.name for c in suites.choose(["llamacpp", "forebay:b", "forebay:a"], suites.MODEL, None)]
    assert names == ["llamacpp", "forebay:b", "forebay:a"]
    names = [c.name for c in suites.choose([], suites.MODEL, None)]
    assert names == ["forebay", *suites.PEERS]


@pytest.mark.parametrize(
    ("texts", "model", "why"),
    [
        (["vllm"], suites.MODEL, "'vllm' is no contestant; there are:"),
        (["forebay:a=", "forebay:a=--dtype float32"], suites.MODEL, "forebay:a is there twice"),
        (["openvino", "peers"], suites.MODEL, "openvino is there twice"),
        (["forebay", "openvino"], "other.gguf", "the peers have smollm2-135m-instruct, not other.gguf"),
    ],
)
def test_what_is_no_contestant_is_a_usage_error(texts: list[str], model: str, why: str) -> None:
    with pytest.raises(BadContestant) as error:
        suites.choose(texts, model, None)
    assert why in str(error.value)
    result = CliRunner().invoke(suites.main, [*texts, "--model", model])
    assert result.exit_code == 2
    assert why.split(",", maxsplit=1)[0] in " ".join(result.output.split())


def test_each_round_begins_with_another_and_the_skipped_stay_out() -> None:
    all_four = [Contestant(name, name, skipped="not here" if name == "c" else "") for name in "abcd"]
    orders = ["".join(c.name for c in suites.order(all_four, number)) for number in range(4)]
    assert orders == ["abd", "bda", "dab", "abd"]
    assert suites.order(all_four[2:3], 1) == []


def test_only_one_with_fixed_slots_is_started_twice() -> None:
    plans = {name: suite.plan(suites.Size(), "s", 60.0) for name, suite in suites.SUITES.items()}
    assert suites.starts(Contestant("a", ""), plans) == [(64, list(plans))]
    fixed = Contestant("b", "", fixed_slots=True)
    assert suites.starts(fixed, plans) == [(16, ["single", "batch", "multiturn", "repeat", "cached"]), (64, ["burst"])]
    assert suites.starts(fixed, {"single": plans["single"]}) == [(1, ["single"])]


# --- what is sent ---------------------------------------------------------------------------------------------


def test_the_plans_are_those_that_are_promised() -> None:
    plans = {name: suite.plan(suites.Size(), "s", 60.0) for name, suite in suites.SUITES.items()}
    shapes = {name: (p.concurrency, p.requests, p.turns, p.prompt_tokens, p.output_tokens) for name, p in plans.items()}
    assert shapes == {
        "single": (1, 4, 1, 300, 100),
        "batch": (16, 32, 1, 300, 100),
        "burst": (64, 64, 1, 300, 100),
        "multiturn": (16, 16, 4, 300, 60),
        "repeat": (16, 64, 1, 300, 100),
        "cached": (16, 64, 1, 300, 100),
    }
    assert not any(plan.warmup or plan.strict_openai for plan in plans.values())
    small = suites.SUITES["burst"].plan(suites.Size(10, 5, shrink=100), "s", 60.0)
    assert (small.concurrency, small.requests) == (1, 1)


def test_the_context_holds_the_longest_conversation() -> None:
    plan = suites.SUITES["multiturn"].plan(suites.Size(), "s", 60.0)
    assert suites.context_of(plan) >= 1.1 * (300 + 3 * 60) + 4 * 60 + 100
    assert suites.context_of(suites.SUITES["batch"].plan(suites.Size(), "s", 60.0)) == 768


def drive(server: lies.Liar, plan: load.Plan) -> load.Result:
    return asyncio.run(load.run_closed_loop(Endpoint(server.url), plan))


MULTITURN = load.Plan(2, 2, 12, 4, warmup=0, seed="s", turns=3, turn_words=5)


def test_a_conversation_sends_its_history_along() -> None:
    with lies.serving() as server:
        summary = report.summarize(drive(server, MULTITURN))
        sent = [request["messages"] for request in server.requests]
    assert (summary["completed"], summary["failed"], summary["ttft"]["n"]) == (6, 0, 6)
    assert sorted(len(messages) for messages in sent) == [1, 1, 3, 3, 5, 5]
    longest = [messages for messages in sent if len(messages) == 5]
    assert longest[0][0] != longest[1][0]
    for messages in longest:
        assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
        assert {m["content"] for m in messages[1::2]} == {"Hi there!"}
        assert [len(m["content"].split()) for m in messages[0::2]] == [12, 5, 5]
        assert messages[2] != messages[4]
        # What was sent before is the beginning of what is sent now.
        assert messages[:3] in sent
        assert messages[:1] in sent


def test_turns_behind_a_failed_one_are_failures_too() -> None:
    async def fails_at_the_second(body: dict[str, Any]) -> AsyncIterator[bytes | float]:
        if len(body["messages"]) == 3:
            yield b'data: {"error": {"message": "out of pages"}}\n\n'
            return
        async for piece in lies.honest(body):
            yield piece

    with lies.serving() as server:
        server.script = fails_at_the_second
        summary = report.summarize(drive(server, MULTITURN))
        assert len(server.requests) == 4
    assert (summary["completed"], summary["failed"]) == (2, 4)
    assert summary["failures"] == {"error frame: out of pages": 2, "not asked: an earlier turn failed": 2}
    assert summary["e2e"]["n"] == 2


def test_repeat_draws_from_four_prompts() -> None:
    plan = suites.SUITES["repeat"].plan(suites.Size(words=9), "seed", 60.0)
    said = [plan.message(index)["content"] for index in range(plan.requests)]
    assert len(set(said)) == 4
    assert min(said.count(one) for one in set(said)) >= 4
    assert said == [replace(plan).message(index)["content"] for index in range(plan.requests)]
    assert set(said).isdisjoint(replace(plan, seed="other").message(i)["content"] for i in range(64))
    with pytest.raises(ValueError, match="prompts: 'none'"):
        replace(plan, prompts="none").message(0)


# --- a server that runs ---------------------------------------------------------------------------------------

# Answers what it is asked; says how it was started on /v1/models; dies at the first prompt if told so.
_SERVER = """
import http.server, json, os, sys
class Chat(http.server.BaseHTTPRequestHandler):
    def log_message(self, *a): pass
    def out(self, data, kind="application/json"):
        self.send_response(200); self.send_header("Content-Type", kind); self.end_headers(); self.wfile.write(data)
    def do_GET(self):
        self.out(json.dumps({"data": [{"id": "tiny"}]}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "dies" in sys.argv and len(body["messages"]) == 3:
            os._exit(1)
        n = body["max_tokens"]
        frames = [{"choices": [{"delta": {"content": "a "}, "finish_reason": None}]}] * (n - 1)
        frames.append({"choices": [{"delta": {"content": "b"}, "finish_reason": "length"}]})
        frames.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": n}})
        self.out(b"".join(b"data: %s\\n\\n" % json.dumps(f).encode() for f in frames), "text/event-stream")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Chat).serve_forever()
"""


def contestant(name: str, *arguments: str, fixed_slots: bool = False) -> tuple[Contestant, list[Start]]:
    seen: list[Start] = []

    def command(start: Start) -> list[str]:
        seen.append(start)
        return [sys.executable, "-c", _SERVER, str(start.port), *arguments]

    return Contestant(name, "a test", command, fixed_slots=fixed_slots), seen


def plans(*names: str) -> dict[str, load.Plan]:
    return {name: suites.SUITES[name].plan(suites.Size(5, 4, shrink=8), f"s/{name}", 60.0) for name in names}


def test_one_server_goes_through_all_suites_and_tells_of_each() -> None:
    server, seen = contestant("good", fixed_slots=True)
    told: list[str] = []
    result = suites.run_server(server, plans("single", "burst", "multiturn"), lambda name, _: told.append(name))
    assert told == ["single", "burst", "multiturn"]
    assert [(start.slots, start.context) for start in seen] == [(8, 256)]
    assert result["error"] is None
    assert result["start"] > 0
    runs = result["suites"]
    assert {name: (run["completed"], run["failed"]) for name, run in runs.items()} == {
        "single": (1, 0),
        "burst": (8, 0),
        "multiturn": (8, 0),
    }
    assert all(run["memory"]["rss"] > 2**20 for run in runs.values())
    assert json.loads(json.dumps(result)) == result


def test_a_server_that_dies_fails_what_was_left_and_no_other() -> None:
    (good, _), (dies, _) = contestant("good"), contestant("dies", "dies")
    broken = Contestant("broken", "ends at once", lambda _: [sys.executable, "-c", "raise SystemExit('no model')"])
    absent = Contestant("absent", "", skipped="not installed")
    chosen = plans("single", "multiturn", "batch")
    states: list[int] = []
    rounds = suites.run_rounds([broken, dies, absent, good], lambda _: chosen, 1, lambda done: states.append(len(done)))
    assert states == [1]
    (results,) = rounds
    assert list(results) == ["broken", "dies", "good"]
    assert results["broken"]["start"] is None
    assert {run["error"] for run in results["broken"]["suites"].values()} == {"ended with code 1: no model"}
    died = results["dies"]["suites"]
    assert died["single"]["completed"] == 1
    assert died["multiturn"]["failed"] >= 6
    assert died["multiturn"]["completed"] + died["multiturn"]["failed"] == 8
    assert "no server answers" in died["batch"]["error"]
    assert all(run["failed"] == 0 for run in results["good"]["suites"].values())
    found = suites_report.verdict(rounds, ["broken", "dies", "good"])
    assert any(line.startswith("broken, round 1, single, multiturn, batch: failed") for line in found["problems"])
    assert not any("good" in line for line in found["problems"])


def test_the_command_shows_the_failed_and_the_skipped_and_ends_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (good, _), broken = contestant("good"), Contestant("broken", "", lambda _: [sys.executable, "-c", "1/0"])
    absent = Contestant("absent", "", skipped="not installed: no such folder")
    monkeypatch.setattr(suites, "choose", lambda *_: [good, broken, absent])
    monkeypatch.setattr(suites, "stop_on_term", lambda: None)
    file, picture = tmp_path / "new" / "all.json", tmp_path / "new" / "rates.png"
    size = ["--words", "5", "--tokens", "4", "--shrink", "16", "--rounds", "2", "--suite", "batch"]
    result = CliRunner().invoke(suites.main, [*size, "--json", str(file), "--plot", str(picture)])
    assert result.exit_code == 1, result.output
    *shown, last = result.stdout.splitlines()
    answer = json.loads(last)
    assert answer["contestants"]["absent"]["skipped"] == "not installed: no such folder"
    assert answer["suites"]["batch"]["broken"]["failed_runs"] == 2
    assert answer["suites"]["batch"]["good"]["requests"] == 4
    assert answer["starts"]["broken"] is None
    text = "\n".join(shown)
    assert "skipped: not installed: no such folder" in text
    assert "2 of 2 rounds" in text
    assert "ZeroDivisionError" in text
    full = json.loads(file.read_text())
    assert len(full.pop("rounds")) == 2
    assert full == answer
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_client_has_neither_torch_nor_a_plotting_library() -> None:
    ask = "import sys, forebay.bench.suites, forebay.bench.roofline; print({'torch', 'matplotlib'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", ask], text=True).strip() == "set()"
