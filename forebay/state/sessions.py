"""Conversations: their turns, kept in order by a store that several servers may share.

A turn is begun, and then committed or given up. Between the two it holds a *lease*: no other turn of the session begins
until the lease is given back or has run out, wherever that other one is asked for. A holder renews it; one that was
killed is waited for no longer than the lease lasts. Each turn has a *fence*, a number that nobody else has: what a turn
commits counts only if no other has begun since, so a holder that was believed dead and comes back writes nothing.

Keys are ``forebay:{<hash of the session's key>}:<part>``; the braces keep a session in one slot of a cluster. Every
value has the version of its form and the hash of its session, which are looked at when it is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from ..config import StateSettings
from ..contract import Conflict, ConversationNotFound, FinishReason, Message, StateCorrupt, StateUnavailable
from . import scripts
from .store import Store

log = logging.getLogger("forebay.state")

VERSION = 1
#: Seconds without a renewal after which a turn's holder counts as dead, and between two renewals.
LEASE = 10.0
RENEWAL = 3.0
_POLL = 0.05  # seconds between two looks at a session that is busy


class SessionKey(NamedTuple):
    """A session belongs to a user of a tenant. Names are the clients' own and may hold anything."""

    tenant: str
    user: str
    session: str

    def digest(self) -> bytes:
        # As msgpack, which says where a part ends: two keys are never written alike.
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What a conversation was made with, by name. ``created`` is in seconds since 1970."""

    created: float
    metadata: dict[str, str]


class Moved(Exception):
    """A session has other turns than the caller knows of."""


class Turn(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a user said and what was answered. ``finish`` None: the answer is not whole, because it was broken off.

    ``first``: the number, from the session's beginning, of the oldest turn that its prompt held. ``system``: what
    system messages the session had before this turn. ``read`` and ``wrote``: its prompt and its answer in tokens, as
    contract.Resume has them; empty where nobody knows. ``instructed``: a digest of instructions that were for its
    prompt alone. ``about``: what the door that it was asked at wants to know of it later, in that door's own form.
    ``answered`` False: messages were put here, and nothing was answered. Fields are added at the end, with a default:
    what is stored without them can be read.
    """

    id: str
    created: float
    said: tuple[Message, ...]
    answer: str
    reasoning: str = ""
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first: int = 0
    system: tuple[Message, ...] = ()
    read: bytes = b""
    wrote: tuple[int, ...] = ()
    instructed: bytes = b""
    about: bytes = b""
    answered: bool = True
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    tier: str = "none"

    def messages(self) -> tuple[Message, ...]:
        """As a prompt has them."""
        if not self.answered:
            return self.said
        return (*self.said, Message("assistant", self.answer, reasoning=self.reasoning or None))


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    owner: bytes
    turn: Turn


class _StoredRecord(msgspec.Struct, frozen=True, array_like=True):
    version: int
    owner: bytes
    record: Record


