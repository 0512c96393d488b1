"""A backend that plays a script, and a real uvicorn around it. Everything runs in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import uvicorn
from fastapi import FastAPI

from forebay.config import AdmissionSettings, AnswerSettings, EngineSettings, KeySettings, ServerSettings, Settings
from forebay.contract import (
    ContextTooLong,
    Delta,
    FinishReason,
    GenRequest,
    Load,
    Message,
    ModelCard,
    Pace,
    Prepared,
    Resume,
    SamplingDefaults,
    Tokens,
    Usage,
)
from forebay.server.app import create_app
from forebay.server.http import protocol

MODEL = "scripted"
ANSWER = ("The ", "capital ", "of ", "France ", "is ", "Paris", ".")
Script = Callable[[GenRequest, int], AsyncIterator[Delta]]


def say(
    texts: tuple[str, ...] = ANSWER, *, pause: float = 0.0, finish: FinishReason | None = "stop", first: float = 0.0
) -> Script:
    """One token per text, ``pause`` seconds apart, the first after ``first`` seconds. Ids are counted from 1."""

    async def play(_request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
        started = time.monotonic()
        await asyncio.sleep(first)
        for i, text in enumerate(texts, 1):
            end = finish if i == len(texts) else None
            yield Delta(text, 1, Usage(n_prompt, i, cached_tokens=1, tier="device"), started, end, ids=(i,))
            await asyncio.sleep(pause)

    return play


def fail(error: Exception, after: int = 0, pause: float = 0.0) -> Script:
    """``after`` tokens, then ``error``."""

    async def play(request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
        if after:
            async for delta in say(("word ",) * after, finish=None)(request, n_prompt):
                yield delta
        await asyncio.sleep(pause)
        raise error

    return play


@dataclass
class ScriptedBackend:
    script: Script = field(default_factory=say)
    capacity: int = 4
    ready: bool = True
    state: str = "ready"
    heartbeat_age: float = 0.0
    pace: Pace | None = None  # with it the gate predicts
    owed: int = 0
    page_size: int = 16
    tokenize_pause: float = 0.0
    max_context: int = 4096
    sampling: SamplingDefaults = SamplingDefaults()
    prepare_error: Exception | None = None
    requests: list[GenRequest] = field(default_factory=list)
    resumes: list[Resume | None] = field(default_factory=list)  # of those
    forgotten: list[tuple[str, Resume]] = field(default_factory=list)
    running: int = 0
    opened: int = 0
    choices: list[int] = field(default_factory=list)  # as they were opened
    left: list[float] = field(default_factory=list)  # time.monotonic() of each leaving
    most_running: int = 0
    entered: bool = False
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.entered = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.entered = False

    @property
    def card(self) -> ModelCard:
        return ModelCard(MODEL, 1_700_000_000, self.max_context, 1000, self.sampling)

    async def prepare(self, request: GenRequest, resume: Resume | None = None) -> Prepared:
        """What is to be resumed from it is the number of the request."""
        if self.prepare_error is not None:
            raise self.prepare_error
        self.requests.append(request)
        self.resumes.append(resume)
        texts = [m.content for m in request.messages] if request.prompt is None else [request.prompt]
        n_tokens = sum(len(text.split() if isinstance(text, str) else text) for text in texts)
        if n_tokens + (request.max_tokens or 1) > self.max_context:
            raise ContextTooLong("too long", param="messages")
        key = hashlib.sha256(repr(replace(request, ttl=0.0)).encode()).digest()
        most = request.max_tokens or self.max_context - n_tokens
        return Prepared(n_tokens, key, request, str(len(self.requests)).encode(), most)

    async def forget(self, salt: str, resume: Resume, spare: int = 0) -> None:
        self.forgotten.append((salt, replace(resume, turns=resume.turns[spare:])))

    async def tokenize(
        self,
        source: str | tuple[Message, ...],
        *,
        bos: bool = True,
        parse_special: bool = False,
        generation_prompt: bool = True,
        variables: Mapping[str, bool | str] | None = None,
    ) -> Tokens:
        """One token per word, its length; "<s>", "<special>", "<answer>" and variables where they are asked for."""
        if isinstance(source, str):
            words = [*(["<s>"] if bos else []), *(["<special>"] if parse_special else []), *source.split()]
        else:
            words = " ".join(f"<{m.role}> {m.content}" for m in source).split()
            words += ["<answer>"] if generation_prompt else []
            words += [f"{name}={value}" for name, value in (variables or {}).items()]
        await asyncio.sleep(self.tokenize_pause)
        return Tokens(tuple(map(len, words)), tuple(words))

    async def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join("x" * i for i in ids)

    @asynccontextmanager
    async def open(
        self, prepared: Prepared, *, choice: int = 0, deadline: float | None = None
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        assert isinstance(prepared.order, GenRequest)
        self.choices.append(choice)
        self.opened += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async with contextlib.aclosing(self.script(prepared.order, prepared.n_tokens)) as deltas:  # type: ignore[type-var]
                yield deltas
        finally:
            self.left.append(time.monotonic())
            self.running -= 1
            self.changed()

    def load(self) -> Load:
        return Load(
            ready=self.ready,
            state=self.state,
            running=self.running,
            credits=self.capacity - self.running,
            heartbeat_age=self.heartbeat_age,
            pages={"free": 6, "cached": 1, "pinned": 1, "running": 2},
            page_size=self.page_size,
            prefix_queries=100,
            prefix_hits=40,
            preemptions=3,
            restarts=2,
            steps=10,
            step_tokens={8: 4, 64: 9},
            step_tokens_sum=321,
            slots=self.capacity,
            owed=self.owed,
            pace=self.pace,
        )

    def watch(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def changed(self) -> None:
        for callback in self.callbacks:
            callback()


@dataclass
class Served:
    url: str
    port: int
    app: FastAPI
    backend: ScriptedBackend
    server: uvicorn.Server


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield  # the test runner keeps its own handlers


@asynccontextmanager
async def served(
    backend: ScriptedBackend,
    *,
    max_queue: int = 8,
    queue_timeout: float = 10.0,
    keys: Mapping[str, KeySettings] | None = None,
    state_url: str | None = None,
    answers: AnswerSettings | None = None,
    admission: Mapping[str, Any] | None = None,
    **server: Any,
) -> AsyncIterator[Served]:
    settings = Settings(
        engine=EngineSettings(),
        admission=AdmissionSettings(max_queue=max_queue, queue_timeout=queue_timeout, **(admission or {})),
        server=ServerSettings(**server),
        answers=answers or AnswerSettings(),
        keys=dict(keys or {}),
    )
    app = create_app(backend, settings, state_url)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=protocol(settings.server),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    server_ = _Uvicorn(config)
    task = asyncio.create_task(server_.serve())
    while not server_.started:
        assert not task.done(), task.exception()
        await asyncio.sleep(0.005)
    port = server_.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", port, app, backend, server_)
    finally:
        server_.should_exit = True
        await task
    assert not backend.entered


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}], **fields}


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    """Wait for ``condition``; returns time.monotonic() then."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
    return time.monotonic()
