"""How a request finds the answers that there are: by the bytes it came as, or by the prompt they made."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from fastapi import Request

from ..admission.ask import Ask
from ..contract import Prepared
from .answers import Answers, wish
from .auth import caller_of
from .flight import Flight
from .metrics import Result
from .running import Owner
from .source import Choice, Generation, Source

#: Bytes of a body that is read, to see whether its answer is known, also where a newcomer would be refused.
_SMALL = 2**16


def share(state: Any, prepared: Prepared, owner: Owner, ask: Ask, *, stale: bool) -> tuple[Source, Result]:
    """The answer that there is already, a place in the flight that makes it, or the first place in a new one. ``state``
    is the application's. ``stale``: see Answers.find."""
    answers: Answers = state.answers
    found = answers.find(prepared.key, ask, stale=stale)
    if found is not None:
        return found

    def make(flight: Flight) -> Source:
        choices = [Choice(prepared, 0)]
        return Generation(state.backend, state.gate, state.metrics, choices, flight.ask, flight.start_by)

    return answers.begin(prepared.key, owner, ask, make, state.gate.too_late), "miss"


def digest_of(request: Request, body: bytes) -> bytes | None:
    """Stands for all of a request that decides its reply. None where something else does, or nothing is looked up."""
    answers: Answers = request.app.state.answers
    wished = wish(request.headers)
    if not answers.limit or wished == "off" or "x-session-id" in request.headers:
        return None
    # As msgpack, which says where a part ends.
    told = (caller_of(request.scope).tenant, request.scope["path"], wished, body)
    return hashlib.sha256(msgspec.msgpack.encode(told)).digest()


def is_small(request: Request) -> bool:
    """Its body is known to be, and it does not wait to be asked for it."""
    declared = request.headers.get("content-length", "")
    return declared.isdecimal() and int(declared[:20]) <= _SMALL and "expect" not in request.headers
