"""How a chat ends: exactly once, with its true status before the first byte, and soon when the client leaves."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from scripted import ANSWER, Script, ScriptedBackend, Served, body, fail, say, served, until

from forebay.contract import DeadlineExceeded, Delta, EngineFailure, EngineUnavailable

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
FOREVER = ("word ",) * 100_000
TEXT = "".join(ANSWER)


@asynccontextmanager
async def world(script: Script, **settings: Any) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    capacity = settings.pop("capacity", 4)
    async with (
        served(ScriptedBackend(script, capacity=capacity), **settings) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        yield running, client


def count(running: Served, name: str, **labels: str) -> float:
    labels = {"model_name": "scripted", **labels} if name.startswith("vllm:") or "errors" in name else labels
    return running.app.state.metrics.registry.get_sample_value(name, labels) or 0.0


async def raw_request(
    running: Served, headers: Mapping[str, str] | None = None, **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    sent = json.dumps(body(**fields)).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{more}content-length: {len(sent)}\r\n\r\n".encode() + sent)
    return reader, writer


@asynccontextmanager
async def stalled_stream(running: Served, **fields: Any) -> AsyncIterator[socket.socket]:
    """A client that asked for a stream, has little room for it, and reads none of it by itself."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", running.port))
        sent = json.dumps(body(stream=True, **fields)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n"
        await loop.sock_sendall(sock, head.encode() + sent)
        yield sock


def reset(writer: asyncio.StreamWriter) -> None:
    """Drop the connection as a killed client does, without a goodbye."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def drain(sock: socket.socket) -> bytes:
    received = bytearray()
    while piece := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
        received += piece
    return bytes(received)


# Law 8: before the first byte, the true status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineFailure("broken"), 500, "engine_failure"),
        (EngineUnavailable("gone", retry_after=2.2), 503, "engine_unavailable"),
        (DeadlineExceeded("late"), 503, "deadline_exceeded"),
        (KeyError("secret"), 500, None),
    ],
)
async def test_failure_before_the_first_token_has_its_status(
    error: Exception, status: int, code: str | None, stream: bool
) -> None:
    async with world(fail(error)) as (_, client):
        response = await client.post(CHAT, json=body(stream=stream))
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["code"] == code
        assert "secret" not in response.text
        if status == 503:
            assert response.headers["retry-after"] == ("3" if code == "engine_unavailable" else "1")


async def test_law_8_failure_after_the_first_token_is_a_frame_without_done() -> None:
    async with world(fail(EngineFailure("broken"), after=3)) as (running, client):
        response = await client.post(CHAT, json=body(stream=True))
        assert response.status_code == 200
        frames = response.text.strip().split("\n\n")
        assert json.loads(frames[-1].removeprefix("data: "))["error"]["code"] == "engine_failure"
        assert "[DONE]" not in response.text
        assert len(frames) == 1 + 3 + 1
        whole = await client.post(CHAT, json=body())
        assert whole.status_code == 500
        assert count(running, "forebay:request_errors_total", code="engine_failure") == 2


async def test_law_8_hold_over_then_comments_then_the_answer() -> None:
    async with world(say(first=0.5), stream_hold=0.1, keep_alive=0.1) as (_, client):
        begun = time.monotonic()
        async with client.stream("POST", CHAT, json=body(stream=True)) as response:
            assert 0.1 <= time.monotonic() - begun < 0.4
            assert response.status_code == 200
            text = "".join([piece async for piece in response.aiter_text()])
        assert text.startswith(": keep-alive\n\n: keep-alive\n\n")
        assert text.endswith("data: [DONE]\n\n")
        assert text.count('"role":"assistant"') == 1


async def test_law_8_within_the_hold_nothing_is_sent() -> None:
    async with world(say(first=0.3), stream_hold=5, keep_alive=0.05) as (_, client):
        begun = time.monotonic()
        async with client.stream("POST", CHAT, json=body(stream=True)) as response:
            assert time.monotonic() - begun >= 0.3
            assert not (await response.aread()).startswith(b":")


async def test_law_8_failure_after_the_hold_is_a_frame() -> None:
    async with world(fail(EngineFailure("broken"), pause=0.2), stream_hold=0.05) as (_, client):
        response = await client.post(CHAT, json=body(stream=True))
        assert response.status_code == 200
        assert response.text.startswith(': keep-alive\n\ndata: {"error":')
        assert "[DONE]" not in response.text


async def test_silence_between_tokens_gets_comments() -> None:
    async with world(say(("a", "b"), pause=0.35), keep_alive=0.1) as (_, client):
        text = (await client.post(CHAT, json=body(stream=True))).text
        assert 2 <= text[text.index('"a"') : text.index('"b"')].count(": keep-alive") <= 3


async def test_answer_that_breaks_off_is_an_error() -> None:
    async with world(say(("a", "b"), finish=None)) as (_, client):
        response = await client.post(CHAT, json=body(stream=True))
        assert "engine_failure" in response.text
        assert "[DONE]" not in response.text
        assert (await client.post(CHAT, json=body())).status_code == 500


# The queue


async def test_full_queue_refuses_at_once_and_the_rest_are_answered() -> None:
    hold = asyncio.Event()

    async def held(request: Any, n_prompt: int) -> AsyncIterator[Delta]:
        await hold.wait()
        async for delta in say()(request, n_prompt):
            yield delta

    async with world(held, capacity=2, max_queue=3) as (running, client):
        sent = [asyncio.create_task(client.post(CHAT, json=body(stream=i % 2 == 0))) for i in range(12)]
        await until(lambda: sum(task.done() for task in sent) == 7)  # refused while nobody gets on
        hold.set()
        responses = await asyncio.gather(*sent)
        statuses = [r.status_code for r in responses]
        assert statuses.count(200) == 5
        assert statuses.count(503) == 7
        for refused in (r for r in responses if r.status_code == 503):
            assert refused.json()["error"]["code"] == "queue_full"
            assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert running.backend.most_running == 2
        assert count(running, "vllm:admission_rejections_total", reason="queue_full") == 7


async def test_deadline_in_the_queue() -> None:
    async with world(say(FOREVER, pause=0.05), capacity=1, queue_timeout=0.2) as (running, client):
        _, writer = await raw_request(running, stream=True)
        await until(lambda: running.backend.running == 1)
        late = await client.post(CHAT, json=body(stream=True))
        assert (late.status_code, late.json()["error"]["code"]) == (503, "deadline_exceeded")
        assert running.backend.opened == 1
        assert running.app.state.gate.waiting == 0
        reset(writer)
        await until(lambda: running.backend.running == 0)


# The client goes away


@pytest.mark.parametrize("goodbye", [reset, asyncio.StreamWriter.close])
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_running_cancels_within_100_ms(goodbye: Any, stream: bool) -> None:
    async with world(say(FOREVER, pause=0.01)) as (running, client):
        _, writer = await raw_request(running, stream=stream)
        await until(lambda: count(running, "vllm:generation_tokens_total") >= 3)
        left = time.monotonic()
        goodbye(writer)
        await until(lambda: running.backend.running == 0)
        assert running.backend.left[-1] - left < 0.1
        await until(lambda: count(running, "forebay:cancelled_total") == 1)
        running.backend.script = say()
        assert (await client.post(CHAT, json=body())).json()["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token_cancels_within_100_ms(stream: bool) -> None:
    async with world(say(first=30)) as (running, _):
        _, writer = await raw_request(running, stream=stream)
        await until(lambda: running.backend.running == 1)
        left = time.monotonic()
        writer.close()
        assert await until(lambda: running.backend.running == 0) - left < 0.1


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue_within_100_ms(stream: bool) -> None:
    async with world(say(FOREVER, pause=0.05), capacity=1) as (running, _):
        _, first = await raw_request(running)
        await until(lambda: running.backend.running == 1)
        _, second = await raw_request(running, stream=stream)
        gate = running.app.state.gate
        await until(lambda: gate.waiting == 1)
        left = time.monotonic()
        second.close()
        assert await until(lambda: gate.waiting == 0) - left < 0.1
        assert running.backend.opened == 1
        first.close()
        await until(lambda: count(running, "forebay:cancelled_total") == 2)


async def test_disconnect_at_every_frame_index() -> None:
    async with world(say(pause=0.002)) as (running, client):
        for index in range(len(ANSWER) + 2):
            async with client.stream("POST", CHAT, json=body(stream=True)) as response:
                seen = 0
                async for line in response.aiter_lines():
                    seen += line.startswith("data: ")
                    if seen > index:
                        break
            await until(lambda: running.backend.running == 0)
        whole = await client.post(CHAT, json=body())
        assert whole.json()["choices"][0]["message"]["content"] == TEXT


async def test_reader_that_stops_reading_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    big = ("x" * 65_536,) * 10_000
    async with world(say(big), reader_timeout=0.3) as (running, client):
        async with stalled_stream(running) as sock:
            await until(lambda: running.backend.running == 1)
            await until(lambda: running.backend.running == 0)
            await until(lambda: count(running, "forebay:cancelled_total") == 1)
            assert count(running, "vllm:generation_tokens_total") < len(big)
            # The connection is dropped though the client still has not read, and what it was sent looks cut.
            await until(lambda: not running.server.server_state.connections)
            assert b"[DONE]" not in await drain(sock)
        running.backend.script = say()
        assert (await client.post(CHAT, json=body())).status_code == 200
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


async def test_reader_that_stops_before_the_last_frame_harms_nobody() -> None:
    """The last frame is the one that blocks, and the silence behind it is longer than the keep-alive."""
    async with world(say(("x" * 2**24,)), reader_timeout=0.3, keep_alive=0.1) as (running, client):
        async with stalled_stream(running):
            await until(lambda: running.backend.opened == 1 and running.backend.running == 0)
            await until(lambda: not running.server.server_state.connections)
        running.backend.script = say()
        assert (await client.post(CHAT, json=body())).status_code == 200


async def test_law_8_at_the_end_of_the_drain_everyone_is_told() -> None:
    async with world(say(FOREVER, pause=0.05), capacity=2) as (running, client):

        async def stream() -> list[str]:
            async with client.stream("POST", CHAT, json=body(stream=True)) as response:
                return [line async for line in response.aiter_lines() if line]

        streamed = asyncio.create_task(stream())
        whole = asyncio.create_task(client.post(CHAT, json=body(), timeout=20))
        await until(lambda: running.backend.running == 2)
        queued = asyncio.create_task(client.post(CHAT, json=body(stream=True), timeout=20))
        await until(lambda: running.app.state.gate.waiting == 1)
        running.server.should_exit = True
        *_, last = await streamed
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
        for refused in (await whole, await queued):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_unavailable"
        assert running.backend.running == 0


async def test_a_full_queue_refuses_before_it_reads_the_body() -> None:
    async with world(say(FOREVER, pause=0.05), capacity=1, max_queue=1) as (running, client):
        writers = [(await raw_request(running, stream=True))[1] for _ in range(2)]
        await until(lambda: running.backend.running == 1 and running.app.state.gate.waiting == 1)
        prepared = len(running.backend.requests)
        refused = await client.post(CHAT, content=b"not even JSON")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert len(running.backend.requests) == prepared
        for writer in writers:
            reset(writer)
        await until(lambda: running.backend.running == 0 and running.app.state.gate.waiting == 0)


async def test_law_1_every_accepted_request_has_one_ending() -> None:
    """A mix of all endings; what the metrics count, what clients saw and what the backend saw agree."""
    kinds = [
        say(),
        say(first=0.02),
        fail(EngineFailure("x")),
        fail(EngineFailure("x"), after=2),
        say(FOREVER, pause=0.01),
    ]
    async with world(say(), capacity=3, max_queue=6, queue_timeout=1.0) as (running, client):
        turns = iter(range(10_000))

        def mixed(request: Any, n_prompt: int) -> Any:
            return kinds[next(turns) % len(kinds)](request, n_prompt)

        running.backend.script = mixed
        for _ in range(4):
            pending = [client.post(CHAT, json=body(stream=i % 2 == 0)) for i in range(15)]
            # Long enough for all of them to have arrived, also on a slow machine.
            await asyncio.gather(*(asyncio.wait_for(p, 1.2) for p in pending), return_exceptions=True)
        await until(lambda: running.backend.running == 0 and running.app.state.gate.waiting == 0)
        success = sum(count(running, "vllm:request_success_total", finished_reason=r) for r in ("stop", "length"))
        errors = count(running, "forebay:request_errors_total", code="engine_failure")
        reasons = ("queue_full", "deadline_exceeded")
        rejected = sum(count(running, "vllm:admission_rejections_total", reason=r) for r in reasons)
        cancelled = count(running, "forebay:cancelled_total")
        assert min(success, errors, rejected, cancelled) > 0
        assert success + errors + rejected + cancelled == 60
        assert running.backend.opened == len(running.backend.left)
