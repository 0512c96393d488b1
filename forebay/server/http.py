"""The HTTP protocol under the app: uvicorn's, with a bound on what it leaves unbounded.

A connection may take only so long to send a request's head and body, a head (and a chunked body's trailers) may be only
so large, and there are only so many connections. A refusal has OpenAI's shape and closes the connection.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..config import ServerSettings
from ..contract import Busy, ForebayError, InvalidRequest
from .border import closed_early
from .errors import error_response

_MAX_HEAD = 64 * 2**10  # bytes of names and values; also of whatever the parser swallows without a word
_MAX_FIELDS = 256
#: A connection over the cap is told so when it speaks, because an answer before would be lost in the reset. It has so
#: many seconds for it, and so many may be waiting to be told; more are dropped.
_TELL_SECONDS = 1.0
_TELL_MOST = 64


class HeadTooLarge(InvalidRequest):
    status = 431
    code = "head_too_large"


class RequestTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"


def protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """The class for ``uvicorn.Config(http=...)``; uvicorn makes one object of it per connection."""

    class Http(_Http):
        limits = settings

    return Http


class _Http(HttpToolsProtocol):
    limits: ClassVar[ServerSettings]

    _stage: Literal["head", "body"] | None = None  # what is being received now
    _deadline: asyncio.TimerHandle | None = None
    _over = False
    _silent = True  # never said a word
    _fields = 0
    _size = 0  # of the fields
    _unheard = 0  # bytes since the parser last told something: one endless header tells nothing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - self.limits.max_connections
        self._over = over > 0
        if over > _TELL_MOST:
            transport.abort()
        self._expect("head", _TELL_SECONDS if self._over else self.limits.head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._received()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._silent = False
        if self.transport.is_closing():
            return
        if self._over:
            self._refuse(Busy("the server has as many open connections as it may", retry_after=1))
            return
        if self._stage is None and (self.cycle is None or self.cycle.response_complete):
            # Any byte ends uvicorn's own wait for the next request, be it only a blank line, which begins nothing.
            self._expect("head", self.limits.head_timeout)
        self._unheard += len(data)
        super().data_received(data)
        if self._unheard > _MAX_HEAD:
            self._refuse(HeadTooLarge(f"the request's head is longer than {_MAX_HEAD} bytes"))

    def send_400_response(self, msg: str) -> None:
        """uvicorn's way out when the parser has given up, also because ``_count`` raised."""
        self._refuse(_too_large() if self._is_too_large else InvalidRequest("this is not valid HTTP"))

    # Callbacks of the parser, in this order.

    def on_message_begin(self) -> None:
        self._fields = self._size = self._unheard = 0
        self._expect("head", self.limits.head_timeout)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._count(len(name) + len(value))
        if self._stage == "head":  # else a trailer: the app has long been asked, so nobody may read it as a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unheard = 0
        super().on_headers_complete()  # makes the cycle; raises at a target that is no URL, which is the head's fault
        self._expect("body", self.limits.body_timeout)

    def on_body(self, body: bytes) -> None:
        self._unheard = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._received()
        super().on_message_complete()

    # What is ours.

    @property
    def _is_too_large(self) -> bool:
        return self._size > _MAX_HEAD or self._fields > _MAX_FIELDS

    def _count(self, size: int) -> None:
        self._size += size
        if self._is_too_large:
            raise _too_large()

    def _expect(self, stage: Literal["head", "body"], seconds: float) -> None:
        self._received()
        self._stage = stage
        self._deadline = self.loop.call_later(seconds, self._too_slow, stage, seconds)

    def _received(self) -> None:
        self._stage = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self, stage: Literal["head", "body"], seconds: float) -> None:
        behind = self.cycle is not None and stage == "head" and not self.cycle.response_complete
        if behind or self.pipeline:
            # It follows a request that is still being answered, and reading may be paused for that long.
            self._expect(stage, seconds)
        elif self._silent:
            self.transport.close()
        else:
            self._refuse(RequestTimeout(f"the request's {stage} did not arrive within {seconds:g} s"))

    def _refuse(self, error: ForebayError) -> None:
        """Answer, if no other answer has begun, and close. What is still unread may turn it into a reset."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        own = self._stage == "body"  # the last cycle is of the request at fault, else of one before it
        if cycle is not None and (self.pipeline or (cycle.response_started if own else not cycle.response_complete)):
            self.transport.abort()  # an answer cut short must not look whole, nor go on with this one
            return
        if own:
            closed_early(cycle.scope, error.status)
        self._received()
        response = error_response(error)
        head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        status = STATUS_LINE[error.status]
        self.transport.write(status + head + b"connection: close\r\n\r\n" + bytes(response.body))
        self.transport.close()


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the request's head has more than {_MAX_FIELDS} fields or {_MAX_HEAD} bytes")
