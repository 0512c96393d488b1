"""Streams through nginx, with the configuration of docs/try and nginx's buffering on.

The backend gives a token only when the test says so: what arrives before the next is given was not held back.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from product import frames
from scripted import ANSWER, MODEL, Script, ScriptedBackend, Served, body, fail, say, served, until

from forebay.contract import Delta, EngineFailure, EngineUnavailable
from forebay.server import sse

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
CONFIG = Path(__file__).parents[2] / "docs" / "try" / "nginx.conf"
# Debian keeps it where only root looks.
NGINX = shutil.which(
    "nginx", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
)
needs_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx on this machine")


@dataclass
class Tap:
    """A script whose tokens come one by one, each when ``give`` is called."""

    given: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    taken: int = 0

    async def play(self, request: Any, n_prompt: int) -> AsyncIterator[Delta]:
        async for delta in say()(request, n_prompt):
            await self.given.acquire()
            self.taken += 1
            yield delta

    def give(self, tokens: int = 1) -> None:
        for _ in range(tokens):
            self.given.release()


@dataclass
class Client:
    """A plain client that keeps what has arrived so far."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    received: bytes = b""

    async def read(self, what: bytes, seconds: float = 10.0) -> None:
        """Until ``what`` has arrived."""
        async with asyncio.timeout(seconds):
            while what not in self.received:
                piece = await self.reader.read(1 << 16)
                assert piece, self.received
                self.received += piece


@asynccontextmanager
async def nginx(upstream: int, folder: Path, change: Callable[[str], str] = str) -> AsyncIterator[int]:
    """nginx in front of the port ``upstream``, with the example's configuration; yields its port."""
    assert NGINX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = CONFIG.read_text()
    for address, used in (("server 127.0.0.1:8000;", upstream), ("listen 127.0.0.1:8080;", port)):
        assert text.count(address) == 1
        text = text.replace(address, f"{address.split(':')[0]}:{used};")
    config = folder / "nginx.conf"
    config.write_text(change(text))
    # Started by root, nginx would work as another user, who may not look into this folder.
    globals_ = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
    log = folder / "log"
    with log.open("wb") as out:
        argv = [NGINX, "-p", str(folder), "-c", str(config), "-e", "stderr", "-g", globals_]
        process = await asyncio.create_subprocess_exec(*argv, stdout=out, stderr=out)
    try:
        async with asyncio.timeout(20):
            while True:
                assert process.returncode is None, log.read_text()
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    break
        yield port
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def ask(port: int, *headers: str, **fields: Any) -> AsyncIterator[Client]:
    """A chat asked for by a plain client, which reads no more than it is told to."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
    sent = json.dumps(body(**fields)).encode()
    head = [f"POST {CHAT} HTTP/1.1", "host: x", f"content-length: {len(sent)}", *headers]
    writer.write("".join(f"{line}\r\n" for line in [*head, ""]).encode() + sent)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def world(
    script: Script, folder: Path, change: Callable[[str], str] = str, **settings: Any
) -> AsyncIterator[tuple[Served, int]]:
    """(the server, the port of the nginx in front of it)"""
    backend = ScriptedBackend(script, capacity=settings.pop("capacity", 4))
    async with served(backend, **settings) as server, nginx(server.port, folder, change) as port:
        yield server, port


def compressing(config: str) -> str:
    """As many configurations do."""
    assert config.count("http {") == 1
    return config.replace("http {", "http {\n    gzip on;\n    gzip_types text/event-stream;")


def without_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = tuple(header for header in sse.HEADERS if header[0] != b"x-accel-buffering")
    assert len(rest) == len(sse.HEADERS) - 1
    monkeypatch.setattr(sse, "HEADERS", rest)


def counted(server: Served, name: str) -> float:
    labels = {"model_name": MODEL} if name.startswith("vllm:") else {}
    return server.app.state.metrics.registry.get_sample_value(name, labels) or 0.0


def content(text: str) -> bytes:
    return f'"content":"{text}"'.encode()


async def test_a_stream_asks_not_to_be_buffered_and_a_whole_answer_does_not(client: httpx.AsyncClient) -> None:
    stream = await client.post(CHAT, json=body(stream=True))
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["cache-control"] == "no-cache"
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert "x-accel-buffering" not in (await client.post(CHAT, json=body())).headers


@needs_nginx
@pytest.mark.parametrize("change", [str, compressing])
async def test_each_frame_arrives_before_the_next_token_is_there(tmp_path: Path, change: Callable[[str], str]) -> None:
    tap = Tap()
    async with (
        world(tap.play, tmp_path, change) as (_, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        asyncio.timeout(30),
    ):
        tap.give()
        seen: list[str] = []
        # Accept-Encoding: gzip is httpx's default.
        async with client.stream("POST", CHAT, json=body(stream=True)) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-cache"
            assert ("content-encoding" in response.headers) == (change is compressing)
            assert "x-accel-buffering" not in response.headers  # addressed to nginx, which keeps it
            async for frame in frames(response):
                if isinstance(frame, dict) and (text := frame["choices"][0]["delta"].get("content")):
                    seen.append(text)
                    assert tap.taken == len(seen)
                    tap.give()
        assert seen == list(ANSWER)


@needs_nginx
async def test_without_the_header_a_compressing_nginx_sends_one_lump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the header is for. (Without compression nginx passes the chunks of HTTP/1.1 on as they come, buffering or
    not.)"""
    without_the_header(monkeypatch)
    tap = Tap()
    async with (
        world(tap.play, tmp_path, compressing) as (_, port),
        ask(port, "accept-encoding: gzip", stream=True) as client,
    ):
        tap.give(len(ANSWER) - 1)
        await until(lambda: tap.taken == len(ANSWER) - 1)
        with pytest.raises(TimeoutError):
            await client.read(b"HTTP/1.1 ", 0.5)
        tap.give()
        await client.read(b"\r\n0\r\n\r\n")
        assert client.received.startswith(b"HTTP/1.1 200 ")


