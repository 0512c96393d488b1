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
from typing import NamedTuple

import msgspec

from ..config import StateSettings
from ..contract import Conflict, FinishReason, Message, StateCorrupt, StateUnavailable
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


class Turn(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a user said and what was answered. ``finish`` None: the answer is not whole, because it was broken off.

    ``first``: the number, from the session's beginning, of the oldest turn that its prompt held. ``system``: what
    system messages the session had before this turn.
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

    def messages(self) -> tuple[Message, ...]:
        """As a prompt has them."""
        return (*self.said, Message("assistant", self.answer, reasoning=self.reasoning or None))


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    version: int
    owner: bytes
    turn: Turn


@dataclass(frozen=True, slots=True)
class History:
    """The turns of a session that are kept, the oldest first. ``dropped`` were before them."""

    turns: tuple[Turn, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that may be answered now. ``history`` is what was before it. ``replay``: the turn that answered the same
    idempotency key before; then there is nothing to run, and no lease."""

    key: SessionKey
    fence: str
    history: History
    idempotency: str = ""
    replay: Turn | None = None


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

    async def begin(self, key: SessionKey, *, idempotency: str = "", deadline: float) -> Begun:
        """Raises Conflict if another turn of the session runs: at once, or where conflicts queue at ``deadline``
        (seconds on time.monotonic()). A turn with the idempotency key of one that was committed is that one again."""
        while True:
            try:
                return await self._begin(key, idempotency)
            except Conflict:
                if not self._queue or time.monotonic() + _POLL > deadline:
                    raise
            await asyncio.sleep(_POLL)

    async def _begin(self, key: SessionKey, idempotency: str) -> Begun:
        fence = secrets.token_hex(16)
        owner = key.digest()
        # The client's key may be long and hold anything: its hash stands for it.
        name = hashlib.sha256(idempotency.encode()).hexdigest() if idempotency else ""
        args: list[bytes | str | int] = [fence, self._lease, self._held, owner, name]
        try:
            outcome, *rest = await self._store.run(_BEGIN, _keys(owner), args)
        except (StateUnavailable, asyncio.CancelledError):
            # It may have been done all the same, and would hold the session until its lease has run out.
            self._store.later(_ABORT, _keys(owner), [fence])
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
            case _:
                raise _corrupt(owner)

    async def renew(self, turn: Begun) -> bool:
        """Whether the turn still holds its session. To be called every RENEWAL seconds."""
        owner = turn.key.digest()
        args: list[bytes | str | int] = [turn.fence, self._lease, self._held, turn.idempotency]
        return bool(await self._store.run(_RENEW, _keys(owner), args))

    async def commit(self, begun: Begun, turn: Turn) -> None:
        """Keep ``turn`` and give the lease back. Raises Conflict if another turn has begun since, or the session is no
        more: then nothing is kept."""
        owner = begun.key.digest()
        packed = msgspec.msgpack.encode(_Stored(VERSION, owner, turn))
        bounds = [self._ttl, self._most_turns, self._most_bytes]
        if not await self._store.run(_COMMIT, _keys(owner), [begun.fence, packed, *bounds, begun.idempotency]):
            raise Conflict("another turn of this session has begun meanwhile; this one is not kept")

    async def abort(self, begun: Begun) -> None:
        """Give the lease back, and leave the session as it was."""
        await self._store.run(_ABORT, _keys(begun.key.digest()), [begun.fence])

    async def history(self, key: SessionKey) -> History:
        """What is kept of a session; nothing of one that there is not."""
        owner = key.digest()
        outcome, *rest = await self._store.run(_READ, _keys(owner), [owner])
        if outcome != b"read":
            raise _corrupt(owner)
        return _history(owner, rest[1], int(rest[0]))

    async def delete(self, key: SessionKey) -> bool:
        """Whether there was any. A turn that is being answered can no longer be committed."""
        return bool(await self._store.run(_DELETE, _keys(key.digest()), []))


def _keys(owner: bytes) -> list[str]:
    return [f"forebay:{{{owner.hex()}}}:{part}" for part in ("session", "turns", "lease", "did")]


def _history(owner: bytes, turns: Sequence[bytes], dropped: int) -> History:
    return History(tuple(_turn(owner, packed) for packed in turns), dropped)


def _turn(owner: bytes, packed: bytes) -> Turn:
    try:
        stored = msgspec.msgpack.decode(packed, type=_Stored)
    except msgspec.MsgspecError:
        raise _corrupt(owner) from None
    if stored.version != VERSION or stored.owner != owner:
        raise _corrupt(owner)
    return stored.turn


def _corrupt(owner: bytes) -> StateCorrupt:
    log.error("what the store has of session %s is not what was written there", owner.hex()[:12])
    return StateCorrupt("the conversation cannot be read: its stored state is damaged; begin a new one")


# Keys of all scripts: the session (a hash: owner, fence, dropped, bytes), its turns (a list), its lease (a string,
# "<fence>:<idempotency>"), and what idempotency keys stand for (a hash: key -> number of the turn).

#: fence, lease ms, session's ms, owner, idempotency -> busy same? | done turn | begun dropped turns | foreign
_BEGIN = """
local session, turns, lease, did = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner = redis.call('HGET', session, 'owner')
if owner and owner ~= ARGV[4] then return {'foreign'} end
local dropped = tonumber(redis.call('HGET', session, 'dropped') or 0)
local number = ARGV[5] ~= '' and redis.call('HGET', did, ARGV[5])
if number then
  return {'done', tonumber(number) >= dropped and redis.call('LINDEX', turns, number - dropped) or ''}
end
local held = redis.call('GET', lease)
if held then return {'busy', (ARGV[5] ~= '' and string.sub(held, #ARGV[1] + 2) == ARGV[5]) and 1 or 0} end
redis.call('SET', lease, ARGV[1] .. ':' .. ARGV[5], 'PX', ARGV[2])
redis.call('HSET', session, 'owner', ARGV[4], 'fence', ARGV[1])
for _, key in ipairs({session, turns, did}) do redis.call('PEXPIRE', key, ARGV[3]) end
return {'begun', dropped, redis.call('LRANGE', turns, 0, -1)}
"""

#: fence, lease ms, session's ms, idempotency -> 1 if held. One that ran out is taken back if nobody has begun since.
_RENEW = """
local session, turns, lease, did = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if redis.call('HGET', session, 'fence') ~= ARGV[1] then return 0 end
redis.call('SET', lease, ARGV[1] .. ':' .. ARGV[4], 'PX', ARGV[2])
for _, key in ipairs({session, turns, did}) do redis.call('PEXPIRE', key, ARGV[3]) end
return 1
"""

#: fence, turn, ttl ms, most turns, most bytes, idempotency -> 1 if kept. The newest turn is kept whatever its size.
_COMMIT = """
local session, turns, lease, did = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if redis.call('HGET', session, 'fence') ~= ARGV[1] then return 0 end
local count = redis.call('RPUSH', turns, ARGV[2])
local bytes = redis.call('HINCRBY', session, 'bytes', #ARGV[2])
local dropped = tonumber(redis.call('HGET', session, 'dropped') or 0)
while count > 1 and (count > tonumber(ARGV[4]) or bytes > tonumber(ARGV[5])) do
  bytes = redis.call('HINCRBY', session, 'bytes', -#redis.call('LPOP', turns))
  dropped = redis.call('HINCRBY', session, 'dropped', 1)
  count = count - 1
end
if ARGV[6] ~= '' then
  redis.call('HSET', did, ARGV[6], dropped + count - 1)
  if redis.call('HLEN', did) > tonumber(ARGV[4]) + 1000 then  -- those whose answer is gone are forgotten at last
    local known = redis.call('HGETALL', did)
    for i = 1, #known, 2 do
      if tonumber(known[i + 1]) < dropped then redis.call('HDEL', did, known[i]) end
    end
  end
end
redis.call('HDEL', session, 'fence')
redis.call('DEL', lease)
for _, key in ipairs({session, turns, did}) do redis.call('PEXPIRE', key, ARGV[3]) end
return 1
"""

#: fence -> 1 if it was held
_ABORT = """
local session, turns, lease = KEYS[1], KEYS[2], KEYS[3]
if redis.call('HGET', session, 'fence') ~= ARGV[1] then return 0 end
redis.call('HDEL', session, 'fence')
redis.call('DEL', lease)
if redis.call('EXISTS', turns) == 0 then redis.call('DEL', session) end
return 1
"""

#: owner -> read dropped turns | foreign
_READ = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= ARGV[1] then return {'foreign'} end
return {'read', redis.call('HGET', KEYS[1], 'dropped') or 0, redis.call('LRANGE', KEYS[2], 0, -1)}
"""

#: -> 1 if there was one
_DELETE = """
return redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4]) > 0 and 1 or 0
"""
