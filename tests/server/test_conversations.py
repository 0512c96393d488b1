"""/v1/conversations as the official client sees it, and deletion. A scripted model, a real Valkey."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import scripted
import valkey
from openai.types.conversations import Conversation, ConversationItem, Message
from pydantic import TypeAdapter
from scripted import MODEL, ScriptedBackend, Served, served

from forebay.config import StateSettings
from forebay.contract import Delta, GenRequest, Usage
from forebay.contract import Message as Said
from forebay.state.embedded import EmbeddedValkey
from forebay.state.sessions import Record, SessionKey, Sessions
from forebay.state.store import Store

pytestmark = pytest.mark.anyio
CONVERSATIONS = "/v1/conversations"
ANSWER = "".join(scripted.ANSWER)
ITEM: TypeAdapter[Any] = TypeAdapter(ConversationItem)
HELLO = {"role": "user", "content": "hello"}


@pytest.fixture
async def server(embedded: EmbeddedValkey) -> AsyncIterator[Served]:
    async with served(ScriptedBackend(), state_url=embedded.url) as running:
        yield running


@pytest.fixture
async def client(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:  # type: ignore[override]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def texts(client: openai.AsyncOpenAI, id: str, **query: Any) -> list[str]:
    """All that was said, over as many pages as there are."""
    items = [item async for item in client.conversations.items.list(id, **query)]
    return [item.content[0].text for item in items if isinstance(item, Message)]  # type: ignore[union-attr]


async def test_a_conversation_is_made_described_and_deleted(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    made = await client.conversations.create(metadata={"topic": "rivers"})
    assert made.metadata == {"topic": "rivers"}
    assert time.time() - 60 < made.created_at <= time.time()
    Conversation.model_validate((await http.get(f"{CONVERSATIONS}/{made.id}")).json(), strict=True)
    assert await client.conversations.retrieve(made.id) == made
    changed = await client.conversations.update(made.id, metadata={"topic": "lakes"})
    assert changed == made.model_copy(update={"metadata": {"topic": "lakes"}})
    assert await client.conversations.retrieve(made.id) == changed
    gone = await client.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for refused in (
        client.conversations.retrieve(made.id),
        client.conversations.update(made.id, metadata={}),
        client.conversations.delete(made.id),
        client.conversations.items.create(made.id, items=[HELLO]),  # type: ignore[list-item]
        client.responses.create(model=MODEL, input="x", conversation=made.id),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no conversation"):
            await refused
    assert (await client.conversations.create()).id != made.id  # and one without a body
    assert (await http.post(CONVERSATIONS)).status_code == 200


async def test_items_are_what_was_said(server: Served, client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    items: list[Any] = [{"role": "system", "content": "be kind"}, HELLO]
    made = await client.conversations.create(items=items)
    await client.responses.create(model=MODEL, input="one", conversation=made.id)
    more: list[Any] = [{"role": "assistant", "content": "said elsewhere"}, {"role": "user", "content": "two"}]
    added = await client.conversations.items.create(made.id, items=more)
    assert [item.role for item in added.data] == ["assistant", "user"]  # type: ignore[union-attr]
    await client.responses.create(model=MODEL, input="three", conversation=made.id)
    said = ["be kind", "hello", "one", ANSWER, "said elsewhere", "two", "three"]
    assert [message.content for message in server.backend.requests[-1].messages] == said
    roles = [message.role for message in server.backend.requests[-1].messages]
    assert roles == ["system", "user", "user", "assistant", "assistant", "user", "user"]
    said.append(ANSWER)
    assert await texts(client, made.id, order="asc") == said
    assert await texts(client, made.id) == said[::-1]
    for limit in (1, 3, 8):
        assert await texts(client, made.id, order="asc", limit=limit) == said
    listed = (await http.get(f"{CONVERSATIONS}/{made.id}/items?order=asc&limit=2")).json()
    assert (len(listed["data"]), listed["has_more"]) == (2, True)
    assert [listed["first_id"], listed["last_id"]] == [item["id"] for item in listed["data"]]
    after = listed["last_id"]
    rest = (await http.get(f"{CONVERSATIONS}/{made.id}/items?order=asc&after={after}")).json()
    assert (len(rest["data"]), rest["has_more"]) == (6, False)
    ids = [item["id"] for item in listed["data"] + rest["data"]]
    assert len(set(ids)) == 8
    for item in listed["data"] + rest["data"]:
        ITEM.validate_python(item)
        assert (await http.get(f"{CONVERSATIONS}/{made.id}/items/{item['id']}")).json() == item
    assert {item.id for item in added.data} <= set(ids)


async def test_items_tell_what_was_thought(embedded: EmbeddedValkey) -> None:
    async def play(_request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
        yield Delta("So.", 2, Usage(n_prompt, 2), time.monotonic(), "stop", "Hm.")

    async with (
        served(ScriptedBackend(play), state_url=embedded.url) as running,
        openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        made = await client.conversations.create()
        response = await client.responses.create(model=MODEL, input="one", conversation=made.id)
        items = (await client.conversations.items.list(made.id, order="asc")).data
        assert [item.type for item in items] == ["message", "reasoning", "message"]
        assert [item.id for item in items[1:]] == [item.id for item in response.output]


async def test_a_conversation_is_a_session_of_chats_too(server: Served, http: httpx.AsyncClient) -> None:
    made = (await http.post(CONVERSATIONS, json={"items": [HELLO]})).json()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "one"}], "session_id": made["id"]}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    assert [message.content for message in server.backend.requests[-1].messages] == ["hello", "one"]
    await http.post("/v1/responses", json={"model": MODEL, "input": "two", "conversation": made["id"]})
    assert [message.content for message in server.backend.requests[-1].messages] == ["hello", "one", ANSWER, "two"]
    # The chat's turn is no response, whose id could be guessed from its items.
    items = (await http.get(f"{CONVERSATIONS}/{made['id']}/items?order=asc")).json()["data"]
    guessed = f"resp_{made['id'][5:]}{items[2]['id'][4:]}"
    assert (await http.get(f"/v1/responses/{guessed}")).status_code == 404
    assert (
        await http.post("/v1/responses", json={"model": MODEL, "input": "x", "previous_response_id": guessed})
    ).status_code == 404


async def test_deleting_forgets_cached_answers(http: httpx.AsyncClient) -> None:
    made = (await http.post(CONVERSATIONS, json={"items": [HELLO]})).json()
    other = (await http.post(CONVERSATIONS, json={"items": [HELLO]})).json()
    asked = {"model": MODEL, "input": "one", "temperature": 0}
    again = asked | {"input": [HELLO, {"role": "user", "content": "one"}], "store": False}
    assert (await http.post("/v1/responses", json=asked | {"conversation": made["id"]})).headers["x-cache"] == "miss"
    assert (await http.post("/v1/responses", json=again)).headers["x-cache"] == "hit"
    await http.delete(f"{CONVERSATIONS}/{other['id']}")
    assert (await http.post("/v1/responses", json=again)).headers["x-cache"] == "hit"
    await http.delete(f"{CONVERSATIONS}/{made['id']}")
    assert (await http.post("/v1/responses", json=again)).headers["x-cache"] == "miss"


async def test_deleting_leaves_nothing(server: Served, embedded: EmbeddedValkey, http: httpx.AsyncClient) -> None:
    made = (await http.post(CONVERSATIONS, json={"items": [HELLO]}, headers={"x-user-id": "u"})).json()
    sent = {"model": MODEL, "input": "x", "conversation": made["id"], "temperature": 0}
    headers = {"x-user-id": "u", "idempotency-key": "k"}
    assert (await http.post("/v1/responses", json=sent, headers=headers)).status_code == 200
    response = (await http.post("/v1/responses", json={"model": MODEL, "input": "x"})).json()
    chat = {"model": MODEL, "messages": [HELLO], "session_id": "mine / ours"}
    assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
    keys = [
        SessionKey("", "u", made["id"]),
        SessionKey("", "key:", "conv_" + response["id"][5:37]),
        SessionKey("", "key:", "mine / ours"),
    ]
    paths = [f"{CONVERSATIONS}/{made['id']}", f"/v1/responses/{response['id']}", "/v1/sessions/mine%20/%20ours"]
    with valkey.Valkey(unix_socket_path=embedded.url.removeprefix("unix://")) as raw:
        for key, path in zip(keys, paths, strict=True):
            pattern = f"forebay:{{{key.digest().hex()}}}:*"
            assert list(raw.scan_iter(pattern))
            own = {"x-user-id": "u"} if key.user == "u" else {}
            assert (await http.delete(path, headers={"x-user-id": "other"})).status_code == 404
            assert list(raw.scan_iter(pattern))
            gone = await http.delete(path, headers=own)
            assert (gone.status_code, gone.json()["deleted"]) == (200, True)
            assert not list(raw.scan_iter(pattern))
            assert (await http.delete(path, headers=own)).status_code == 404
    await http.post("/v1/chat/completions", json=chat)
    assert server.backend.requests[-1].messages == (Said("user", "hello"),)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("", None),
        ("?limit=0", "limit"),
        ("?limit=101", "limit"),
        ("?limit=x", "limit"),
        ("?order=up", "order"),
        ("?after=msg_x", "after"),
        ("?include=reasoning.encrypted_content", "include"),
    ],
)
async def test_queries_are_checked(http: httpx.AsyncClient, path: str, param: str | None) -> None:
    made = (await http.post(CONVERSATIONS, json={})).json()
    response = await http.get(f"{CONVERSATIONS}/{made['id']}/items{path}")
    if param is None:
        assert response.json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    else:
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [{"type": "function_call_output", "call_id": "x", "output": "x"}]}, "items.0"),
        ("", {"metadata": {"x" * 65: ""}}, "metadata"),
        ("", {"colour": "red"}, "colour"),
        ("/{id}", {}, "metadata"),
        ("/{id}", {"metadata": {"a": 1}}, "metadata"),
        ("/{id}/items", {}, "items"),
        ("/{id}/items", {"items": []}, "items"),
        ("/{id}/items", {"items": [HELLO], "include": ["x"]}, "include"),
    ],
)
async def test_what_is_not_supported_is_named(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    made = (await http.post(CONVERSATIONS, json={})).json()
    response = await http.post(CONVERSATIONS + path.format(id=made["id"]), json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_items_are_not_deleted_one_by_one(http: httpx.AsyncClient) -> None:
    made = (await http.post(CONVERSATIONS, json={"items": [HELLO]})).json()
    (item,) = (await http.get(f"{CONVERSATIONS}/{made['id']}/items")).json()["data"]
    assert (await http.delete(f"{CONVERSATIONS}/{made['id']}/items/{item['id']}")).status_code == 405
    missing = await http.get(f"{CONVERSATIONS}/{made['id']}/items/msg_x")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "item_not_found")


async def test_a_conversation_that_is_not_used_expires(embedded: EmbeddedValkey) -> None:
    async with Store(embedded.url) as store:
        sessions = Sessions(store, StateSettings(session_ttl=0.3), lease=0.3)
        key = SessionKey("", "key:", "conv_" + "1" * 32)
        await sessions.create(key, Record(1.0, {}))
        with valkey.Valkey(unix_socket_path=embedded.url.removeprefix("unix://")) as raw:
            (name,) = raw.scan_iter(f"forebay:{{{key.digest().hex()}}}:*")
            assert 0 < raw.pttl(name) <= 300
