"""Faults that other servers had (tests/checks.toml), section D. HTTP and connections: what no other test shows.

Where the server decides, the backend is a scripted one; where text or engine decide, it is the product, with a tiny
model of random weights or with the demo model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import scripted
from faults import (
    CHAT,
    KEY,
    SECRET,
    TEXT,
    TOKENIZE,
    Asker,
    of,
    raw,
)
from product import frames, metrics
from scripted import ScriptedBackend, served, until

from forebay.config import ServerSettings
from forebay.contract import Delta, EngineFailure, GenRequest

pytestmark = pytest.mark.anyio

TARGETS = [
    "//v1/models",
    "/v1/models/",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/%76%31/models",
    "/v1/models%00",
    "/v1/models%2fhealth",
    "/health%2f..%2fv1%2fmodels",
    "/v1/models;/health",
    "/v1/models?/health",
    "/v1/models#/health",
    "/./v1/models",
    "/V1/models",
    "/\\v1\\models",
    "/v1/models/../../health/x",
    "http://x/v1/models",
    "http://x/health/../v1/models",
    "http://health/v1/models",
    "http://x:99999/v1/models",
    "/openapi.json",
    "/docs",
    "/metrics/../openapi.json",
    "*",
]


async def spoken(port: int, sent: str) -> bytes:
    """All that the server says to ``sent`` until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent.encode())
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()
        await writer.wait_closed()


async def test_no_odd_target_or_host_opens_a_route() -> None:
    async with served(ScriptedBackend(), api_key="right") as running:
        for target in TARGETS:
            for host in ("x", "x/?", "x#", "x/health", "x?/health", "health", "x/health#"):
                for method in ("GET", "OPTIONS", "HEAD"):
                    head = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
                    answer = await spoken(running.port, head)
                    assert answer.split()[1:2] in ([b"401"], [b"400"]), (method, target, host, answer[:200])


