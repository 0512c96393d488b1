"""Server-sent events: headers, and the frames that every stream has."""

from __future__ import annotations

from ..contract import ForebayError
from .errors import error_body

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Else nginx holds frames back where it compresses, and takes the whole answer for a client that does not read.
    (b"x-accel-buffering", b"no"),
)


def error_frame(error: ForebayError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


def event_id(number: int) -> bytes:
    """To stand before the event that it is for."""
    return b"id: %d\n" % number
