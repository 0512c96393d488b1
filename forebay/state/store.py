"""One Redis or Valkey, as the rooms of this package use it: Lua scripts, each bounded in time and never cut short.

A client library that is cancelled between a command and its reply can leave the reply on the connection, where the next
user of it finds it (redis-py #2624, #2641, #2665). So no caller's cancellation ever reaches a command: each runs in a
task of its own to its end or to its time limit, and a connection whose command was not answered is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Self, cast

import valkey.asyncio
from valkey.asyncio.retry import Retry
from valkey.backoff import NoBackoff
from valkey.exceptions import OutOfMemoryError, ResponseError, ValkeyError

from ..contract import StateFull, StateUnavailable

log = logging.getLogger("forebay.state")

#: Seconds a command may take, waiting for a connection included.
TIMEOUT = 0.25
_CONNECTIONS = 64


class Store:
    """``url``: ``redis://``, ``rediss://`` (TLS), ``valkey://``, ``unix://``, with user and password where needed."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        self._pool: valkey.asyncio.BlockingConnectionPool = valkey.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=cast(int, timeout),
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            # The library's own retries hide a dead server for seconds.
            retry=Retry(NoBackoff(), 0),
            retry_on_timeout=False,
        )
        self._client = valkey.asyncio.Valkey(connection_pool=self._pool)
        self._timeout = timeout
        self._answers = True
        self._running: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._running:
            await asyncio.wait(self._running)
        await self._client.aclose()
        await self._pool.disconnect()

    async def run(self, script: str, keys: Sequence[str], args: Sequence[bytes | str | int]) -> Any:
        """What the Lua ``script`` returns. Raises StateUnavailable within the time limit, or StateFull."""
        task = self.later(script, keys, args)
        # Not the task's own limit: a connection that is closed or waited for may take it beyond that.
        done, _ = await asyncio.wait({task}, timeout=self._timeout)
        if not done:
            raise _silent()
        return task.result()

    def later(self, script: str, keys: Sequence[str], args: Sequence[bytes | str | int]) -> asyncio.Task[Any]:
        """The same, for who does not wait for it. Scripts are not kept in order: each takes its own connection."""
        task = asyncio.create_task(self._run(script, keys, args))
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen, if only here: its caller may be gone

    async def _run(self, script: str, keys: Sequence[str], args: Sequence[bytes | str | int]) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                result = await self._client.register_script(script)(keys=keys, args=args)
        except ResponseError as error:
            if isinstance(error, OutOfMemoryError) or "OOM" in str(error):  # the latter as a script reports it
                raise StateFull("the store of conversations is full", retry_after=30) from None
            log.warning("the store of conversations refuses: %s", error)  # what it says is no client's business
            raise StateUnavailable("the store of conversations refuses", retry_after=5) from None
        except (TimeoutError, ValkeyError, OSError) as error:
            self._note(repr(error))
            raise _silent() from error
        self._note("")
        return result

    def _note(self, fault: str) -> None:
        """Log the first of many faults, and that they are over."""
        if self._answers and fault:
            log.warning("the store of conversations does not answer: %s", fault)
        elif not self._answers and not fault:
            log.warning("the store of conversations answers again")
        self._answers = not fault


def _silent() -> StateUnavailable:
    return StateUnavailable("the store of conversations does not answer", retry_after=2)
