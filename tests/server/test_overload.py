"""More than can be served: who is let in, who is refused and how they are told, and in which order the rest come."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from typing import Any

import httpx
import openai
import pytest
from scripted import MODEL, ScriptedBackend, Served, body, say, served, until
from test_endings import CHAT, FOREVER, TEXT, count, raw_request, world
from test_flight import GREEDY, STREAM, told
from test_keys import bearer, entry

from forebay.admission.ask import Ask, Rank
from forebay.admission.gate import Gate
from forebay.contract import Delta, Pace
from forebay.server.metrics import REASONS
from forebay.state.embedded import EmbeddedValkey

pytestmark = pytest.mark.anyio
#: Of an engine that is fast, and of one that is not.
QUICK, SLOW = Pace(0.0001, 0.0, 0.0001, 64), Pace(0.1, 0.01, 0.001, 64)


class Held:
    """A script that tells nothing until it may. ``seen``: first words of the last messages, as they were opened."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.seen: list[str] = []

    async def __call__(self, request: Any, n_prompt: int) -> AsyncIterator[Delta]:
        self.seen.append(request.messages[-1].content.split()[0])
        await self.go.wait()
        async for delta in say()(request, n_prompt):
            yield delta


@asynccontextmanager
async def full(**settings: Any) -> AsyncIterator[tuple[Served, httpx.AsyncClient, Held]]:
    """One answer runs, and there is room for no other."""
    held = Held()
    async with world(held, capacity=1, **settings) as (running, client):
        running.backend.page_size = 4096
        first = asyncio.create_task(client.post(CHAT, json=body(user="first"), timeout=30))
        await until(lambda: running.backend.running == 1)
        yield running, client, held
        held.go.set()
        assert (await first).status_code == 200


def words(text: str, n: int = 1, **fields: Any) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": f"{text} " * n}], **fields)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def waits(running: Served, places: int) -> None:
    await until(lambda: running.app.state.gate.waiting == places)


# Walls


async def test_of_fifty_as_many_as_run_and_wait_are_let_in() -> None:
    held = Held()
    async with world(held, capacity=3, max_queue=5) as (running, client):
        sent = [asyncio.create_task(client.post(CHAT, json=body(), timeout=30)) for _ in range(50)]
        await until(lambda: sum(task.done() for task in sent) == 42)
        assert (running.backend.running, running.app.state.gate.waiting) == (3, 5)
        held.go.set()
        answers = await asyncio.gather(*sent)
        assert sorted(answer.status_code for answer in answers) == [200] * 8 + [503] * 42
        assert count(running, "forebay:admitted_total") == running.backend.opened == 8
        assert count(running, "vllm:admission_rejections_total", reason="queue_full") == 42


async def test_at_ten_times_the_capacity_the_queue_is_bounded_and_refusals_are_quick() -> None:
    waiting, took, codes = [], [], []
    async with world(say(first=0.5), capacity=4, max_queue=8) as (running, client):

        async def ask() -> None:
            begun = time.monotonic()
            response = await client.post(CHAT, json=body(), timeout=30)
            if response.status_code == 503:
                took.append(time.monotonic() - begun)
                assert 1 <= int(response.headers["retry-after"]) <= 30
            codes.append(response.status_code)

        async with asyncio.TaskGroup() as group:
            for number in range(240):  # in three seconds, in which 24 answers end
                group.create_task(ask())
                await asyncio.sleep(0.0125)
                if number % 8 == 0:
                    text = (await client.get("/metrics")).text
                    waiting += [float(line.split()[-1]) for line in text.splitlines() if "requests_waiting{" in line]
        assert max(waiting) == 8
        assert statistics.median(took) < 0.05
        assert set(codes) == {200, 503}
        assert 12 <= codes.count(200) == count(running, "forebay:admitted_total") < 120


async def test_long_prompts_fill_a_queue_that_is_nearly_empty() -> None:
    async with full(max_queue=200, admission={"max_queued_tokens": 8000}) as (running, client, held):
        long = [words("long", 400, user=f"{i}") for i in range(21)]
        sent = [asyncio.create_task(client.post(CHAT, json=fields, timeout=30)) for fields in long[:20]]
        await waits(running, 20)
        assert count(running, "forebay:queued_tokens") == 8000
        assert code(await client.post(CHAT, json=long[20])) == (503, "queued_tokens")
        held.go.set()
        assert {(await one).status_code for one in sent} == {200}
        assert count(running, "forebay:queued_tokens") == 0


# Promises