@needs_nginx
@pytest.mark.parametrize("header", [True, False])
async def test_a_client_that_does_not_read_is_seen_through_nginx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: bool
) -> None:
    """The other thing that the header is for: without it nginx takes the whole answer, on its disk, for nobody."""
    if not header:
        without_the_header(monkeypatch)
    big = ("x" * 65_536,) * 1_000  # more than all the sockets on the way hold
    async with world(say(big), tmp_path, reader_timeout=0.3) as (server, port), ask(port, stream=True):
        await until(lambda: server.backend.opened == 1)
        await until(lambda: server.backend.running == 0, 30)
        if header:
            await until(lambda: counted(server, "forebay:cancelled_total") == 1)
            assert counted(server, "vllm:generation_tokens_total") < len(big)
        else:
            assert counted(server, "vllm:generation_tokens_total") == len(big)


@needs_nginx
async def test_keep_alives_pass_while_the_backend_is_silent(tmp_path: Path) -> None:
    tap = Tap()
    async with (
        world(tap.play, tmp_path, stream_hold=0.1, keep_alive=0.1) as (_, port),
        ask(port, stream=True) as client,
    ):
        await client.read(b": keep-alive\n\n")  # and with it the 200, before any token
        assert client.received.startswith(b"HTTP/1.1 200 ")
        assert b"data: " not in client.received
        tap.give()
        await client.read(content(ANSWER[0]))
        client.received = b""
        await client.read(b": keep-alive\n\n")  # between two tokens
        assert b"data: " not in client.received
        tap.give(len(ANSWER) - 1)
        await client.read(b"data: [DONE]")


def reset(writer: asyncio.StreamWriter) -> None:
    """Drop the connection as a killed client does, without a goodbye."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@needs_nginx
@pytest.mark.parametrize("goodbye", [reset, asyncio.StreamWriter.close])
@pytest.mark.parametrize("when", ["whole", "stream, before the first token", "stream, after it"])
async def test_a_client_that_leaves_nginx_cancels(tmp_path: Path, goodbye: Any, when: str) -> None:
    tap = Tap()
    async with world(tap.play, tmp_path) as (server, port), ask(port, stream=when != "whole") as client:
        await until(lambda: server.backend.running == 1)
        if when == "stream, after it":
            tap.give()
            await client.read(content(ANSWER[0]))
        goodbye(client.writer)
        await until(lambda: server.backend.running == 0)
        await until(lambda: counted(server, "forebay:cancelled_total") == 1)


@needs_nginx
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineFailure("broken"), 500, "engine_failure"),
        (EngineUnavailable("gone", retry_after=7), 503, "engine_unavailable"),
    ],
)
async def test_an_error_before_the_first_token_keeps_its_status(
    tmp_path: Path, error: Exception, status: int, code: str, stream: bool
) -> None:
    async with (
        world(fail(error), tmp_path) as (_, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        response = await client.post(CHAT, json=body(stream=stream))
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["code"] == code
        assert response.headers.get("retry-after") == ("7" if status == 503 else None)
        refused = await client.post(CHAT, json=body(stream=stream, temperature=9))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")


@needs_nginx
async def test_an_error_after_the_first_token_is_a_frame(tmp_path: Path) -> None:
    async with world(fail(EngineFailure("broken"), after=2), tmp_path) as (_, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            response = await client.post(CHAT, json=body(stream=True))
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failure"
        assert "[DONE]" not in response.text


@needs_nginx
@pytest.mark.parametrize("size", [100, 3_000_000])
async def test_a_full_queue_says_so_through_nginx(tmp_path: Path, size: int) -> None:
    """Also to a body that nginx is still sending when the answer is there."""
    tap = Tap()
    async with (
        world(tap.play, tmp_path, capacity=1, max_queue=1) as (server, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        ask(port, stream=True),
        ask(port, stream=True),
    ):
        await until(lambda: server.backend.running == 1 and server.app.state.gate.waiting == 1)
        messages = [{"role": "user", "content": "x" * size}]
        refused = await client.post(CHAT, json=body(stream=True, messages=messages))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1


@needs_nginx
async def test_nginx_uses_its_connections_again(tmp_path: Path) -> None:
    async with (
        world(say(), tmp_path) as (server, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        for stream in (True, False, True):
            assert (await client.post(CHAT, json=body(stream=stream))).status_code == 200
            assert len(server.server.server_state.connections) == 1
