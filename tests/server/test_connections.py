"""Clients that are slow, lie or say too much: closed by a deadline or a limit, while others are served."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
import psutil
import pytest
from scripted import ScriptedBackend, Served, body, say, served, until

from forebay.commands.serve import allow_files

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode()
FULL = json.dumps(body()).encode()


class Raw:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def rest(self, seconds: float = 5) -> bytes:
        """All that comes until the server closes; a reset is no more than an end."""
        seen = b""
        async with asyncio.timeout(seconds):
            try:
                while piece := await self.reader.read(65536):
                    seen += piece
            except ConnectionError:
                pass
        return seen

    async def drip(self, data: bytes, pause: float) -> None:
        """One byte every ``pause`` seconds, until all is sent or the server has had enough."""
        try:
            for i in range(len(data)):
                self.writer.write(data[i : i + 1])
                await self.writer.drain()
                await asyncio.sleep(pause)
        except ConnectionError:
            pass


@asynccontextmanager
async def connected(running: Served, first: bytes = b"") -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    try:
        writer.write(first)
        yield Raw(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def error_of(answer: bytes) -> tuple[int, str | None]:
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    error = json.loads(rest)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


async def ask(running: Served) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.url) as client:
        return await client.post(CHAT, json=body())


async def test_two_thousand_half_requests_are_closed_while_others_are_served() -> None:
    if psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0] < 5000:
        pytest.skip("both ends of 2,000 connections are files of this process")
    async with served(ScriptedBackend(), head_timeout=6, body_timeout=6) as running:
        halves = [b"", HEAD, HEAD + b"content-length: 1000\r\n\r\n", HEAD + b"content-length: 1000\r\n\r\n{"]
        opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(20):
            opened += await asyncio.gather(*(asyncio.open_connection("127.0.0.1", running.port) for _ in range(100)))
        for i, (_, writer) in enumerate(opened):
            writer.write(halves[i % 4])
        await until(lambda: len(running.server.server_state.connections) >= 2000, 5)
        begun = time.monotonic()
        assert (await ask(running)).status_code == 200
        assert time.monotonic() - begun < 1
        await until(lambda: not running.server.server_state.connections, 20)
        assert (await ask(running)).status_code == 200
        answers = [await Raw(*pair).rest() for pair in opened[:4]]
        for _, writer in opened:
            writer.close()
    assert answers[0] == b""
    assert [error_of(answer) for answer in answers[1:]] == [(408, "request_timeout")] * 3


@pytest.mark.parametrize("stage", ["head", "body", "chunks"])
async def test_a_byte_now_and_then_does_not_move_the_deadline(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="forebay.access")
    first, more = {
        "head": (b"", HEAD + b"x: " + b"x" * 1000),
        "body": (HEAD + b"content-length: %d\r\n\r\n" % len(FULL), FULL),
        "chunks": (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"".join(b"1\r\n%c\r\n" % c for c in FULL)),
    }[stage]
    async with served(ScriptedBackend(), head_timeout=0.3, body_timeout=0.3) as running:
        begun = time.monotonic()
        async with connected(running, first) as raw:
            drip = asyncio.create_task(raw.drip(more, 0.05))
            assert error_of(await raw.rest()) == (408, "request_timeout")
            assert 0.25 < time.monotonic() - begun < 1
            await drip
        assert running.backend.requests == []
        await until(lambda: stage == "head" or bool(caplog.records))
    assert [r.fields["status"] for r in caplog.records if r.name == "forebay.access"] == [408] * (stage != "head")  # type: ignore[attr-defined]


async def test_a_body_in_chunks_of_one_byte_is_read_when_it_comes_in_time() -> None:
    async with served(ScriptedBackend()) as running:
        chunks = b"".join(b"1\r\n%c\r\n" % c for c in FULL) + b"0\r\n\r\n"
        async with connected(
            running, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks
        ) as raw:
            assert (await raw.rest()).startswith(b"HTTP/1.1 200")


async def test_a_content_length_that_lies() -> None:
    async with served(ScriptedBackend(), head_timeout=0.3, body_timeout=0.3) as running:
        # More promised than sent: also where the answer does not wait for the body.
        for path, status in ((CHAT, b"408"), ("/health", b"200"), ("/nowhere", b"404")):
            begun = time.monotonic()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode()
            head = head.replace(b"POST", b"GET") if status == b"200" else head
            async with connected(running, head + FULL) as raw:
                answer = await raw.rest()
            assert answer.split()[1] == status
            assert answer.count(b"HTTP/1.1") == 1
            assert time.monotonic() - begun < 1
        # Less promised than sent: the rest is no request.
        async with connected(running, HEAD + b"content-length: %d\r\n\r\n" % len(FULL) + FULL + b"}" * 50) as raw:
            await raw.rest()
        assert (await ask(running)).status_code == 200


async def test_deadlines_are_for_receiving_not_for_the_answer_nor_for_the_pause_between_requests() -> None:
    backend = ScriptedBackend(say(pause=0.1))
    async with served(backend, head_timeout=0.2, body_timeout=0.2) as running:
        request = HEAD + b"content-length: %d\r\n\r\n" % len(FULL) + FULL
        async with connected(running, request) as raw:
            await raw.reader.readuntil(b'"usage"')
            await asyncio.sleep(0.5)
            raw.writer.write(request)
            await raw.reader.readuntil(b'"usage"')
        # The head of a pipelined request waits for the answer before it; then it has its time, and no more.
        async with connected(running, request + HEAD) as raw:
            answer = await raw.rest()
        first, _, second = answer.partition(b"HTTP/1.1 408")
        assert b'"finish_reason":"stop"' in first
        assert b"request_timeout" in second


async def test_a_blank_line_on_a_kept_connection_does_not_hold_it() -> None:
    async with served(ScriptedBackend(), head_timeout=0.2) as running:
        async with connected(running, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as raw:
            await raw.reader.readuntil(b"}")
            raw.writer.write(b"\r\n")
            await raw.rest(2)
        await until(lambda: not running.server.server_state.connections)


async def test_connections_over_the_cap_are_told_so() -> None:
    async with served(ScriptedBackend(), max_connections=3) as running:
        async with connected(running) as one, connected(running), connected(running):
            await until(lambda: len(running.server.server_state.connections) == 3)
            refused = await ask(running)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
            assert int(refused.headers["retry-after"]) >= 1
            # Those that say nothing do not stay, and there are not many of them.
            quiet = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(100)]
            await until(lambda: len(running.server.server_state.connections) == 3 + 64)
            await until(lambda: len(running.server.server_state.connections) == 3)
            for _, writer in quiet:
                writer.close()
            one.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await one.reader.readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: not running.server.server_state.connections)
        assert (await ask(running)).status_code == 200


FIELDS_10_000 = b"".join(b"x%d: y\r\n" % i for i in range(10_000))
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(FULL), FULL)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 2**20 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 65_600 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + FIELDS_10_000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + FIELDS_10_000[:4000] + b"\r\n\r\n",
        b"GET /health?" + b"y" * 65_600 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        CHUNKED + FIELDS_10_000 + b"\r\n",
        CHUNKED + b"x: " + b"y" * 2**20 + b"\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;x=" + b"y" * 2**20 + b"\r\n",
    ],
    ids=[
        "1 MB field",
        "64 KB field",
        "10,000 fields",
        "400 fields",
        "long URL",
        "trailers",
        "1 MB trailer",
        "extension",
    ],
)
async def test_a_head_too_large_is_refused(sent: bytes) -> None:
    memory = psutil.Process().memory_info().rss
    async with served(ScriptedBackend(say(first=1.0))) as running:
        for _ in range(5):
            async with connected(running) as raw:
                try:
                    for at in range(0, len(sent), 2**14):
                        raw.writer.write(sent[at : at + 2**14])
                        await raw.writer.drain()
                        await asyncio.sleep(0)
                except ConnectionError:
                    pass
                answer = await raw.rest()
            if answer:  # else a reset came first, since more was being sent
                assert error_of(answer) == (431, "head_too_large")
            else:
                assert len(sent) > 2**16
        await until(lambda: not running.server.server_state.connections)
        running.backend.script = say()
        assert (await ask(running)).status_code == 200
    assert psutil.Process().memory_info().rss - memory < 20 * 2**20


async def test_as_many_fields_as_a_browser_sends_are_fine_and_trailers_are_no_headers() -> None:
    async with served(ScriptedBackend(), api_key="secret") as running:
        fields = b"authorization: Bearer secret\r\n" + b"".join(b"x%d: %b\r\n" % (i, b"y" * 500) for i in range(100))
        for head, tail, status in ((fields, b"", b"200"), (b"", b"authorization: Bearer secret\r\n", b"401")):
            sent = HEAD + b"connection: close\r\n" + head + CHUNKED.removeprefix(HEAD) + tail + b"\r\n"
            async with connected(running, sent) as raw:
                assert (await raw.rest()).split()[1] == status


@pytest.mark.parametrize(
    "junk",
    [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", HEAD + b"content-length: -1\r\n\r\n"],
)
async def test_what_is_no_http_is_a_400_in_our_shape(junk: bytes) -> None:
    async with served(ScriptedBackend()) as running, connected(running, junk + b"\r\n\r\n") as raw:
        assert error_of(await raw.rest()) == (400, None)


@pytest.mark.parametrize(
    "hosts", [(), ("",), ("x/?",), ("x#y",), ("[::1",), ("a b",), ("x" * 5000,), ("é",), ("a", "b")]
)
async def test_odd_hosts_change_nothing(hosts: tuple[str, ...]) -> None:
    async with served(ScriptedBackend()) as running:
        for path, wanted in ((b"/health", b"200"), (b"/nowhere", b"404"), (b"/v1/models/a/b", b"404")):
            lines = b"".join(b"host: %b\r\n" % host.encode() for host in hosts)
            async with connected(running, b"GET %b HTTP/1.1\r\nconnection: close\r\n%b\r\n" % (path, lines)) as raw:
                assert (await raw.rest()).split()[1] in (wanted, b"400")


@pytest.mark.parametrize(
    ("limits", "raised", "warned"),
    [
        ((100, 5000), (1256, 5000), False),
        ((100, 800), (800, 800), True),
        ((2000, 5000), None, False),
        ((100, -1), (1256, -1), False),
    ],
)
def test_the_limit_of_open_files_is_raised_for_the_connections(
    limits: tuple[int, int],
    raised: tuple[int, int] | None,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: seen.append(new))
    allow_files(1000)
    assert seen == ([raised] if raised else [])
    assert ("max_connections 1000" in caplog.text) == warned