@pytest.mark.parametrize(("pace", "why"), [(None, "deadline_exceeded"), (SLOW, "predicted_wait")])
async def test_who_cannot_be_answered_in_time_is_never_opened(pace: Pace | None, why: str) -> None:
    async with full() as (running, client, _):
        running.backend.pace = pace
        begun = time.monotonic()
        late = await client.post(CHAT, json=body(stream=True), headers={"x-slo-ttft-ms": "500"})
        assert code(late) == (503, why)
        assert (time.monotonic() - begun >= 0.45) == (pace is None)
        assert int(late.headers["retry-after"]) >= 1
        assert count(running, "forebay:expired_total") == (pace is None)
        assert count(running, "vllm:admission_rejections_total", reason=why) == 1
        assert (running.backend.opened, running.app.state.gate.waiting) == (1, 0)


ANSWERED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "So"},
]


@pytest.mark.parametrize(
    ("fields", "headers", "read"),
    [
        ({}, {}, 0),
        ({"user": "first"}, {}, 1),  # whose it is decides who comes first
        ({"messages": ANSWERED}, {}, 1),  # it goes on with something, so it may come before others
        ({}, {"x-user-id": "other"}, 0),
    ],
)
async def test_what_would_be_too_late_whatever_it_says_is_not_read(
    fields: dict[str, Any], headers: dict[str, str], read: int
) -> None:
    async with full() as (running, client, _):
        running.backend.pace = SLOW
        before = len(running.backend.requests)
        late = await client.post(CHAT, json=body(**fields), headers={"x-slo-ttft-ms": "500", **headers})
        assert code(late) == (503, "predicted_wait")
        assert len(running.backend.requests) == before + read
        assert count(running, "vllm:admission_rejections_total", reason="predicted_wait") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_when_it_was_predicted_to_begin(stream: bool) -> None:
    async with world(say(first=0.1)) as (running, client):
        unknown = await client.post(CHAT, json=body(stream=stream))
        running.backend.pace = SLOW
        known = await client.post(CHAT, json=body(stream=stream, temperature=0))
        again = await client.post(CHAT, json=body(stream=stream, temperature=0))
        assert "x-forebay-predicted-ttft-ms" not in unknown.headers
        assert 50 <= int(known.headers["x-forebay-predicted-ttft-ms"]) <= 500
        assert again.headers["x-cache"] == "hit"
        assert "x-forebay-predicted-ttft-ms" not in again.headers
        assert count(running, "forebay:ttft_prediction_ratio_count") == 1
        assert 0.1 < count(running, "forebay:ttft_prediction_ratio_sum") < 10


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/chat"])
async def test_a_promise_that_is_no_number_is_named(client: httpx.AsyncClient, server: Served, path: str) -> None:
    for value in ("", "0", "-1", "+5", "1.5", "1e3", "500 ms", "1_000", "3600001", "9" * 5000, "\u00b2"):
        for size in (1, 70_000):
            fields = words("x" * size)
            refused = await client.post(path, json=fields, headers={b"x-slo-ttft-ms": value.encode("latin-1")})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "x-slo-ttft-ms"), value[:20]
            assert len(refused.content) < 1000
    assert server.backend.requests == []
    for value in ("1000", "3600000", "0000500"):
        assert (await client.post(CHAT, json=body(), headers={"x-slo-ttft-ms": value})).status_code == 200


async def test_a_flight_goes_on_for_those_whose_time_is_not_over() -> None:
    async with full(admission={"slo_ttft": 1.0}) as (running, client, held):
        running.backend.pace = QUICK
        alone = asyncio.create_task(client.post(CHAT, json=GREEDY))
        assert code(await alone) == (503, "deadline_exceeded")
        begun = time.monotonic()
        early = asyncio.create_task(client.post(CHAT, json=STREAM))
        await waits(running, 1)
        await asyncio.sleep(0.6)
        late = asyncio.create_task(client.post(CHAT, json=STREAM))
        await asyncio.sleep(begun + 1.2 - time.monotonic())  # the first one's promise is broken
        assert running.app.state.gate.waiting == 1
        held.go.set()
        assert [told((await one).text) for one in (early, late)] == [(TEXT, ["stop"])] * 2
        assert running.backend.opened == 2


# Parts


