"""Where the words of an answer come from: a generation of its own, one that others follow too, or memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from ..admission.gate import Gate
from ..contract import Backend, Delta, Prepared
from .conversation import Conversation


class Source(Protocol):
    """``close`` is to be called whatever happens, also if it was never opened."""

    @property
    def numbers(self) -> Sequence[int]:
        """Of each choice, the how-manieth it is that is drawn for its prompt."""
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
    """A generation for each choice. ``deadline`` (seconds on time.monotonic()) is for the wait at the gate;
    ``start_by()``, asked when that is over, is for the wait in the backend. ``saw`` gets whatever any of them says."""

    def __init__(
        self,
        backend: Backend,
        gate: Gate,
        choices: Sequence[Choice],
        saw: Callable[[Delta], None],
        deadline: float,
        start_by: Callable[[], float] | None = None,
    ) -> None:
        self._backend = backend
        self._gate = gate
        self._choices = choices
        self._saw = saw
        self._deadline = deadline
        self._start_by = start_by or (lambda: deadline)

    @property
    def numbers(self) -> Sequence[int]:
        return [choice.number for choice in self._choices]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sequence[AsyncIterator[Delta]]]:
        async with self._gate.admit(self._deadline, len(self._choices)), AsyncExitStack() as stack:
            deadline = self._start_by()
            # All are opened before this first suspends, as the gate demands.
            yield [
                _Seen(
                    await stack.enter_async_context(
                        self._backend.open(choice.prepared, choice=choice.number, deadline=deadline)
                    ),
                    self._saw,
                )
                for choice in self._choices
            ]

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
