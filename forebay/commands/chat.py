"""`forebay chat`: a terminal chat over HTTP."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import click

from ..bench.client import Endpoint, RequestFailed


@dataclass
class Chat:
    """One conversation: the history, and what is sent beside it.

    Every turn has its own event loop run and connection: between turns the terminal waits in ``input``, and a
    connection kept open meanwhile would be closed by the server unseen.
    """

    endpoint: Endpoint
    model: str | None
    system: str | None
    sampling: Mapping[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> int:
        """Turn after turn until the input ends. Returns the exit code: 1 if a turn failed and nobody was watching."""
        interactive = sys.stdin.isatty()
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self.model = asyncio.run(self._first_model()) if self.model is None else self.model
        if interactive:
            import readline  # noqa: F401, PLC0415 - input() then has line editing and a history

            click.echo(f"{self.model} at {self.endpoint.url}. Ctrl-C stops an answer, Ctrl-D leaves.")
        failed = False
        while (line := _read_line("> " if interactive else "")) is not None:
            if line.strip():
                failed |= not self._turn(line)
        return int(failed and not interactive)

    async def _first_model(self) -> str:
        async with self.endpoint.session() as session:
            return await self.endpoint.first_model(session)

    def _turn(self, line: str) -> bool:
        """Ask, print the answer, keep both; False if it failed. A turn without any answer leaves no trace."""
        self.messages.append({"role": "user", "content": line})
        answer = _Answer()
        failure = None
        try:
            asyncio.run(self._stream(answer))
        except KeyboardInterrupt:
            failure = "stopped"
        except RequestFailed as error:
            failure = str(error)
        click.echo()
        # To stderr: a stdout that is piped on holds the answers and nothing else.
        click.secho(f"[{failure or answer.speed()}]", dim=True, err=True)
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        return failure is None

    async def _stream(self, answer: _Answer) -> None:
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }
        async with self.endpoint.session() as session:
            await answer.receive(self.endpoint, session, body)


def _read_line(prompt: str) -> str | None:
    """The next line without its end; None at the end of the input. Ctrl-C clears the line."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D leaves)")


@dataclass
class _Answer:
    """One answer as it arrives, with the times that its speed needs."""

    text: str = ""
    tokens: int = 0
    start: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0

    async def receive(self, endpoint: Endpoint, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> None:
        frames = 0
        async for chunk in endpoint.chat(session, body):
            if chunk.text:
                frames += 1
                self.last = time.perf_counter()
                self.first = self.first or self.last
                self.text += chunk.text
                click.echo(chunk.text, nl=False)
            if chunk.usage:
                self.tokens = int(chunk.usage.get("completion_tokens") or 0)
        self.tokens = self.tokens or frames

    def speed(self) -> str:
        """TTFT, and tokens per second after the first."""
        if not self.text:
            return "an empty answer"
        line = f"{self.tokens} tokens, first after {self.first - self.start:.2f} s"
        if self.tokens > 1 and self.last > self.first:
            line += f", {(self.tokens - 1) / (self.last - self.first):.1f} tokens/s"
        return line
