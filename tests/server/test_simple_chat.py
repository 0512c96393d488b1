"""POST /chat, the simple door. A scripted model, a real Valkey."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import scripted
from scripted import ScriptedBackend, Served, served

from forebay.contract import EngineFailure, Message
from forebay.state.embedded import EmbeddedValkey

pytestmark = pytest.mark.anyio
ANSWER = "".join(scripted.ANSWER)


@pytest.fixture
async def server(embedded: EmbeddedValkey) -> AsyncIterator[Served]:
    async with served(ScriptedBackend(), state_url=embedded.url) as running:
        yield running


async def test_a_prompt_is_answered_and_the_session_goes_on(server: Served, http: httpx.AsyncClient) -> None:
    first = await http.post("/chat", json={"prompt": "one", "user_id": "u"})
    session = first.json()["session_id"]
    assert first.json() == {"answer": ANSWER, "session_id": session}
    assert first.headers["x-session-id"] == session
    second = await http.post("/chat", json={"prompt": "two", "user_id": "u", "session_id": session, "stream": True})
    assert second.headers["x-session-id"] == session
    frames = [frame.removeprefix("data: ") for frame in second.text.split("\n\n")[:-1]]
    assert frames.pop() == "[DONE]"
    assert [json.loads(frame) for frame in frames] == [{"answer": text} for text in scripted.ANSWER]
    assert server.backend.requests[-1].messages == (
        Message("user", "one"),
        Message("assistant", ANSWER),
        Message("user", "two"),
    )
    # It is the session that chats know.
    chat = {"model": scripted.MODEL, "messages": [{"role": "user", "content": "three"}], "session_id": session}
    await http.post("/v1/chat/completions", json=chat, headers={"x-user-id": "u"})
    assert len(server.backend.requests[-1].messages) == 5
    for stranger in ({"user_id": "v"}, {}):
        await http.post("/chat", json={"prompt": "x", "session_id": session, **stranger})
        assert len(server.backend.requests[-1].messages) == 1
    assert (await http.post("/chat", json={"prompt": "x"})).json()["session_id"] != session


async def test_a_retry_is_the_same_answer(server: Served, http: httpx.AsyncClient) -> None:
    once = {"idempotency-key": "k"}
    first = await http.post("/chat", json={"prompt": "one"}, headers=once)
    again = await http.post("/chat", json={"prompt": "one"}, headers=once)
    assert again.headers["x-idempotent-replay"] == "true"
    assert again.json() == first.json()
    streamed = await http.post("/chat", json={"prompt": "one", "stream": True}, headers=once)
    told = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert told == [json.dumps({"answer": ANSWER}, separators=(",", ":")), "[DONE]"]
    other = await http.post("/chat", json={"prompt": "one"}, headers=once | {"x-user-id": "v"})
    assert "x-idempotent-replay" not in other.headers
    assert server.backend.opened == 2


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({}, {}, "prompt"),
        ({"prompt": 5}, {}, "prompt"),
        ({"prompt": "x", "model": "y"}, {}, "model"),
        ({"prompt": "x", "user_id": ""}, {}, "user_id"),
        ({"prompt": "x", "user_id": "a"}, {"x-user-id": "b"}, "user_id"),
        ({"prompt": "x", "session_id": "a"}, {"x-session-id": "b"}, "session_id"),
        ({"prompt": "w " * 5000}, {}, "prompt"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    response = await http.post("/chat", json=fields, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_without_a_store_each_prompt_stands_alone() -> None:
    async with served(ScriptedBackend()) as running, httpx.AsyncClient(base_url=running.url) as http:
        response = await http.post("/chat", json={"prompt": "one"})
        assert response.json() == {"answer": ANSWER, "session_id": None}
        response = await http.post("/chat", json={"prompt": "one", "session_id": "a"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "session_id")


async def test_a_failure_in_the_stream_is_told() -> None:
    backend = ScriptedBackend(scripted.fail(EngineFailure("it broke"), after=2))
    async with served(backend) as running, httpx.AsyncClient(base_url=running.url) as http:
        response = await http.post("/chat", json={"prompt": "one", "stream": True})
        assert "it broke" in response.text
        assert "[DONE]" not in response.text
