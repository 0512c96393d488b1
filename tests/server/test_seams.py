"""Where a turn, its answer and its KV part: what is not kept leaves nothing behind, and nobody waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import scripted
from scripted import MODEL, ScriptedBackend, served, until
from test_endings import CHAT, FOREVER
from test_running import once, turn, world

from forebay.contract import StateFull
from forebay.server import conversation as conversations
from forebay.state.embedded import EmbeddedValkey
from forebay.state.sessions import SessionKey, Sessions

pytestmark = pytest.mark.anyio
RESPONSES = "/v1/responses"
_numbers = iter(range(10**6))


@pytest.fixture
def name() -> str:
    return f"seam {next(_numbers)}"


def asked(text: str = "one", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text, **fields}


async def test_only_what_is_kept_has_kv_that_is_kept(embedded: EmbeddedValkey) -> None:
    async with world(embedded, scripted.say()) as (running, client):
        first = (await client.post(RESPONSES, json=asked())).json()["id"]
        for fields in ({}, {"store": False}, {"store": False, "previous_response_id": first}):
            assert (await client.post(RESPONSES, json=asked(temperature=0, **fields))).status_code == 200
        ttls = [request.ttl for request in running.backend.requests]
        assert ttls == [1800.0, 1800.0, 0.0, 0.0]


async def test_the_kv_of_a_turn_that_was_given_up_goes_and_that_of_the_ones_before_stays(
    embedded: EmbeddedValkey, name: str
) -> None:
    async with world(embedded, scripted.say()) as (running, client):
        assert (await client.post(CHAT, json=turn(name))).status_code == 200
        assert running.backend.forgotten == []
        running.backend.script = scripted.say(first=30)
        asking = asyncio.create_task(client.post(CHAT, json=turn(name, "two")))
        await until(lambda: running.backend.running == 1)
        asking.cancel()
        await until(lambda: len(running.backend.forgotten) == 1)
        assert running.backend.forgotten[0][1].turns == ((b"2", ()),)


async def test_a_store_that_is_full_for_a_moment_does_not_end_a_lease(
    embedded: EmbeddedValkey, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals: list[bool] = []

    async def renew(self: Sessions, begun: Any) -> bool:
        renewals.append(True)
        raise StateFull("the store of conversations is full")

    monkeypatch.setattr(conversations, "RENEWAL", 0.02)
    monkeypatch.setattr(Sessions, "renew", renew)
    async with world(embedded, scripted.say(first=0.3)) as (_, client):
        assert (await client.post(CHAT, json=turn(name))).status_code == 200
    assert len(renewals) > 3


async def test_who_was_told_that_the_store_is_full_finds_the_session_free(
    embedded: EmbeddedValkey, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Sessions.commit

    async def full(self: Sessions, begun: Any, turn: Any) -> None:
        monkeypatch.setattr(Sessions, "commit", commit)
        raise StateFull("the store of conversations is full")

    monkeypatch.setattr(Sessions, "commit", full)
    async with world(embedded, scripted.say()) as (running, client):
        refused = await client.post(CHAT, json=turn(name, stream=False))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_full")
        assert (await client.post(CHAT, json=turn(name, stream=False))).status_code == 200
        assert len(running.backend.forgotten) == 1


async def test_one_idempotency_key_stands_for_one_thing(embedded: EmbeddedValkey) -> None:
    async with world(embedded, scripted.say()) as (_, client):
        made = (await client.post("/v1/conversations", json={})).json()["id"]
        items = {"items": [{"role": "user", "content": "put here"}]}
        path = f"/v1/conversations/{made}/items"
        assert (await client.post(path, json=items, headers=once("a"))).status_code == 200
        assert (await client.post(path, json=items, headers=once("a"))).status_code == 200
        chat = await client.post(CHAT, json={**turn(made), "user": ""}, headers=once("a"))
        assert (chat.status_code, chat.json()["error"]["param"]) == (400, "idempotency-key")
        response = asked(conversation=made)
        assert (await client.post(RESPONSES, json=response, headers=once("b"))).status_code == 200
        refused = await client.post(path, json=items, headers=once("b"))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "idempotency-key")


@pytest.mark.parametrize(
    ("path", "fields", "headers"),
    [
        (CHAT, {**turn("seam"), "stream": False}, once("k")),
        (CHAT, turn("seam"), {}),
        (CHAT, {"model": MODEL, "messages": turn("")["messages"], "stream": True}, once("k")),
        (RESPONSES, asked(stream=True), once("k")),
    ],
    ids=["no stream", "no key", "no session", "a response"],
)
async def test_a_last_event_that_nothing_can_go_on_from_is_refused(
    embedded: EmbeddedValkey, path: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    async with world(embedded, scripted.say()) as (running, client):
        refused = await client.post(path, json=fields, headers={**headers, "last-event-id": "4"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "last-event-id")
        assert running.backend.opened == 0


async def test_purging_answers_leaves_turns_that_run(embedded: EmbeddedValkey, name: str) -> None:
    async with world(embedded, scripted.say(first=0.3)) as (running, client):
        first = asyncio.create_task(client.post(CHAT, json=turn(name), headers=once()))
        await until(lambda: running.backend.running == 1)
        await client.delete("/v1/cache")
        joined = await client.post(CHAT, json=turn(name), headers=once())
        assert (joined.status_code, joined.headers["x-cache"]) == (200, "coalesced")
        assert (await first).status_code == 200
        assert running.backend.opened == 1


async def test_a_turn_that_nobody_can_come_back_to_does_not_go_on(embedded: EmbeddedValkey, name: str) -> None:
    """Its client has left, and then its conversation was deleted."""
    async with world(embedded, scripted.say(FOREVER, pause=0.05)) as (running, client):
        asking = asyncio.create_task(client.post(CHAT, json=turn(name), headers=once()))
        await until(lambda: running.backend.running == 1)
        asking.cancel()
        await asyncio.sleep(0.3)
        assert running.backend.running == 1  # somebody may come back
        assert (await client.delete(f"/v1/sessions/{name}", headers={"x-user-id": "u"})).status_code == 200
        await until(lambda: running.backend.running == 0, 1.0)


async def test_a_replayed_answer_names_its_session(embedded: EmbeddedValkey, name: str) -> None:
    async with world(embedded, scripted.say(), window=0.05) as (_, client):
        first = await client.post(CHAT, json=turn(name), headers=once())
        await asyncio.sleep(0.2)
        again = await client.post(CHAT, json=turn(name), headers=once())
        assert again.headers["x-idempotent-replay"] == "true"
        assert first.headers["x-session-id"] == again.headers["x-session-id"] == name


async def test_a_thread_that_is_gone_is_not_gone_on_with(embedded: EmbeddedValkey, name: str) -> None:
    async with served(ScriptedBackend(), state_url=embedded.url) as running:
        sessions: Sessions = running.app.state.sessions
        with pytest.raises(Exception, match="there is no conversation"):
            await sessions.begin(SessionKey("", "u", name), deadline=0, after=2)


async def test_answers_of_unkept_turns_are_not_shared(embedded: EmbeddedValkey) -> None:
    """They would be found where nobody looks for them when their conversation is deleted."""
    async with world(embedded, scripted.say()) as (_, client):
        first = (await client.post(RESPONSES, json=asked())).json()["id"]
        fields = asked("two", temperature=0, store=False, previous_response_id=first)
        seen = [(await client.post(RESPONSES, json=fields)).headers["x-cache"] for _ in range(2)]
        assert seen == ["bypass", "bypass"]