async def test_a_key_has_its_rate_whatever_it_asks_for() -> None:
    slow = entry("key-a", "acme").model_copy(update={"rate": 0.3})  # three at once
    async with (
        served(ScriptedBackend(), keys={"slow": slow, "other": entry("key-b", "acme")}) as running,
        httpx.AsyncClient(base_url=running.url, headers=bearer("key-a")) as client,
    ):
        statuses = [(await client.post(CHAT, json=GREEDY)).status_code for _ in range(3)]
        assert statuses == [200] * 3
        for fields in (GREEDY, body(messages="wrong"), words("x" * 70_000)):
            refused = await client.post(CHAT, json=fields)
            assert code(refused) == (429, "key_rate")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["retry-after"]) <= 4
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.post(CHAT, json=GREEDY, headers=bearer("key-b"))).status_code == 200
        assert count(running, "vllm:admission_rejections_total", reason="key_rate") == 3


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ({"user_concurrency": 1}, "user_concurrency"),
        ({"user_share": 1.0}, "user_share"),
        ({"user_tokens": 1.0}, "user_tokens"),
    ],
)
async def test_who_has_had_its_part_is_told_so_and_others_are_served(limit: dict[str, Any], why: str) -> None:
    async with full(admission=limit) as (running, client, held):
        mine, other = {"x-user-id": "greedy"}, {"x-user-id": "other"}
        sent = [asyncio.create_task(client.post(CHAT, json=words("much", 200), headers=mine, timeout=30))]
        await waits(running, 1)
        refused = await client.post(CHAT, json=words("more", 50), headers=mine)
        assert code(refused) == (429, why)
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        # The header is who it is, else the body says it.
        assert code(await client.post(CHAT, json=words("more", 50, user="greedy"))) == (429, why)
        sent.append(asyncio.create_task(client.post(CHAT, json=words("more", user="greedy"), headers=other)))
        await waits(running, 2)
        held.go.set()
        assert [(await one).status_code for one in sent] == [200, 200]
        assert count(running, "vllm:admission_rejections_total", reason=why) == 2


# How they are told


async def test_the_operators_words_come_first() -> None:
    texts = {"busy_text": "系统繁忙，请稍后再试。", "busy_hint": "转人工"}
    async with full(max_queue=1, queue_timeout=0.4, stream_hold=0.1, admission=texts) as (running, client, _):
        frame = asyncio.create_task(client.post(CHAT, json=body(stream=True)))
        await waits(running, 1)
        refused = await client.post(CHAT, json=body())
        assert code(refused) == (503, "queue_full")
        waited = await frame
        assert (waited.status_code, "[DONE]" in waited.text) == (200, False)
        last = json.loads(waited.text.strip().split("\n\n")[-1].removeprefix("data: "))
        for error in (refused.json()["error"], last["error"]):
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["message"].startswith("系统繁忙，请稍后再试。 转人工 (")
            assert error["type"] == "overloaded_error"
        assert last["error"]["code"] == "deadline_exceeded"


async def test_openais_client_knows_what_is_meant() -> None:
    keys = {"slow": entry("key-a", "acme").model_copy(update={"rate": 1.0}), "fast": entry("key-b", "acme")}
    backend = ScriptedBackend(capacity=1)
    async with served(backend, keys=keys, max_queue=1) as running:

        def client(key: str, retries: int) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=retries)

        async def ask(client: openai.AsyncOpenAI, temperature: float) -> Any:
            messages: Any = [{"role": "user", "content": "hi"}]
            return await client.chat.completions.create(model=MODEL, messages=messages, temperature=temperature)

        async with client("key-a", 0) as hasty, client("key-a", 1) as patient, client("key-b", 0) as fast:
            for _ in range(10):  # as many as it may at once
                await ask(hasty, 0)
            with pytest.raises(openai.RateLimitError) as limited:
                await ask(hasty, 0)
            assert limited.value.code == "key_rate"
            begun = time.monotonic()
            assert (await ask(patient, 0)).choices[0].message.content == TEXT
            assert time.monotonic() - begun >= 1  # it has waited as it was told
            backend.script = say(FOREVER, pause=0.05)
            writers = [
                (await raw_request(running, {"authorization": "Bearer key-b"}, stream=True))[1] for _ in range(2)
            ]
            await waits(running, 1)
            with pytest.raises(openai.InternalServerError) as busy:
                await ask(fast, 1)
            assert (busy.value.status_code, busy.value.code) == (503, "queue_full")
            for writer in writers:
                writer.close()


async def test_every_reason_has_its_series_from_the_start(client: httpx.AsyncClient) -> None:
    text = (await client.get("/metrics")).text
    for reason in REASONS:
        assert f'vllm:admission_rejections_total{{model_name="{MODEL}",reason="{reason}"}} 0.0' in text
    for name in ("admitted_total", "expired_total", "brownout_level", "queued_tokens", "ttft_prediction_ratio_count"):
        assert f"forebay:{name} 0.0" in text
    assert {"queue_full", "user_share", "shed_new"} < set(REASONS)


# Order


