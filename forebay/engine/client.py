"""The front's end of the engine: starts the child process, speaks with it, watches it, starts it again.

No torch here. One reader task turns frames into streams; whatever happens to the child, every open stream gets
its ending (law 1).

    stopped -> starting -> ready -> restarting -> ready ...        failed: it cannot start, no more tries
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import EngineSettings
from ..contract import EngineFailure, EngineUnavailable, Load, Pace, Unsupported
from .join import policy
from .sequence import Emit, End, GenSpec, Logprobs
from .wire import Cancel, Failed, Frame, Hello, Purge, Submit, ToEngine, Unpacker, pack, to_front

log = logging.getLogger(__name__)

#: Orders that may be sent beyond the engine's free slots, so that it never waits for the front (design, section 1).
LOOK_AHEAD = 2
#: Silence of so many times the longest step of the warm-up is no hang.
SLOW_STEPS = 5
#: After so many starts in a row that came to nothing, give up.
MAX_STARTS = 8
#: Tokens per step are counted up to these bounds; the last is the largest token budget that there may be.
STEP_BOUNDS = tuple(2**i for i in range(21))
#: Counters of a frame that start at 0 in each child.
COUNTERS = ("prefix_queries", "prefix_hits", "preemptions", "steps")


class Stream:
    """News of one order. What is not read yet is merged, so it never grows beyond its answer."""

    def __init__(self, spec: GenSpec) -> None:
        self.spec = spec
        self.ended = False
        self.lost = False
        self.counted = 0  # tokens of the answer that its reader goes by
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._last: Emit | None = None
        self._news = asyncio.Event()

    def put(self, emit: Emit) -> None:
        self._tokens += emit.tokens
        self._logprobs += emit.logprobs
        self._last = emit
        self.ended = emit.end is not None
        self._news.set()

    async def get(self) -> Emit:
        """All that has come since the last call, as one; waits if nothing has."""
        await self._news.wait()
        self._news.clear()
        last = self._last
        if last is None:
            raise RuntimeError("news without news")
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        return Emit(last.id, tokens, last.end, last.detail, last.cached, last.started, logprobs, last.tier)


class EngineClient:
    """``model`` is (id, kind, path, cache) of the model's files."""

    def __init__(self, model: tuple[str, str, Path, Path | None], settings: EngineSettings) -> None:
        self._model = model
        self._settings = settings
        self.state = "stopped"
        self.hello: Hello | None = None
        self.restarts = 0
        self.pid: int | None = None
        self._watchers: list[Callable[[], None]] = []
        self._streams: dict[int, Stream] = {}
        self._next_id = 0
        self._sent = 0
        self._transit: deque[int] = deque()  # prompt tokens of each order that no frame has told of yet
        self._transit_tokens = 0
        self._frame: Frame | None = None
        self._pace: Pace | None = None
        self._slots = policy(settings.batching, settings.max_batch).slots
        self._heard = 0.0
        self._totals: Counter[str] = Counter()
        self._step_tokens = dict.fromkeys(STEP_BOUNDS, 0)  # bound -> steps at or under it
        self._writer: asyncio.StreamWriter | None = None
        self._failure: Exception | None = None
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin; the engine is usable when ``wait_ready`` returns."""
        self.state = "starting"
        self._task = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def wait_ready(self) -> None:
        """Until the first start succeeded. Raises Unsupported or EngineFailure if it cannot."""
        await self._settled.wait()
        if self._failure:
            raise self._failure

    async def stop(self) -> None:
        """End the child and everything that runs on it."""
        self.state = "stopped"
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._close_books("the server stops")
        self._settled.set()
        self._changed()

    def watch(self, callback: Callable[[], None]) -> None:
        self._watchers.append(callback)

    def submit(self, make: Callable[[int], GenSpec]) -> Stream:
        """Send the order that ``make`` builds with its id. Raises EngineUnavailable while there is no engine."""
        if self.state != "ready" or self._writer is None:
            raise EngineUnavailable(f"the engine is {self.state}", retry_after=2)
        self._next_id += 1
        stream = self._streams[self._next_id] = Stream(make(self._next_id))
        self._send(Submit(stream.spec))
        self._sent += 1
        self._transit.append(len(stream.spec.ids))
        self._transit_tokens += len(stream.spec.ids)
        return stream

    def release(self, stream: Stream) -> None:
        """The caller is done with it. If it has not ended, this is the cancel."""
        self._streams.pop(stream.spec.id, None)
        if not stream.ended and self.state == "ready":
            self._send(Cancel(stream.spec.id, len(stream.spec.ids) + stream.counted))

    def purge(self, salt: str, ids: list[int], public: int, spare: int) -> None:
        """Keep nothing that only this sequence of tokens has, but its first ``spare`` pages. Without an engine that
        runs, what is on disk stays until it expires."""
        if self.state == "ready":
            self._send(Purge(salt, ids, public, spare))

    def load(self) -> Load:
        frame = self._frame
        counters = self._counters(frame)
        if frame is None:
            return Load(ready=False, state=self.state, slots=self._slots, **counters)
        in_transit = self._sent - frame.received
        return Load(
            ready=self.state == "ready",
            state=self.state,
            running=frame.running,
            waiting=frame.waiting + in_transit,
            credits=frame.credits + LOOK_AHEAD - in_transit if self.state == "ready" else 0,
            heartbeat_age=time.monotonic() - self._heard,
            pages=frame.pages,
            page_size=self.hello.page_size if self.hello else 0,
            tiers=frame.tiers,
            slots=self._slots,
            owed=frame.owed + self._transit_tokens,
            pace=self._pace,
            **counters,
        )

    def _counters(self, frame: Frame | None) -> dict[str, Any]:
        """The cumulative fields of Load, which go on over restarts."""
        now = {name: self._totals[name] + (getattr(frame, name) if frame else 0) for name in COUNTERS}
        step_tokens = {"step_tokens": dict(self._step_tokens), "step_tokens_sum": self._totals["step_tokens_sum"]}
        return {"restarts": self.restarts} | now | step_tokens

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    def _changed(self) -> None:
        for callback in self._watchers:
            callback()

    # ---- the child's life

    async def _supervise(self) -> None:
        """Run the child again and again, with back-off, until stopped or beyond hope."""
        fruitless = 0
        while True:
            try:
                reason = await self._run_once()
            except Exception as error:
                log.exception("the engine's end in the front failed")
                reason = f"{type(error).__name__}: {error}"
            was_ready, self.hello = self.hello is not None, None
            self._close_books(reason)
            fruitless = 0 if was_ready else fruitless + 1
            if self._failure or fruitless >= MAX_STARTS or not self._settled.is_set():
                self._failure = self._failure or EngineFailure(f"the engine cannot start: {reason}")
                self.state = "failed"
                self._settled.set()
                self._changed()
                log.error("the engine failed: %s", reason)
                return
            self.state = "restarting"
            self.restarts += 1
            self._changed()
            pause = min(30.0, 0.25 * 2**fruitless)
            log.error("the engine is gone (%s); starting it again in %.2g s", reason, pause)
            await asyncio.sleep(pause)

    def _close_books(self, reason: str) -> None:
        """Give every open stream its ending, and keep the counters."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lost = True
            stream.put(Emit(stream.spec.id, end=End.ERROR, detail=f"the engine is gone: {reason}"))
        if frame := self._frame:
            for name in COUNTERS:
                self._totals[name] += getattr(frame, name)
        self._frame = None
        self._pace = None
        self._sent = 0
        self._transit.clear()
        self._transit_tokens = 0

    async def _run_once(self) -> str:
        """One child from start to end. Returns why it ended; kills it if this is cancelled."""
        ours, theirs = socket.socketpair()
        id, kind, path, cache = self._model
        order = {
            "id": id,
            "kind": kind,
            "path": str(path),
            "cache": str(cache) if cache else None,
            "settings": self._settings.model_dump(mode="json"),
        }
        argv = [sys.executable, "-m", "forebay.engine.process", str(theirs.fileno()), json.dumps(order)]
        child: asyncio.subprocess.Process | None = None
        try:
            # Its own session: a signal to the server's group is the front's to handle, which then stops the child.
            child = await asyncio.create_subprocess_exec(
                *argv, pass_fds=[theirs.fileno()], start_new_session=True, stdin=asyncio.subprocess.DEVNULL
            )
            theirs.close()
            self.pid = child.pid
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            return await self._read(reader)
        finally:
            # Whatever was reached before it failed or was cancelled.
            theirs.close()
            if self._writer is None:
                ours.close()
            else:
                self._writer.close()
            self._writer = None
            self.pid = None
            if child is not None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()

    async def _read(self, reader: asyncio.StreamReader) -> str:
        unpacker = Unpacker()
        while True:
            patience = self._settings.start_timeout
            if self.hello:  # a large model's full step on a CPU is long, and no hang
                patience = max(self._settings.hang_timeout, SLOW_STEPS * self.hello.slowest)
            try:
                # Not wait_for: in Python 3.11 it swallows a cancel that comes just as the data does.
                async with asyncio.timeout(patience):
                    data = await reader.read(1 << 18)
            except TimeoutError:
                return f"no news for {patience:.3g} s"
            except OSError as error:
                return f"the socket broke: {error}"
            if not data:
                return "its process ended"
            self._heard = time.monotonic()
            for body in unpacker.feed(data):
                message = to_front(body)
                match message:
                    case Frame():
                        self._take(message)
                    case Hello():
                        self._ready(message)
                    case Failed(detail, unsupported):
                        if unsupported:
                            self._failure = Unsupported(detail)
                        return detail
            self._changed()

    def _ready(self, hello: Hello) -> None:
        if self.restarts:
            log.warning("the engine is ready again (restart %d)", self.restarts)
        self.hello = hello
        self.state = "ready"
        self._settled.set()

    def _take(self, frame: Frame) -> None:
        self._frame = frame
        self._pace = Pace(*frame.pace) if frame.pace else None
        while len(self._transit) > self._sent - frame.received:
            self._transit_tokens -= self._transit.popleft()
        if frame.step_tokens:
            self._totals["step_tokens_sum"] += frame.step_tokens
            for bound in STEP_BOUNDS:
                self._step_tokens[bound] += frame.step_tokens <= bound
        for emit in frame.emits:
            if stream := self._streams.get(emit.id):
                stream.put(emit)
                if stream.ended:
                    del self._streams[emit.id]
