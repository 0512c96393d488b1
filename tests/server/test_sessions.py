"""Conversations in a real Valkey: turns in order whoever begins them, nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
import pytest
import valkey
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from forebay.config import StateSettings
from forebay.contract import Conflict, ConversationNotFound, Message, StateCorrupt
from forebay.state.embedded import EmbeddedValkey
from forebay.state.sessions import Begun, History, Moved, Record, SessionKey, Sessions, Turn
from forebay.state.store import Store

pytestmark = pytest.mark.anyio
T = TypeVar("T")


@pytest.fixture
async def sessions(embedded: EmbeddedValkey) -> AsyncIterator[Sessions]:
    async with Store(embedded.url) as store:
        yield Sessions(store, StateSettings())


_numbers = itertools.count()


def a_key(tenant: str = "t", user: str = "u") -> SessionKey:
    return SessionKey(tenant, user, f"s{next(_numbers)}")


def a_turn(answer: str = "Hello.", id: str = "turn") -> Turn:
    return Turn(id=id, created=1.5, said=(Message("user", "你好"),), answer=answer, finish="stop")


async def test_turns_come_back_as_they_were_committed(sessions: Sessions) -> None:
    key = a_key()
    turns = (
        a_turn("你好！👋"),
        Turn(
            id="2",
            created=2.0,
            said=(Message("system", "s"), Message("user", "x", "name")),
            answer="",
            reasoning="r",
            read=b"\xff",
            wrote=(0, 2**31),
        ),
    )
    for turn in turns:
        begun = await sessions.begin(key, deadline=0)
        await sessions.commit(begun, turn)
    assert (await sessions.begin(key, deadline=0)).history.turns == turns
    assert turns[1].messages()[-1] == Message("assistant", "", reasoning="r")


async def test_a_turn_that_an_older_server_kept_can_be_read(embedded: EmbeddedValkey, sessions: Sessions) -> None:
    key = a_key()
    await sessions.commit(await sessions.begin(key, deadline=0), a_turn())
    with valkey.Valkey.from_url(embedded.url) as client:
        (where,) = client.keys(f"forebay:*{key.digest().hex()}*:turns")
        version, owner, fields = msgspec.msgpack.decode(client.lindex(where, 0))
        assert fields[10:12] == [b"", []]
        client.lset(where, 0, msgspec.msgpack.encode((version, owner, fields[:10])))
    assert (await sessions.history(key)).turns == (a_turn(),)


async def test_parts_of_a_key_do_not_run_into_each_other(sessions: Sessions) -> None:
    for key in (
        SessionKey("a", "b", "c"),
        SessionKey("ab", "", "c"),
        SessionKey("a", "bc", ""),
        SessionKey("A", "b", "c"),
    ):
        begun = await sessions.begin(key, deadline=0)  # each while all the others are held
        assert begun.history.turns == ()


async def test_a_conflict_may_be_waited_for(embedded: EmbeddedValkey) -> None:
    async with Store(embedded.url) as store:
        queued, key = Sessions(store, StateSettings(on_conflict="queue")), a_key()
        begun = await queued.begin(key, deadline=0)
        waiting = asyncio.create_task(queued.begin(key, deadline=time.monotonic() + 10))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await queued.commit(begun, a_turn())
        assert len((await waiting).history.turns) == 1
        with pytest.raises(Conflict):
            await queued.begin(key, deadline=time.monotonic() + 0.2)


async def test_a_lease_that_is_not_renewed_runs_out_and_a_session_with_it(embedded: EmbeddedValkey) -> None:
    async with Store(embedded.url) as store:
        short, key = Sessions(store, StateSettings(session_ttl=0.4), lease=0.2), a_key()
        dead = await short.begin(key, deadline=0)
        with pytest.raises(Conflict):
            await short.begin(key, deadline=0)
        await asyncio.sleep(0.3)
        alive = await short.begin(key, deadline=0)
        assert not await short.renew(dead)
        with pytest.raises(Conflict):
            await short.commit(dead, a_turn("from the grave"))
        await asyncio.sleep(0.15)
        assert await short.renew(alive)
        await asyncio.sleep(0.15)  # longer than a lease since it began
        with pytest.raises(Conflict):
            await short.begin(key, deadline=0)
        await short.commit(alive, a_turn("alive"))
        assert [turn.answer for turn in (await short.history(key)).turns] == ["alive"]
        await asyncio.sleep(0.6)
        assert (await short.history(key)).turns == ()
    with valkey.Valkey(unix_socket_path=embedded.url.removeprefix("unix://")) as raw:
        assert not list(raw.scan_iter(f"forebay:{{{key.digest().hex()}}}:*"))


async def test_bounds_drop_whole_turns_the_oldest_first(embedded: EmbeddedValkey) -> None:
    async with Store(embedded.url) as store:
        for settings_, kept in ((StateSettings(session_turns=3), 3), (StateSettings(session_bytes=2000), 1)):
            bounded, key = Sessions(store, settings_), a_key()
            for number in range(7):
                begun = await bounded.begin(key, idempotency=f"key {number}", deadline=0)
                await bounded.commit(begun, a_turn("x" * 1500, id=str(number)))
            history = await bounded.history(key)
            assert [turn.id for turn in history.turns] == [str(number) for number in range(7 - kept, 7)]
            assert history.dropped == 7 - kept
            for number in range(7):
                if number < 7 - kept:
                    with pytest.raises(Conflict):
                        await bounded.begin(key, idempotency=f"key {number}", deadline=0)
                else:
                    again = await bounded.begin(key, idempotency=f"key {number}", deadline=0)
                    assert again.replay is not None
                    assert again.replay.id == str(number)


async def test_deleting_leaves_nothing_and_a_running_turn_cannot_be_kept(sessions: Sessions) -> None:
    key = a_key()
    await sessions.commit(await sessions.begin(key, idempotency="once", deadline=0), a_turn())
    begun = await sessions.begin(key, deadline=0)
    assert await sessions.delete(key)
    assert not await sessions.delete(key)
    with pytest.raises(Conflict):
        await sessions.commit(begun, a_turn())
    again = await sessions.begin(key, idempotency="once", deadline=0)
    assert (again.replay, again.history.turns) == (None, ())


async def test_hostile_or_foreign_bytes_are_refused(embedded: EmbeddedValkey, sessions: Sessions) -> None:
    mine, theirs = a_key(), a_key("other")
    for key in (mine, theirs):
        await sessions.commit(await sessions.begin(key, deadline=0), a_turn(key.tenant))
    names = [f"forebay:{{{key.digest().hex()}}}:turns" for key in (mine, theirs)]
    with valkey.Valkey(unix_socket_path=embedded.url.removeprefix("unix://")) as raw:
        foreign = raw.lindex(names[1], 0)
        for bad in (foreign, b"", b"\x80\x04\x95\x10pickle", b"\x93\x02" + foreign[2:], foreign[:-3]):
            raw.lset(names[0], 0, bad)
            with pytest.raises(StateCorrupt):
                await sessions.history(mine)
            with pytest.raises(StateCorrupt):
                await sessions.begin(mine, deadline=0)
            raw.delete(names[0].replace("turns", "lease"))
        await sessions.create(theirs, Record(1.5, {}))
        record = raw.hget(names[1].replace("turns", "session"), "record")
        raw.delete(names[0])
        for bad in (record, b"", record[:-3]):
            raw.hset(names[0].replace("turns", "session"), "record", bad or b"\x00")
            with pytest.raises(StateCorrupt):
                await sessions.history(mine)
        raw.hset(names[0].replace("turns", "session"), "owner", theirs.digest())
        with pytest.raises(StateCorrupt):
            await sessions.begin(mine, deadline=0)
        with pytest.raises(StateCorrupt):
            await sessions.describe(mine, Record(1.5, {}))
    assert [turn.answer for turn in (await sessions.history(theirs)).turns] == ["other"]


async def test_a_session_that_was_made_by_name_outlives_a_turn_that_was_given_up(sessions: Sessions) -> None:
    key, other, record = a_key(), a_key(), Record(1.5, {"a": "b"})
    await sessions.create(key, record)
    for one in (key, other):
        await sessions.abort(await sessions.begin(one, deadline=0))
    assert (await sessions.history(key)).record == record
    assert (await sessions.begin(key, deadline=0, there=True)).history.turns == ()
    with pytest.raises(ConversationNotFound):
        await sessions.begin(other, deadline=0, there=True)


async def test_what_is_copied_keeps_its_numbers(embedded: EmbeddedValkey) -> None:
    async with Store(embedded.url) as store:
        bounded, key, branch = Sessions(store, StateSettings(session_turns=3)), a_key(), a_key()
        for number in range(5):
            await bounded.commit(await bounded.begin(key, deadline=0, after=number), a_turn(id=str(number)))
        history = await bounded.history(key)
        assert history.dropped == 2
        begun = await bounded.begin(branch, idempotency="k", deadline=0)
        copied = replace(begun, history=History(history.turns[:2], history.dropped), copied=True)
        await bounded.commit(copied, a_turn(id="new"))
        kept = await bounded.history(branch)
        assert ([turn.id for turn in kept.turns], kept.dropped) == (["2", "3", "new"], 2)
        replay = (await bounded.begin(branch, idempotency="k", deadline=0)).replay
        assert replay is not None
        assert replay.id == "new"
        with pytest.raises(Moved):
            await bounded.begin(branch, deadline=0, after=3)
        assert (await bounded.begin(branch, deadline=0, after=5)).history == kept


# ---- against a model: two servers, turns that overlap, holders that die, sessions that expire


@dataclass
class Model:
    turns: list[str] = field(default_factory=list)
    dropped: int = 0
    fence: str = ""
    leased: bool = False
    did: dict[str, int] = field(default_factory=dict)
    record: Record | None = None


KEPT = 3


class Histories(RuleBasedStateMachine):
    """begin, commit, abort, renew, a session that is made by name or described, one that goes on from what another
    holds, a lease that runs out, a session that expires: each from either of two servers."""

    embedded: EmbeddedValkey

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        bounds = StateSettings(session_turns=KEPT)
        self.stores = [Store(self.embedded.url, timeout=5) for _ in range(2)]
        self.servers = [Sessions(store, bounds) for store in self.stores]
        self.keys = [a_key(), a_key()]
        self.models = [Model(), Model()]
        self.begun: list[tuple[int, str, Begun]] = []  # session, idempotency key
        self.numbers = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for store in self.stores:
                self.loop.run_until_complete(store.__aexit__())
            self.loop.close()

    def do(self, what: Awaitable[T]) -> T:
        return self.loop.run_until_complete(what)

    @rule(server=st.integers(0, 1), which=st.integers(0, 1))
    def create(self, server: int, which: int) -> None:
        self.models[which].record = Record(next(self.numbers), {})
        self.do(self.servers[server].create(self.keys[which], self.models[which].record))

    @rule(server=st.integers(0, 1), which=st.integers(0, 1))
    def describe(self, server: int, which: int) -> None:
        record = Record(next(self.numbers), {"a": "b"})
        described = self.servers[server].describe(self.keys[which], record)
        if self.models[which].record is None:
            with pytest.raises(ConversationNotFound):
                self.do(described)
        else:
            self.do(described)
            self.models[which].record = record

    @rule(server=st.integers(0, 1), which=st.integers(0, 1))
    def branch(self, server: int, which: int) -> None:
        """Into a session that has no turns: all that the other one has, and another turn."""
        sessions, model, other = self.servers[server], self.models[which], self.models[1 - which]
        if model.turns or model.leased:
            return
        begun = self.do(sessions.begin(self.keys[which], deadline=0))
        history = self.do(sessions.history(self.keys[1 - which]))
        turn = a_turn(id=str(next(self.numbers)))
        self.do(sessions.commit(replace(begun, history=history, copied=True), turn))
        model.turns = [*other.turns, turn.id]
        model.dropped = max(other.dropped, len(model.turns) - KEPT)
        model.fence = ""

    @rule(
        server=st.integers(0, 1),
        which=st.integers(0, 1),
        name=st.sampled_from(["", "", "a", "b"]),
        there=st.sampled_from([False, False, False, True]),
        beside=st.sampled_from([None, None, 0, -1, 1]),
    )
    def begin(self, server: int, which: int, name: str, there: bool, beside: int | None) -> None:
        model = self.models[which]
        after = None if beside is None else max(0, len(model.turns) + beside)
        began = self.servers[server].begin(self.keys[which], idempotency=name, deadline=0, there=there, after=after)
        if there and model.record is None:
            with pytest.raises(ConversationNotFound):
                self.do(began)
        elif name and name in model.did:
            if model.did[name] < model.dropped:
                with pytest.raises(Conflict):
                    self.do(began)
            else:
                replay = self.do(began).replay
                assert replay is not None
                assert replay.id == model.turns[model.did[name]]
        elif after and not model.turns:
            with pytest.raises(ConversationNotFound):
                self.do(began)
        elif after not in (None, len(model.turns)):
            with pytest.raises(Moved):
                self.do(began)
        elif model.leased:
            with pytest.raises(Conflict):
                self.do(began)
        else:
            begun = self.do(began)
            assert [turn.id for turn in begun.history.turns] == model.turns[model.dropped :]
            model.fence, model.leased = begun.fence, True
            self.begun.append((which, name, begun))

    def pick(self, data: st.DataObject) -> tuple[Begun, Model, str] | None:
        """Any turn ever begun, whatever became of it."""
        if not self.begun:
            return None
        which, name, begun = self.begun[-1 - data.draw(st.integers(0, min(4, len(self.begun) - 1)))]
        return begun, self.models[which], name

    @rule(server=st.integers(0, 1), data=st.data())
    def commit(self, server: int, data: st.DataObject) -> None:
        if (picked := self.pick(data)) is None:
            return
        begun, model, name = picked
        turn = a_turn(id=str(next(self.numbers)))
        if begun.fence != model.fence:
            with pytest.raises(Conflict):
                self.do(self.servers[server].commit(begun, turn))
            return
        self.do(self.servers[server].commit(begun, turn))
        model.turns.append(turn.id)
        model.dropped = max(model.dropped, len(model.turns) - KEPT)
        if name:
            model.did[name] = len(model.turns) - 1
        model.fence, model.leased = "", False

    @rule(server=st.integers(0, 1), data=st.data())
    def abort(self, server: int, data: st.DataObject) -> None:
        if (picked := self.pick(data)) is not None:
            begun, model, _ = picked
            self.do(self.servers[server].abort(begun))
            if begun.fence == model.fence:
                model.fence, model.leased = "", False

    @rule(server=st.integers(0, 1), data=st.data())
    def renew(self, server: int, data: st.DataObject) -> None:
        if (picked := self.pick(data)) is not None:
            begun, model, _ = picked
            mine = begun.fence == model.fence
            assert self.do(self.servers[server].renew(begun)) == mine
            model.leased |= mine

    @rule(which=st.integers(0, 1))
    def lease_runs_out(self, which: int) -> None:
        with valkey.Valkey(unix_socket_path=self.embedded.url.removeprefix("unix://")) as raw:
            raw.delete(f"forebay:{{{self.keys[which].digest().hex()}}}:lease")
        self.models[which].leased = False

    @rule(which=st.integers(0, 1), server=st.integers(0, 1), luck=st.integers(0, 3))
    def expire(self, which: int, server: int, luck: int) -> None:
        if luck == 0:
            self.do(self.servers[server].delete(self.keys[which]))
            self.models[which] = Model()

    @invariant()
    def what_is_kept_is_what_was_committed(self) -> None:
        for key, model in zip(getattr(self, "keys", []), getattr(self, "models", []), strict=True):
            history = self.do(self.servers[0].history(key))
            assert [turn.id for turn in history.turns] == model.turns[model.dropped :]
            assert history.dropped == model.dropped
            assert history.record == model.record


def test_any_history_of_two_servers_is_serial(embedded: EmbeddedValkey) -> None:
    Histories.embedded = embedded
    few = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Histories, settings=few)