async def test_conversations_go_on_before_others_begin_and_batch_work_is_last(embedded: EmbeddedValkey) -> None:
    keys = {"chats": entry("key-a", "acme"), "nights": entry("key-b", "acme", "batch")}
    held = Held()
    held.go.set()
    async with (
        served(ScriptedBackend(held, capacity=1), keys=keys, state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url, headers=bearer("key-a"), timeout=30) as client,
    ):
        assert (await client.post(CHAT, json=words("begin", session_id="order", user="a"))).status_code == 200
        held.go.clear()
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        asked = [
            (words("runs", user="b"), "key-a"),
            (words("batch", user="c"), "key-b"),
            (words("first", user="d"), "key-a"),
            (words("session", user="a", session_id="order"), "key-a"),
            (body(messages=[*said, {"role": "user", "content": "stateless"}], user="e"), "key-a"),
            (body(messages=[*said, {"role": "user", "content": "nightly"}], user="f"), "key-b"),
        ]
        sent = []
        for number, (fields, key) in enumerate(asked):
            sent.append(asyncio.create_task(client.post(CHAT, json=fields, headers=bearer(key))))
            await until(lambda n=number: running.backend.running + running.app.state.gate.waiting == n + 1)  # type: ignore[misc]
        held.go.set()
        assert {(await one).status_code for one in sent} == {200}
        assert held.seen[:2] == ["begin", "runs"]
        assert set(held.seen[2:4]) == {"session", "stateless"}
        assert held.seen[4] == "first"
        assert set(held.seen[5:]) == {"batch", "nightly"}


async def test_what_the_gate_is_asked(monkeypatch: pytest.MonkeyPatch, embedded: EmbeddedValkey) -> None:
    asks: list[Ask] = []
    admit = Gate.admit

    def watched(self: Gate, ask: Ask) -> Any:
        asks.append(ask)
        return admit(self, ask)

    monkeypatch.setattr(Gate, "admit", watched)
    keys = {
        "chats": entry("key-a", "acme"),
        "nights": entry("key-b", "acme", "batch").model_copy(update={"slo_ttft": 9.0}),
        "hasty": entry("key-c", "other").model_copy(update={"slo_ttft": 2.5}),
        "calm": entry("key-d", "other").model_copy(update={"slo_ttft": 0.0}),
    }
    default = Ask(0.0, ("acme", "key:chats"), Rank.FIRST, 1, 512, 1, 4.0, False, 10.0)
    plain, strict = words("one", max_tokens=7), {"x-slo-ttft-ms": "1500"}
    long = {"x-slo-ttft-ms": "3600000"}
    two = {"model": MODEL, "prompt": ["one two", "three"], "n": 3, "max_tokens": 9, "user": "u"}
    table: list[tuple[str, str, dict[str, Any], dict[str, str], dict[str, Any]]] = [
        ("key-a", CHAT, words("one"), {}, {}),
        ("key-a", CHAT, plain, {"x-user-id": "me"}, {"user": ("acme", "me"), "most": 7}),
        ("key-a", CHAT, plain, strict, {"slo": 1.5, "strict": True, "patience": 1.5, "most": 7}),
        ("key-a", CHAT, plain, long, {"slo": 3600.0, "strict": True, "patience": 10.0, "most": 7}),
        ("key-b", CHAT, plain, {}, {"user": ("acme", "key:nights"), "rank": Rank.BATCH, "slo": inf, "most": 7}),
        (
            "key-b",
            CHAT,
            plain,
            strict,
            {
                **{"user": ("acme", "key:nights"), "rank": Rank.BATCH, "most": 7},
                **{"slo": 1.5, "strict": True, "patience": 1.5},
            },
        ),
        ("key-c", CHAT, plain, {}, {"user": ("other", "key:hasty"), "slo": 2.5, "most": 7}),
        ("key-d", CHAT, plain, {}, {"user": ("other", "key:calm"), "slo": inf, "most": 7}),
        (
            "key-a",
            "/v1/completions",
            two,
            {},
            {"user": ("acme", "u"), "prompt": 3, "most": 9, "places": 6},
        ),
        ("key-a", "/chat", {"prompt": "one", "user_id": "v"}, {}, {"user": ("acme", "v")}),
        ("key-a", "/v1/responses", {"model": MODEL, "input": "one", "user": "w"}, {}, {"user": ("acme", "w")}),
    ]
    async with (
        served(ScriptedBackend(capacity=8), keys=keys, state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        for key, path, fields, headers, expected in table:
            response = await client.post(path, json=fields, headers={**bearer(key), **headers})
            assert response.status_code == 200, response.text
            assert replace(asks.pop(), arrival=0.0, size=0) == replace(default, **expected), (key, path, headers)
            assert asks == []
