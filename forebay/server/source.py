"""Where the words of an answer come from: a generation of its own, one that others follow too, or memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from ..admission.ask import Ask, Ticket
from ..admission.gate import Gate
from ..contract import Backend, Delta, Prepared
from .asks import priced
from .conversation import Conversation
from .metrics import Metrics


class Source(Protocol):
    """``close`` is to be called whatever happens, also if it was never opened."""

    @property
    def numbers(self) -> Sequence[int]:
        """Of each choice, the how-manieth it is that is drawn for its prompt."""
        ...

    @property
    def predicted(self) -> float | None:
        """When its first token was predicted to come, in seconds on time.monotonic(). Known with the first news, if at
        all."""
        ...

    def open(self) -> AbstractAsyncContextManager[Sequence[AsyncIterator[Delta]]]:
        """The news of each choice. Leaving the context for any reason is the cancel."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One text of an answer: a prompt, and the how-manieth that is drawn for it."""

    prepared: Prepared
    number: int


class Generation:
    """A generation for each choice. ``ask()`` says what the gate is asked, but for what the choices cost;
    ``start_by()``, asked when that wait is over, is the deadline (seconds on time.monotonic()) of the wait in the
    backend."""

    def __init__(
        self,
        backend: Backend,
        gate: Gate,
        metrics: Metrics,
        choices: Sequence[Choice],
        ask: Callable[[], Ask],
        start_by: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._gate = gate
        self._metrics = metrics
        self._choices = choices
        self._ask = ask
        self._start_by = start_by
        self.predicted: float | None = None

    @property
    def numbers(self) -> Sequence[int]:
        return [choice.number for choice in self._choices]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[AsyncIterator[Delta]]]:
        prompts = [choice.prepared for choice in self._choices if choice.number == 0]
        ask = priced(self._ask(), prompts, len(self._choices))
        async with self._gate.admit(ask) as ticket, AsyncExitStack() as stack:
            self.predicted = None if ticket.predicted is None else ask.arrival + ticket.predicted
            saw = self._saw(ticket, sum(one.n_tokens for one in prompts))
            deadline = self._start_by()
            # All are opened before this first suspends, as the gate demands.
            yield [
                _Seen(
                    await stack.enter_async_context(
                        self._backend.open(choice.prepared, choice=choice.number, deadline=deadline)
                    ),
                    saw,
                )
                for choice in self._choices
            ]

    def _saw(self, ticket: Ticket, prompt_tokens: int) -> Callable[[Delta], None]:
        counted = self._metrics.generation(prompt_tokens, ticket)

        def saw(delta: Delta) -> None:
            self._gate.saw(ticket, delta.n_tokens)
            counted(delta)

        return saw

    async def close(self) -> None:
        pass


class _Seen:
    """No generator: it has nothing to be closed."""

    def __init__(self, deltas: AsyncIterator[Delta], saw: Callable[[Delta], None]) -> None:
        self._deltas = deltas
        self._saw = saw

    def __aiter__(self) -> _Seen:
        return self

    async def __anext__(self) -> Delta:
        delta = await anext(self._deltas)
        self._saw(delta)
        return delta


class Told:
    """An answer that is known as a whole."""

    numbers = (0,)
    predicted = None

    def __init__(self, whole: Sequence[Delta]) -> None:
        self._whole = whole

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[AsyncIterator[Delta]]]:
        yield [_each(self._whole)]

    async def close(self) -> None:
        pass


async def _each(deltas: Sequence[Delta]) -> AsyncIterator[Delta]:
    for delta in deltas:
        yield delta


class Kept:
    """The answer of another source, as a turn of a conversation: it is kept before its end is told. ``unkept`` is
    called if it was begun and is not kept."""

    numbers = (0,)

    def __init__(self, source: Source, conversation: Conversation, unkept: Callable[[], Awaitable[None]]) -> None:
        self._source = source
        self._conversation = conversation
        self._unkept = unkept
        self._opened = False

    @property
    def predicted(self) -> float | None:
        return self._source.predicted

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[AsyncIterator[Delta]]]:
        holding = asyncio.create_task(self._conversation.hold())
        try:
            async with self._source.open() as (deltas,), aclosing(self._keeping(deltas)) as kept:
                self._opened = True
                yield [kept]
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            # Not only in close: who is told of a failure and tries again at once must find the session free.
            await self._conversation.close()

    async def _keeping(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta]:
        async for delta in deltas:
            self._conversation.saw(delta)
            if delta.finish is not None:
                await self._conversation.keep()
            yield delta

    async def close(self) -> None:
        try:
            await self._source.close()
        finally:
            await self._conversation.close()
            if self._opened and self._conversation.unkept:
                await self._unkept()
