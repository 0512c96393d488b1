"""A cheap streaming client of the OpenAI chat API, for `forebay bench` and `forebay chat`.

Cheap, because on one machine it takes its time from the server it measures: bytes are split by hand and decoded
by msgspec, and nothing is validated that the caller does not need.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from ..contract import ForebayError


class Unreachable(ForebayError):
    """No server answers at the address."""


class RequestFailed(Exception):
    """The server refused, failed or broke off one request; the message is the reason in a few words."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One SSE frame (or a whole JSON answer): new text, why it ended, and the usage where the frame has it."""

    text: str = ""
    finish: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server: base URL, with or without ``/v1``, and an optional API key."""

    url: str
    api_key: str | None = None

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"

    def session(self, timeout: float | None = None, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
        """As many connections as requests; ``timeout`` is seconds per request, None waits for ever. ``headers`` are
        sent with each.

        None is used twice: a server may close one after a stream though it promised to keep it (llama.cpp does), and
        the next request would be lost on it.
        """
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=10),
            headers={**(headers or {}), **({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})},
        )

    async def first_model(self, session: aiohttp.ClientSession) -> str:
        """The id of the first model that the server lists. Raises Unreachable with a line for the user."""
        try:
            async with session.get(f"{self.base}/models", timeout=aiohttp.ClientTimeout(total=30)) as response:
                body = await response.read()
                if response.status != 200:
                    raise Unreachable(f"{self.base}/models: {reason(response.status, body)}")
                return str(msgspec.json.decode(body)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise Unreachable(f"no server answers at {self.url} ({error}); start one with: forebay serve") from None
        except (msgspec.DecodeError, LookupError, TypeError):
            raise Unreachable(f"{self.base}/models does not list a model; is this an OpenAI server?") from None

    async def chat(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Chunks of one answer as they arrive. Raises RequestFailed, also for a stream that breaks off: one that
        ends without a finish_reason."""
        finished = False
        try:
            async with session.post(
                f"{self.base}/chat/completions",
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
            ) as response:
                if response.status != 200:
                    raise RequestFailed(reason(response.status, await response.read()))
                if not body.get("stream"):
                    frames: AsyncGenerator[bytes, None] = _whole(response)
                else:
                    frames = events(response.content)
                async for frame in frames:
                    chunk = _parse(frame)
                    finished |= chunk.finish is not None
                    yield chunk
        except TimeoutError:
            raise RequestFailed("timeout") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(f"connection: {error or type(error).__name__}") from None
        if not finished:
            raise RequestFailed("stream broke off: no finish_reason")


async def _whole(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    yield await response.read()


async def events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The data of each SSE event up to ``[DONE]``; comments and other fields are skipped."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data


def _parse(data: bytes) -> Chunk:
    """A streamed frame or a whole answer: they differ in one name, ``delta`` for ``message``."""
    try:
        frame = msgspec.json.decode(data)
        if error := frame.get("error"):
            raise RequestFailed(f"error frame: {error.get('message') if isinstance(error, dict) else error}")
        if not frame.get("choices"):
            return Chunk(usage=frame.get("usage"))
        choice = frame["choices"][0]
        said = choice.get("delta") or choice.get("message") or {}
        return Chunk(said.get("content") or "", choice.get("finish_reason"), frame.get("usage"))
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        raise RequestFailed(f"not a chat frame: {data[:80]!r}") from None


def reason(status: int, body: bytes) -> str:
    """``503 overloaded_error: the queue is full``, as far as the body tells."""
    try:
        error = msgspec.json.decode(body)["error"]
        return f"{status} {error.get('type') or ''}: {error['message']}"
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return f"{status}: {body[:200].decode(errors='replace').strip()}"
