"""What requests get less of while others wait for long, and that they are told; and what the server says it can do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from scripted import MODEL, ScriptedBackend, Served, body, say, served, until
from test_answers import Clock
from test_endings import CHAT, TEXT, count, world
from test_flight import GREEDY, STREAM, results
from test_keys import bearer, entry
from test_overload import SLOW

from forebay.admission.brownout import Level
from forebay.admission.gate import Gate
from forebay.config import AnswerSettings
from forebay.contract import Message
from forebay.state.embedded import EmbeddedValkey

pytestmark = pytest.mark.anyio
TOLD = "x-forebay-degraded"


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets it, and what is usual."""

    def put(level: Level, usual: int | None = 20) -> None:
        monkeypatch.setattr(Gate, "level", level)
        monkeypatch.setattr(Gate, "usual", lambda self: usual)

    return put


async def seen(client: httpx.AsyncClient, fields: dict[str, Any]) -> tuple[str, str | None]:
    response = await client.post(CHAT, json=fields)
    assert response.status_code == 200, response.text
    return response.headers["x-cache"], response.headers.get(TOLD)


# Answers no longer than usual


@pytest.mark.parametrize(
    ("usual", "fields", "most", "told"),
    [
        (20, {}, 20, "max_tokens"),
        (20, {"max_tokens": 21}, 20, "max_tokens"),
        (20, {"max_tokens": 20}, 20, None),
        (20, {"max_tokens": 5}, 5, None),
        (20, {"min_tokens": 30}, 30, "max_tokens"),
        (3, {}, 16, "max_tokens"),
        (1000, {}, 512, None),
        (None, {}, 512, None),
    ],
)
async def test_an_answer_is_no_longer_than_usual(
    client: httpx.AsyncClient, server: Served, level: Any, usual: int | None, fields: Any, most: int, told: str | None
) -> None:
    for now in Level:
        level(now, usual)
        response = await client.post(CHAT, json=body(**fields))
        short = now >= Level.SHORT
        assert response.headers.get(TOLD) == (told if short else None)
        assert server.backend.requests[-1].max_tokens == (most if short else fields.get("max_tokens", 512))
        assert count(server, "forebay:brownout_level") == now


async def test_every_door_says_that_an_answer_is_shortened(client: httpx.AsyncClient, level: Any) -> None:
    level(Level.SHORT, 16)
    prompts = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 99}
    for path, fields in (
        ("/v1/completions", prompts),
        ("/v1/responses", {"model": MODEL, "input": "a"}),
        ("/chat", {"prompt": "a"}),
        (CHAT, body(stream=True)),
    ):
        response = await client.post(path, json=fields)
        assert (response.status_code, response.headers[TOLD]) == (200, "max_tokens")


async def test_a_short_answer_is_never_given_as_a_whole_one(level: Any) -> None:
    """Neither by its bytes nor by its prompt; and in need a whole one is as good."""
    async with world(say()) as (running, client):
        other = {**GREEDY, "user": "other bytes"}
        level(Level.SHORT)
        assert await seen(client, GREEDY) == ("miss", "max_tokens")
        assert await seen(client, GREEDY) == ("hit", "max_tokens")
        assert await seen(client, other) == ("hit", "max_tokens")
        prepared = len(running.backend.requests)
        assert await seen(client, GREEDY) == ("hit", "max_tokens")
        assert len(running.backend.requests) == prepared
        level(Level.NO_SPECULATION)
        assert await seen(client, GREEDY) == ("miss", None)
        assert await seen(client, other) == ("hit", None)
        level(Level.FEW_NEW)
        assert await seen(client, GREEDY) == ("hit", None)
        assert running.backend.opened == 2


# Older answers


@pytest.mark.parametrize("same_bytes", [True, False])
async def test_an_old_answer_is_told_again_in_need_only(level: Any, same_bytes: bool) -> None:
    async with world(say(), answers=AnswerSettings(answer_ttl=50)) as (running, client):
        running.app.state.answers._clock = clock = Clock()

        async def asked(stale: tuple[str, str | None]) -> None:
            fields = GREEDY if same_bytes else {**GREEDY, "user": str(clock.now)}
            assert await seen(client, fields) == stale

        level(Level.LEAN, None)
        await asked(("miss", None))
        for now in (149, 151, 299):
            clock.now = now
            await asked(("stale", "cache") if now > 150 else ("hit", None))
        level(Level.SHORT, None)
        await asked(("miss", None))
        clock.now += 49
        await asked(("hit", None))
        level(Level.LEAN, None)
        clock.now += 152  # more than four times as old as it may be
        await asked(("miss", None))
        assert results(running) | {"stale": count(running, "forebay:answer_cache_total", result="stale")} == {
            **{"hit": 2, "stale": 2, "miss": 3},
            **{"coalesced": 0, "bypass": 0},
        }