async def test_a_stream_that_waits_in_the_queue_hears_comments() -> None:
    backend = ScriptedBackend(scripted.say(("word ",) * 1000, pause=0.01), capacity=1)
    async with (
        served(backend, stream_hold=0.1, keep_alive=0.1) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        async with client.stream("POST", CHAT, content=raw(CHAT, stream=True)):
            await until(lambda: backend.running == 1)
            backend.script = scripted.say()
            async with client.stream("POST", CHAT, content=raw(CHAT, stream=True)) as waiting:
                assert waiting.headers["x-accel-buffering"] == "no"
                assert waiting.headers["cache-control"] == "no-cache"
                pieces = waiting.aiter_text()
                assert [await anext(pieces) for _ in range(3)] == [": keep-alive\n\n"] * 3
                assert (running.app.state.gate.waiting, backend.opened) == (1, 1)
        await until(lambda: backend.running == 0 and running.app.state.gate.waiting == 0)


async def test_metrics_after_a_mix_are_what_the_clients_counted() -> None:
    """Answered, failed before and after the first token, left before and after it, refused."""

    def scripts(number: int) -> scripted.Script:
        return [
            scripted.say(),
            scripted.say(finish="length"),
            scripted.fail(EngineFailure("x")),
            scripted.fail(EngineFailure("x"), after=2),
            scripted.say(first=30.0),
            scripted.say(("word ",) * 3, pause=30.0),
        ][number % 6]

    playing: set[int] = set()

    async def play(request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
        playing.add(number := int(request.messages[0].content))
        async for delta in scripts(number)(request, n_prompt):
            yield delta

    first_tokens = whole_tokens = 0
    async with (
        served(ScriptedBackend(play, capacity=100)) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):

        async def one(number: int) -> None:
            nonlocal first_tokens, whole_tokens
            kind, stream = number % 6, number % 6 in (3, 5) or number % 4 < 2
            sent = raw(CHAT, messages=[of("user", str(number))], stream=stream)
            if kind == 4:
                asking = asyncio.create_task(client.post(CHAT, content=sent))
                await until(lambda: number in playing, 20)
                asking.cancel()
                return
            async with client.stream("POST", CHAT, content=sent) as response:
                texts = [""]
                async for line in response.aiter_lines():
                    texts.append(line)
                    if kind == 5 and "word" in line:
                        break
            first_tokens += kind != 2
            whole_tokens += len(scripted.ANSWER) * (kind < 2)

        await asyncio.gather(*(one(number) for number in range(36)))
        # The generator has been left before the turn is counted: wait for the end of the requests themselves.
        await until(lambda: running.backend.running == 0 and not running.server.server_state.tasks)
        refusals = [await client.post(CHAT, content=raw(CHAT, n=0)) for _ in range(3)]
        assert {response.status_code for response in refusals} == {400}
        found = metrics((await client.get("/metrics")).text)
    each = 36 / 6
    assert first_tokens == 4 * each
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time"):
        assert found[f"vllm:{name}_seconds_count"] == first_tokens
    assert found["vllm:e2e_request_latency_seconds_count"] == 2 * each
    assert found['vllm:request_success_total{finished_reason="stop"}'] == each
    assert found['vllm:request_success_total{finished_reason="length"}'] == each
    assert found['forebay:request_errors_total{code="engine_failure"}'] == 2 * each
    assert found["forebay:cancelled_total"] == 2 * each
    assert found["vllm:generation_tokens_total"] == whole_tokens + 2 * each + 1 * each
    assert found["vllm:prompt_tokens_total"] == first_tokens
    gaps = found["vllm:generation_tokens_total"] - first_tokens
    assert found["vllm:inter_token_latency_seconds_count"] == gaps


async def test_leaving_at_every_frame_leaves_the_next_turn_whole(small: Asker) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
    before = await small.said(**fields)
    for index in range(14):
        sent = raw(CHAT, small.model, stream=True, **fields)
        async with small.http.stream("POST", CHAT, content=sent) as response:
            seen = 0
            async for _ in frames(response):
                seen += 1
                if seen > index:
                    break
        assert await small.said(**fields) == before


def test_a_reader_gets_thirty_seconds() -> None:
    assert ServerSettings().reader_timeout == 30


async def test_neither_keys_nor_prompts_are_in_the_log_of_the_product(small: Asker) -> None:
    """With every line that there is: the product runs at level debug."""
    wrong = "fb-wrong-but-somebodys"
    odd = [
        ("GET", f"/v1/models?api_key={KEY}", {}, b""),
        ("GET", f"/nowhere?key={wrong}", {"authorization": f"Bearer {wrong}"}, b""),
        ("POST", CHAT, {"authorization": f"Bearer {wrong}"}, raw(CHAT, messages=[of("user", SECRET)])),
        ("POST", CHAT, {"authorization": f"Basic {wrong}"}, b""),
        ("POST", CHAT, {}, raw(CHAT, small.model, messages=[of("user", SECRET)])),
        ("POST", CHAT, {}, raw(CHAT, small.model, stop=SECRET, user=SECRET)),
        ("POST", CHAT, {}, raw(CHAT, small.model, **{SECRET: 1})),
        ("POST", CHAT, {}, raw(CHAT, SECRET)),
        ("POST", CHAT, {}, f'{{"{SECRET}'.encode()),
        ("POST", TEXT, {}, raw(TEXT, small.model, prompt=SECRET, stream=True)),
        ("POST", TOKENIZE, {}, raw(TOKENIZE, small.model, messages=None, prompt=SECRET)),
        ("GET", "/v1/models", {"x-api-key": wrong, "cookie": wrong, "x-request-id": f"{wrong} {wrong}"}, b""),
    ]
    statuses = [(await small.http.request(m, path, headers=h, content=c)).status_code for m, path, h, c in odd]
    assert statuses == [200, 401, 401, 401, 200, 200, 400, 404, 400, 200, 200, 200]
    port = httpx.URL(small.running.url).port
    assert port is not None
    for junk in (f"GET /{wrong} HTTP/9.9\r\n\r\n", f"GET / HTTP/1.1\r\nauthorization {wrong}\r\n\r\n"):
        assert (await spoken(port, junk)).startswith(b"HTTP/1.1 400")
    log = small.running.log.read_text()
    assert log.count("status=200") > 10
    for secret in (KEY, wrong, SECRET):
        assert secret not in log
