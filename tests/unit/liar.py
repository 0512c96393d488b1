"""A chat server that says what a test tells it to, true or not. Runs in a thread, so that tests may block."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

#: Body of a request -> pieces of the answer's bytes. A piece that is a number is seconds to wait.
Script = Callable[[dict[str, Any]], AsyncIterator[bytes | float]]

USAGE = {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}}
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def text(content: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


def usage(**counts: int) -> bytes:
    return f"data: {json.dumps({'choices': [], 'usage': {**USAGE, **counts}})}\n\n".encode()


async def honest(body: dict[str, Any]) -> AsyncIterator[bytes | float]:
    """Four tokens, one a frame."""
    for piece in (ROLE, *map(text, ("Hi", " ", "there")), text("!", "length"), usage(), DONE):
        yield piece


class Liar:
    """``requests`` holds the bodies as they came; ``status`` other than 200 refuses all; ``at_once`` is the most
    requests that were open together."""

    def __init__(self) -> None:
        self.script: Script = honest
        self.status = 200
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = 0
        self.url = ""
        self._open = 0

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "liar-1"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.status != 200:
            error = {"type": "overloaded_error", "message": "the queue is full"}
            return web.json_response({"error": error}, status=self.status)
        self._open += 1
        self.at_once = max(self.at_once, self._open)
        try:
            if not body.get("stream"):
                choice = {"message": {"role": "assistant", "content": "Hi there!"}, "finish_reason": "length"}
                return web.json_response({"choices": [choice], "usage": USAGE})
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for piece in self.script(body):
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                else:
                    await response.write(piece)
            return response
        finally:
            self._open -= 1


@contextmanager
def serving() -> Iterator[Liar]:
    liar = Liar()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started = threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", liar.models)
        app.router.add_post("/v1/chat/completions", liar.chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        liar.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait(10)
    try:
        yield liar
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