async def test_an_answer_that_is_just_made_anew_is_better_than_an_old_one(level: Any) -> None:
    async with world(say(), answers=AnswerSettings(answer_ttl=50)) as (running, client):
        running.app.state.answers._clock = clock = Clock()
        assert await seen(client, STREAM) == ("miss", None)
        clock.now += 60
        running.backend.script = say(pause=0.1)
        anew = asyncio.create_task(seen(client, STREAM))
        await until(lambda: running.backend.running == 1)
        level(Level.LEAN, None)
        assert await seen(client, STREAM) == ("coalesced", None)
        assert await anew == ("miss", None)


# Shorter conversations


async def test_a_conversation_is_cut_earlier_by_whole_turns(embedded: EmbeddedValkey, level: Any) -> None:
    backend = ScriptedBackend(say(("word ",) * 10), max_context=200)
    async with (
        served(backend, state_url=embedded.url, default_max_tokens=20) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):

        async def turn(number: int, session: str, **more: Any) -> tuple[int, str | None]:
            messages = [{"role": "user", "content": f"{number} " + "w " * 9}]
            fields = {"model": MODEL, "messages": messages, "session_id": session, **more}
            response = await client.post(CHAT, json=fields)
            assert response.status_code == 200, response.text
            return int(response.headers["x-session-dropped-turns"]), response.headers.get(TOLD)

        for number in range(7):  # of 20 tokens each
            for session in ("short", "long"):
                assert await turn(number, f"savings {session}") == (0, None)
        level(Level.SHORT, None)
        assert await turn(7, "savings short") == (0, None)
        level(Level.LEAN, None)
        # 170 are more than 120; three turns and the new one are no more than 72.
        assert await turn(8, "savings short") == (5, "history")
        messages = backend.requests[-1].messages
        assert [message.role for message in messages] == ["user", "assistant"] * 3 + ["user"]
        assert messages[0] == Message("user", "5 " + "w " * 9)
        assert await turn(9, "savings short") == (5, None)
        level(Level.LEAN, 16)
        both = await turn(7, "savings long", max_tokens=17, temperature=0)
        assert both == (4, "max_tokens, history")
        level(Level.NORMAL, None)
        assert await turn(8, "savings long") == (4, None)


async def test_who_wants_a_conversation_whole_gets_it_whole(embedded: EmbeddedValkey, level: Any) -> None:
    backend = ScriptedBackend(say(("word ",) * 10), max_context=200)
    async with (
        served(backend, state_url=embedded.url, default_max_tokens=20) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        level(Level.FEW_NEW, None)
        conversation = (await client.post("/v1/conversations", json={})).json()["id"]
        for number in range(8):
            fields = {"model": MODEL, "input": f"{number} " + "w " * 9, "conversation": conversation}
            response = await client.post("/v1/responses", json={**fields, "truncation": "disabled"})
            assert (response.status_code, response.headers.get(TOLD)) == (200, None)
            assert len(backend.requests[-1].messages) == 2 * number + 1
        assert (await client.post("/v1/responses", json=fields)).headers[TOLD] == "history"


# What the server says of itself


async def test_the_capacity_is_told_to_who_has_a_key() -> None:
    async with (
        served(ScriptedBackend(say()), keys={"a": entry("key-a", "acme")}) as running,
        httpx.AsyncClient(base_url=running.url, headers=bearer("key-a")) as client,
    ):
        unknown = (await client.get("/v1/capacity")).json()
        assert (unknown["object"], unknown["requests_per_second"], unknown["waiting"]) == ("capacity", None, 0)
        running.backend.pace = SLOW
        for _ in range(3):
            assert (await client.post(CHAT, json=body())).json()["choices"][0]["message"]["content"] == TEXT
        known = json.loads((await client.get("/v1/capacity")).content, parse_constant=pytest.fail)
        assert known["requests_per_second"] > 0
        assert known["completion_tokens"] == 7
        assert known["slots"] == 4
        assert 0 <= known["headroom"] <= 1
        assert (await client.get("/v1/capacity", headers=bearer("wrong"))).status_code == 401
