"""The outermost layer: request id, access line, and an answer for whatever nobody else caught."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import errors
from .auth import caller_of

_log = logging.getLogger("forebay.access")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_KEY = "forebay.record"
_LINGER = 1.0  # seconds
_CLIENT_GONE = 499  # as nginx logs it; never sent


@dataclass(slots=True)
class RequestRecord:
    """What is remembered of one HTTP request until its access line is written.

    ``abort`` drops the connection with whatever is still unsent; None where the server offers no way to.
    """

    id: str
    abort: Callable[[], None] | None = None
    status: int = _CLIENT_GONE
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope[_KEY]
    return record


def closed_early(scope: Mapping[str, object], status: int) -> None:
    """Have the access line show ``status``: the server has answered where the app saw only a client go."""
    record = scope.get(_KEY)
    if isinstance(record, RequestRecord):
        record.status = status


class _Incoming:
    """A request's body on its way in. ``complete``: there is no more of it to come.

    A request may be refused before its body is read. If the connection then ends with bytes unread, the system sends a
    reset, which can overtake the answer (nginx makes a 502 of it): so they are read, for a moment.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        coming = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        # Who waits for "100 Continue" sends nothing until asked to, and reading would ask.
        self.complete = not coming or "expect" in headers
        self._receive = receive

    async def receive(self) -> Message:
        message = await self._receive()
        self.complete = self.complete or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while not self.complete:
                    await self.receive()


class Border:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = time.monotonic()
        record = RequestRecord(_request_id(scope), _abort_of(receive))
        scope[_KEY] = record
        started = False
        incoming = _Incoming(scope, receive)

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            elif record.status >= 400 and not incoming.complete and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await incoming.discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        try:
            await self.app(scope, incoming.receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception as error:
            if started:
                raise  # the server closes the connection: an answer cut short must not look whole
            await errors.error_response(errors.from_exception(error))(scope, incoming.receive, send_with_id)
        finally:
            _log_access(scope, record, time.monotonic() - begun)


def _request_id(scope: Scope) -> str:
    sent = Headers(scope=scope).get("x-request-id", "")
    return sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex


def _abort_of(receive: Receive) -> Callable[[], None] | None:
    # ASGI has no word for dropping a connection, and uvicorn closes one only after its buffer is flushed, which
    # a client that stopped reading never lets happen. uvicorn's receive is a method of an object with the transport.
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    abort: Callable[[], None] | None = getattr(transport, "abort", None)
    return abort


def _log_access(scope: Scope, record: RequestRecord, seconds: float) -> None:
    path = scope.get("raw_path", b"")[:200].decode("ascii", "backslashreplace")  # still percent-encoded: one line
    fields = {
        "method": scope["method"],
        "path": path,
        "status": record.status,
        "ms": round(seconds * 1000, 1),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "key": caller_of(scope).name or None,
        "request_id": record.id,
    }
    # Probes and scrapes come every second and say nothing while all is well.
    quiet = record.status == 200 and path in ("/health", "/ready", "/metrics")
    _log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})
