"""The ASGI response that owns a chat turn: from the queue to the last byte, or to the client's leaving.

Law 8: a stream's 200 leaves with the first token, or after ``stream_hold`` seconds. Until then a failure has its
true status; from then on it is an error frame without [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..admission.gate import Gate
from ..config import ServerSettings
from ..contract import Backend, Delta, EngineFailure, EngineUnavailable, FinishReason, ForebayError, Prepared, Usage
from . import errors, sse
from .border import RequestRecord, record_of
from .metrics import Turn

_LAST_WORDS = 1.0  # seconds for an error to leave when the server goes down


class _ReaderStalled(Exception):
    """The client has not read for ``reader_timeout`` seconds."""


class ChatReply(Response):
    """Runs one prepared request and sends the answer, as JSON or as a stream.

    Whatever happens, the backend's context is left (the cancel) and ``turn`` gets exactly one ending. ``arrival``
    and ``deadline`` are in seconds on time.monotonic().
    """

    def __init__(
        self,
        backend: Backend,
        gate: Gate,
        settings: ServerSettings,
        prepared: Prepared,
        turn: Turn,
        *,
        arrival: float,
        deadline: float,
        stream: bool,
        include_usage: bool,
    ) -> None:
        super().__init__()
        self._backend = backend
        self._gate = gate
        self._settings = settings
        self._prepared = prepared
        self._turn = turn
        self._arrival = arrival
        self._deadline = deadline
        self._stream = stream
        self._include_usage = include_usage
        self._answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        wire = _Wire(scope, receive, send, self._settings.reader_timeout)
        tasks = [asyncio.create_task(self._answer(wire, record)), asyncio.create_task(_client_gone(receive))]
        if self._stream:
            tasks.append(asyncio.create_task(self._keep_alive(wire)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Only the server cancels: its time to drain is over. The client is told before the connection goes.
            await _end(tasks)
            shown = EngineUnavailable("the server is shutting down", retry_after=5)
            self._turn.failed(shown)
            with contextlib.suppress(TimeoutError, _ReaderStalled):
                async with asyncio.timeout(_LAST_WORDS):
                    await wire.fail(shown)
            return
        results = await _end(tasks)
        self._turn.cancelled()  # counts only if the turn has not ended otherwise
        for result in results:
            if isinstance(result, _ReaderStalled):
                await _cut(record, receive)
            elif isinstance(result, Exception):
                raise result

    async def _answer(self, wire: _Wire, record: RequestRecord) -> None:
        try:
            await (self._send_stream if self._stream else self._send_json)(wire, record)
        except _ReaderStalled:
            raise
        except Exception as error:
            shown = errors.from_exception(error)
            self._turn.failed(shown)
            await wire.fail(shown)

    async def _run(self, record: RequestRecord, take: Callable[[Delta], Awaitable[None]]) -> tuple[FinishReason, Usage]:
        """Wait for a turn, run, hand each delta to ``take``; returns how it ended."""
        async with (
            self._gate.admit(self._deadline),
            self._backend.open(self._prepared, deadline=self._deadline) as deltas,
        ):
            async for delta in deltas:
                self._turn.saw(delta)
                record.prompt_tokens = delta.usage.prompt_tokens
                record.completion_tokens = delta.usage.completion_tokens
                await take(delta)
                if delta.finish is not None:
                    return delta.finish, delta.usage
        raise EngineFailure("the answer broke off")

    async def _send_stream(self, wire: _Wire, record: RequestRecord) -> None:
        chunks = sse.Chunks(self._answer_id, self._created, self._backend.card.id, include_usage=self._include_usage)
        head = chunks.role()

        async def take(delta: Delta) -> None:
            nonlocal head
            # A frame even without text (half a character, a held-back stop string, the end-of-turn token): a client
            # that times frames then times tokens.
            frames, head = head + chunks.text(delta.text), b""
            await wire.write(frames)

        finish, usage = await self._run(record, take)
        frames = chunks.finish(finish)
        if self._include_usage:
            frames += chunks.usage(usage)
        await wire.write(frames + sse.DONE, last=True)

    async def _send_json(self, wire: _Wire, record: RequestRecord) -> None:
        texts: list[str] = []

        async def take(delta: Delta) -> None:
            texts.append(delta.text)

        finish, usage = await self._run(record, take)
        message = {"role": "assistant", "content": "".join(texts), "refusal": None}
        answer = {
            "id": self._answer_id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._backend.card.id,
            "system_fingerprint": None,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
            "usage": sse.usage_fields(usage),
        }
        await wire.respond(Response(msgspec.json.encode(answer), media_type="application/json"))

    async def _keep_alive(self, wire: _Wire) -> None:
        """Send the 200 when the hold is over, and comments whenever the stream has been silent for long."""
        hold_over = self._arrival + self._settings.stream_hold
        while not wire.complete:  # a comment behind the last frame would be no write, and this loop would not rest
            now = time.monotonic()
            silence_over = wire.last_write + self._settings.keep_alive
            if now >= (silence_over if wire.started else hold_over):
                await wire.write(sse.KEEP_ALIVE)
            elif wire.started:
                await asyncio.sleep(silence_over - now)
            else:  # no longer than one silence: the first token may come meanwhile
                await asyncio.sleep(min(hold_over - now, self._settings.keep_alive))
        await asyncio.Event().wait()  # the last frame may still be on its way: the turn ends with it, not with this


class _Wire:
    """One response on its way out. Two tasks write to it, one at a time; each write is bounded in time."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, timeout: float) -> None:
        self._scope, self._receive, self._raw_send = scope, receive, send
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self.complete = False
        self.started = False
        self.last_write = time.monotonic()

    async def write(self, frames: bytes, *, last: bool = False) -> None:
        """Frames of a stream; the first call sends the 200."""
        async with self._lock:
            if not self.complete:  # else a keep-alive that waited behind the last frame
                await self._write(frames, last)

    async def respond(self, response: Response) -> None:
        """A whole response, instead of a stream."""
        async with self._lock:
            await self._respond(response)

    async def fail(self, error: ForebayError) -> None:
        async with self._lock:
            if self.complete:
                return
            if self.started:
                await self._write(sse.error_frame(error), last=True)
            else:
                await self._respond(errors.error_response(error))

    async def _write(self, frames: bytes, last: bool) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        self.complete = last
        await self._send({"type": "http.response.body", "body": frames, "more_body": not last})
        self.last_write = time.monotonic()

    async def _respond(self, response: Response) -> None:
        self.started = self.complete = True
        await response(self._scope, self._receive, self._send)

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._raw_send(message)
        except TimeoutError:
            raise _ReaderStalled from None


async def _end(tasks: list[asyncio.Task[None]]) -> list[BaseException | None]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cut(record: RequestRecord, receive: Receive) -> None:
    """Drop the connection of a client that does not read, and let the server notice before the app returns."""
    if record.abort is not None:
        record.abort()
        await _client_gone(receive)
