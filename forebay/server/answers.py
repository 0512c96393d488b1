"""The answer cache: what can only be answered as it was before is not computed again, nor twice at the same time.

Its keys are hashes over all that decides an answer: the prompt's tokens, how it is sampled, the model's fingerprint and
the tenant. A second kind of entry, a *shortcut*, leads from the raw bytes of a request to such a key, so that one that
was sent before is answered without being parsed. Both are in one list that is bounded in bytes; what was not used for
longest goes first. What has become too old stays there for a while: in need it may still be told (*stale*).
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

from starlette.datastructures import Headers

from ..admission.ask import Ask
from ..contract import DeadlineExceeded, Delta, InvalidRequest, Usage
from .flight import Flights, Make, Member
from .formats import Format
from .metrics import Result
from .running import Owner, RunningTurns
from .sampling import Call
from .source import Source, Told

#: An answer's form, a new one (it has an id) for each reply.
Form = Callable[[], Awaitable[Format]]
#: So many times its age may an answer have that is told in need.
STALE = 4
#: What an entry takes beside what is counted, in bytes.
_OVERHEAD = 1024


@dataclass(frozen=True, slots=True)
class Shortcut:
    """What is known of a request by its bytes: which answer it is for, and how that is sent. ``made``: what it got less
    of (see Savings)."""

    key: bytes
    form: Form
    stream: bool
    made: tuple[str, ...] = ()


_Value = tuple[Delta, ...] | Shortcut


class _Entry(NamedTuple):
    owner: Owner
    value: _Value
    size: int
    until: float


class Answers:
    """``limit`` in bytes; with 0 nothing is shared. ``ttl`` in seconds on ``clock``. ``turns`` are to be forgotten with
    the answers of their conversations."""

    def __init__(
        self, limit: int, ttl: float, turns: RunningTurns, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.bytes = 0
        self.turns = turns
        self._ttl = ttl
        self._clock = clock
        # The longest unused first. Answers are under their key, shortcuts under the digest of a body: never the same.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._flights = Flights[Owner]()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """No flight outlives this."""
        await self.turns.close()
        await self._flights.close()

    def find(self, key: bytes, ask: Ask, *, stale: bool = False) -> tuple[Source, Result] | None:
        """The answer, or a place in the flight that makes it; or else (``stale``) an answer that is too old."""
        whole = self._get(key)
        if isinstance(whole, tuple):
            return Told(whole), "hit"
        found = self._flights.find(key)
        if found is not None:
            return Member(found[1], ask), "coalesced"
        whole = self._get(key, stale=True) if stale else None
        return (Told(whole), "stale") if isinstance(whole, tuple) else None

    def begin(self, key: bytes, owner: Owner, ask: Ask, make: Make, too_late: Callable[[], DeadlineExceeded]) -> Member:
        """Opens the flight for ``key``, where ``find`` has found none; see Flight."""

        def finished(whole: tuple[Delta, ...]) -> None:
            self._put(key, self._entry(owner, tuple(map(_known, whole))))

        return Member(self._flights.begin(key, owner, make, too_late, finished), ask)

    def remember(self, digest: bytes, owner: Owner, shortcut: Shortcut, size: int) -> None:
        """``size``: bytes that the shortcut's form takes."""
        self._put(digest, self._entry(owner, shortcut, size))

    def known(self, digest: bytes, *, stale: bool = False) -> Shortcut | None:
        found = self._get(digest, stale=stale)
        return found if isinstance(found, Shortcut) else None

    def purge(self, tenant: str, tag: bytes | None = None) -> int:
        """Forget a tenant's answers, or those of one conversation; returns how many. What is being made now is told to
        its members, and then forgotten too."""

        def own(owner: Owner) -> bool:
            return owner.tenant == tenant and (tag is None or owner.tag == tag)

        if tag is not None:  # turns go on, and can be come back to, unless their conversation is no more
            self.turns.forget(own)
        return self.forget(own)

    def forget(self, which: Callable[[Owner], bool]) -> int:
        """As ``purge``, but turns that run may still be joined."""
        self._flights.forget(which)
        gone = [key for key, entry in self._entries.items() if which(entry.owner)]
        return sum(isinstance(self._drop(key).value, tuple) for key in gone)

    def _entry(self, owner: Owner, value: _Value, size: int = 0) -> _Entry:
        size += _OVERHEAD + (sum(map(_size, value)) if isinstance(value, tuple) else 0)
        return _Entry(owner, value, size, self._clock() + self._ttl)

    def _get(self, key: bytes, *, stale: bool = False) -> _Value | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        over = self._clock() - entry.until
        if over >= (STALE - 1) * self._ttl:
            self._drop(key)
            return None
        if over >= 0 and not stale:
            return None
        self._entries.move_to_end(key)
        return entry.value

    def _put(self, key: bytes, entry: _Entry) -> None:
        if key in self._entries:
            self._drop(key)
        if entry.size > self.limit:
            return
        self._entries[key] = entry
        self.bytes += entry.size
        while self.bytes > self.limit:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> _Entry:
        entry = self._entries.pop(key)
        self.bytes -= entry.size
        return entry


def wish(headers: Headers) -> Literal["on", "off"] | None:
    """What the header ``x-forebay-cache`` says. Raises InvalidRequest."""
    match headers.get("x-forebay-cache"):
        case None:
            return None
        case "on":
            return "on"
        case "off":
            return "off"
        case _:
            raise InvalidRequest('the header x-forebay-cache must be "on" or "off"', param="x-forebay-cache")


def shareable(call: Call, wished: Literal["on", "off"] | None) -> bool:
    """Whether an equal call would be answered the same, or the client wants it to be. Several choices are drawn to
    differ, so they are not."""
    if wished == "off" or call.n > 1 or len(call.requests) > 1:
        return False
    (asked,) = call.requests
    return asked.temperature == 0 or asked.seed is not None or wished == "on"


def _known(delta: Delta) -> Delta:
    """As it is told again: no token of the prompt is computed."""
    prompt, answer = delta.usage.prompt_tokens, delta.usage.completion_tokens
    return replace(delta, usage=Usage(prompt, answer, cached_tokens=prompt))


def _size(delta: Delta) -> int:
    """Bytes in memory, nearly."""
    size = _OVERHEAD + sys.getsizeof(delta.text) + sys.getsizeof(delta.reasoning) + 40 * len(delta.ids)
    for entry in delta.logprobs:
        size += 300 + len(entry.data) + sum(200 + len(data) for data, _ in entry.top)
    return size
