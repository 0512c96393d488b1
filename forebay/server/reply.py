"""The ASGI response that owns an answer: from the queue to the last byte, or to the client's leaving.

Law 8: a stream's 200 leaves with the first token, or after ``stream_hold`` seconds. Until then a failure has its
true status; from then on it is an error frame without [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..config import ServerSettings
from ..contract import TIERS, Delta, EngineFailure, EngineUnavailable, ForebayError, Usage
from . import errors, sse
from .border import RequestRecord, record_of
from .flight import Member
from .formats import Collected, Format
from .metrics import Turn
from .source import Source

#: Takes a choice's index and its news.
_Take = Callable[[int, Delta], Awaitable[None]]
_LAST_WORDS = 1.0  # seconds for an error to leave when the server goes down


class _ReaderStalled(Exception):
    """The client has not read for ``reader_timeout`` seconds."""


class Reply(Response):
    """Sends the choices of one answer as they come, as JSON or as a stream.

    Whatever happens, the source is left and closed (the cancel) and ``turn`` gets exactly one ending. ``arrival`` is in
    seconds on time.monotonic(). ``headers``: more of them. ``at``: the source, where the events of a stream
    are to have its position as their ids; then the stream may begin with a later one.
    """

    def __init__(
        self,
        settings: ServerSettings,
        source: Source,
        form: Format,
        turn: Turn,
        *,
        arrival: float,
        stream: bool,
        headers: Mapping[str, str],
        at: Member | None = None,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._source = source
        self._format = form
        self._turn = turn
        self._arrival = arrival
        self._stream = stream
        self._more = dict(headers)  # and what is known with the first token
        self._at = at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._reply(scope, receive, send)
        finally:
            await self._source.close()

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        wire = _Wire(scope, receive, send, self._settings.reader_timeout, self._more, self._format.failure)
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

    async def _run(self, record: RequestRecord, take: _Take) -> Usage:
        """Hand each delta to ``take`` until all choices are whole; returns the usage of all."""
        usages = [Usage(0, 0)] * len(self._source.numbers)

        async def follow(index: int, deltas: AsyncIterator[Delta]) -> None:
            async for delta in deltas:
                self._turn.saw(index, delta)
                usages[index] = delta.usage
                if "x-kv-tier" not in self._more:
                    self._tell(delta)
                await take(index, delta)
                if delta.finish is not None:
                    return
            raise EngineFailure("the answer broke off")

        try:
            async with self._source.open() as streams:
                await _together([follow(index, deltas) for index, deltas in enumerate(streams)])
        finally:
            total = self._total(usages)
            if total.prompt_tokens:  # else there was no news at all
                record.prompt_tokens, record.completion_tokens = total.prompt_tokens, total.completion_tokens
        return total

    def _tell(self, first: Delta) -> None:
        """In headers, what is known with the first news."""
        self._more["x-kv-tier"] = first.usage.tier
        due = self._source.predicted
        if due is not None and due > self._arrival:  # else it was there before this one came
            self._more["x-forebay-predicted-ttft-ms"] = str(round((due - self._arrival) * 1000))

    def _total(self, usages: Sequence[Usage]) -> Usage:
        """Prompts count once, however many choices each has."""
        first = [usage for number, usage in zip(self._source.numbers, usages, strict=True) if number == 0]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in first),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in first),
            tier=max((usage.tier for usage in first), key=TIERS.index, default="none"),
        )

    async def _send_stream(self, wire: _Wire, record: RequestRecord) -> None:
        form = self._format
        unopened = set(range(len(self._source.numbers)))
        if self._at is not None and self._at.told:
            unopened.clear()

        async def take(index: int, delta: Delta) -> None:
            frames = form.opening(index) if index in unopened else b""
            unopened.discard(index)
            if self._at is not None:
                frames += sse.event_id(self._at.told)
            frames += form.delta(index, delta)
            if delta.finish is not None:
                frames += form.finish(index, delta.finish)
            if frames:  # no news is no sign of life
                await wire.write(frames)

        usage = await self._run(record, take)
        await wire.write(form.ending(usage), last=True)

    async def _send_json(self, wire: _Wire, record: RequestRecord) -> None:
        choices = [Collected() for _ in self._source.numbers]

        async def take(index: int, delta: Delta) -> None:
            choices[index].add(delta)

        usage = await self._run(record, take)
        await wire.respond(Response(self._format.whole(choices, usage), media_type="application/json"))

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

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        timeout: float,
        headers: Mapping[str, str],
        failure: Callable[[ForebayError], bytes],
    ) -> None:
        self._scope, self._receive, self._raw_send = scope, receive, send
        self._headers = headers
        self._failure = failure
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
                await self._write(self._failure(error), last=True)
            else:
                await self._respond(errors.error_response(error))

    async def _write(self, frames: bytes, last: bool) -> None:
        if not self.started:
            self.started = True
            own = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": [*sse.HEADERS, *own]})
        self.complete = last
        await self._send({"type": "http.response.body", "body": frames, "more_body": not last})
        self.last_write = time.monotonic()

    async def _respond(self, response: Response) -> None:
        self.started = self.complete = True
        response.headers.update(self._headers)
        await response(self._scope, self._receive, self._send)

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._raw_send(message)
        except TimeoutError:
            raise _ReaderStalled from None


async def _together(followers: list[Coroutine[Any, Any, None]]) -> None:
    """All of them, until the first that fails: its error is raised, and the others are cancelled."""
    if len(followers) == 1:  # most often, and no task is needed for it
        return await followers[0]
    try:
        async with asyncio.TaskGroup() as group:
            for follower in followers:
                group.create_task(follower)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


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