@dataclass(frozen=True, slots=True)
class History:
    """The turns of a session that are kept, the oldest first. ``dropped`` were before them. ``record``: of a session
    that was made by name, where it was asked for."""

    turns: tuple[Turn, ...]
    dropped: int
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that may be answered now. ``history`` is what was before it. ``replay``: the turn that answered the same
    idempotency key before; then there is nothing to run, and no lease. ``fence`` is the turn's id as well; without one
    nothing is kept. ``copied``: the history is another session's, and becomes this one's with the turn.
    ``about``: see Turn."""

    key: SessionKey
    fence: str
    history: History
    idempotency: str = ""
    replay: Turn | None = None
    copied: bool = False
    about: bytes = b""


class Sessions:
    """``settings`` bound a session's life, turns and bytes. One for all tenants."""

    def __init__(self, store: Store, settings: StateSettings, *, lease: float = LEASE) -> None:
        self._store = store
        self._ttl = int(settings.session_ttl * 1000)
        self._most_turns = settings.session_turns
        self._most_bytes = settings.session_bytes
        self._queue = settings.on_conflict == "queue"
        self._lease = int(lease * 1000)
        self._held = max(self._ttl, self._lease)  # a session outlives the lease of its turn

    async def create(self, key: SessionKey, record: Record) -> None:
        """Make a session by name, without a turn."""
        await self._describe(key, record, there=False)

    async def describe(self, key: SessionKey, record: Record) -> None:
        """Raises ConversationNotFound unless the session was made by name."""
        if not await self._describe(key, record, there=True):
            raise _absent(key)

    async def _describe(self, key: SessionKey, record: Record, *, there: bool) -> bool:
        owner = key.digest()
        packed = msgspec.msgpack.encode(_StoredRecord(VERSION, owner, record))
        outcome = await self._store.run(scripts.DESCRIBE, _keys(owner), [owner, packed, self._held, int(there)])
        if outcome == b"foreign":
            raise _corrupt(owner)
        return bool(outcome == b"done")

    async def begin(
        self, key: SessionKey, *, idempotency: str = "", deadline: float, there: bool = False, after: int | None = None
    ) -> Begun:
        """Raises Conflict if another turn of the session runs: at once, or where conflicts queue at ``deadline``
        (seconds on time.monotonic()). A turn with the idempotency key of one that was committed is that one again.

        ``there``: ConversationNotFound unless the session was made by name. ``after``: Moved unless it has had just so
        many turns; ConversationNotFound if it has none of them.
        """
        while True:
            try:
                return await self._begin(key, idempotency, there, after)
            except Conflict:
                if not self._queue or time.monotonic() + _POLL > deadline:
                    raise
            await asyncio.sleep(_POLL)

    async def _begin(self, key: SessionKey, idempotency: str, there: bool, after: int | None) -> Begun:
        fence = secrets.token_hex(16)
        owner = key.digest()
        # The client's key may be long and hold anything: its hash stands for it.
        name = hashlib.sha256(idempotency.encode()).hexdigest() if idempotency else ""
        args: list[bytes | str | int] = [fence, self._lease, self._held, owner, name]
        args += [int(there), "" if after is None else after]
        try:
            outcome, *rest = await self._store.run(scripts.BEGIN, _keys(owner), args)
        except (StateUnavailable, asyncio.CancelledError):
            # It may have been done all the same, and would hold the session until its lease has run out.
            self._store.later(scripts.ABORT, _keys(owner), [fence])
            raise
        match outcome:
            case b"begun":
                dropped, turns = rest
                return Begun(key, fence, _history(owner, turns, int(dropped)), name)
            case b"done":
                if not rest[0]:
                    raise Conflict("the answer to this Idempotency-Key is no longer kept", retry_after=30)
                return Begun(key, "", History((), 0), name, _turn(owner, rest[0]))
            case b"busy":
                same = " with the same Idempotency-Key" if rest[0] else ""
                raise Conflict(f"another turn{same} of this session is being answered")
            case b"absent":
                raise _absent(key)
            case b"moved":
                raise Moved
            case _:
                raise _corrupt(owner)

    async def renew(self, turn: Begun) -> bool:
        """Whether the turn still holds its session. To be called every RENEWAL seconds."""
        owner = turn.key.digest()
        args: list[bytes | str | int] = [turn.fence, self._lease, self._held, turn.idempotency]
        return bool(await self._store.run(scripts.RENEW, _keys(owner), args))

    async def commit(self, begun: Begun, turn: Turn) -> None:
        """Keep ``turn`` and give the lease back. Raises Conflict if another turn has begun since, or the session is no
        more: then nothing is kept."""
        owner = begun.key.digest()
        copied, dropped = (begun.history.turns, begun.history.dropped) if begun.copied else ((), 0)
        packed = [msgspec.msgpack.encode(_Stored(VERSION, owner, one)) for one in (*copied, turn)]
        args: list[bytes | str | int] = [begun.fence, self._ttl, self._most_turns, self._most_bytes]
        if not await self._store.run(scripts.COMMIT, _keys(owner), [*args, begun.idempotency, dropped, *packed]):
            raise Conflict("another turn of this session has begun meanwhile; this one is not kept")

    async def abort(self, begun: Begun) -> bool:
        """Give the lease back, and leave the session as it was. Returns whether the turn still had it."""
        return bool(await self._store.run(scripts.ABORT, _keys(begun.key.digest()), [begun.fence]))

    async def history(self, key: SessionKey) -> History:
        """What is kept of a session; nothing of one that there is not."""
        owner = key.digest()
        outcome, *rest = await self._store.run(scripts.READ, _keys(owner), [owner])
        if outcome != b"read":
            raise _corrupt(owner)
        dropped, turns, record = rest
        return _history(owner, turns, int(dropped), _record(owner, record) if record else None)

    async def delete(self, key: SessionKey) -> History | None:
        """What was kept, if there was any; nothing of it where it cannot be read. A turn that is being answered can
        no longer be committed."""
        owner = key.digest()
        there, turns = await self._store.run(scripts.DELETE, _keys(owner), [])
        if not there:
            return None
        try:
            return _history(owner, turns, 0)
        except StateCorrupt:
            return History((), 0)


def _keys(owner: bytes) -> list[str]:
    return [f"forebay:{{{owner.hex()}}}:{part}" for part in ("session", "turns", "lease", "did")]


def _history(owner: bytes, turns: Sequence[bytes], dropped: int, record: Record | None = None) -> History:
    return History(tuple(_turn(owner, packed) for packed in turns), dropped, record)


def _turn(owner: bytes, packed: bytes) -> Turn:
    return _checked(owner, packed, _Stored).turn


def _record(owner: bytes, packed: bytes) -> Record:
    return _checked(owner, packed, _StoredRecord).record


_Kind = TypeVar("_Kind", _Stored, _StoredRecord)


def _checked(owner: bytes, packed: bytes, kind: type[_Kind]) -> _Kind:
    try:
        stored = msgspec.msgpack.decode(packed, type=kind)
    except msgspec.MsgspecError:
        raise _corrupt(owner) from None
    if stored.version != VERSION or stored.owner != owner:
        raise _corrupt(owner)
    return stored


def _absent(key: SessionKey) -> ConversationNotFound:
    return ConversationNotFound(f"there is no conversation {key.session!r}, or no longer", param="conversation")


def _corrupt(owner: bytes) -> StateCorrupt:
    log.error("what the store has of session %s is not what was written there", owner.hex()[:12])
    return StateCorrupt("the conversation cannot be read: its stored state is damaged; begin a new one")
