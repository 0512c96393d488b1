"""Turns with an Idempotency-Key: joined while they run, gone on with after a break, and never run twice."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import scripted
from scripted import MODEL, Script, ScriptedBackend, Served, served, until
from test_conversation import says
from test_endings import CHAT, FOREVER, TEXT, count, raw_request, reset
from test_flight import results, told

from forebay.config import AnswerSettings
from forebay.contract import EngineFailure
from forebay.state.embedded import EmbeddedValkey
from forebay.state.sessions import SessionKey

pytestmark = pytest.mark.anyio
_numbers = iter(range(10**6))


def turn(name: str, text: str = "one", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "session_id": name, "user": "u", "stream": True, **fields}


def once(key: str = "k", **headers: str) -> dict[str, str]:
    return {"idempotency-key": key, **headers}


@pytest.fixture
def name() -> str:
    return f"running {next(_numbers)}"


@asynccontextmanager
async def world(
    embedded: EmbeddedValkey, script: Script, window: float = 10.0, **settings: Any
) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    answers = AnswerSettings(resume_window=window)
    async with (
        served(ScriptedBackend(script), state_url=embedded.url, answers=answers, **settings) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        yield running, client


async def turns_of(running: Served, name: str) -> list[tuple[str, str | None]]:
    """Answers that are kept, and why they ended."""
    history = await running.app.state.sessions.history(SessionKey("", "u", name))
    return [(turn.answer, turn.finish) for turn in history.turns]


async def broken(client: httpx.AsyncClient, fields: dict[str, Any], headers: dict[str, str], frames: int) -> list[str]:
    """The first frames of a stream, which is then dropped."""
    seen: list[str] = []
    async with client.stream("POST", CHAT, json=fields, headers=headers) as response:
        rest = ""
        async for piece in response.aiter_text():
            *whole, rest = (rest + piece).split("\n\n")
            seen += whole
            if len(seen) >= frames:
                break
    return seen[:frames]


def heard(frames: list[str]) -> str:
    """The text of frames with or without ids."""
    data = [json.loads(match[1]) for frame in frames if (match := re.search(r"^data: (\{.*)$", frame, re.MULTILINE))]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in data)


async def test_the_same_key_joins_the_turn_that_runs(embedded: EmbeddedValkey, name: str) -> None:
    """At the same moment, a little later, and as another kind of reply; it is answered once and kept once."""
    async with world(embedded, scripted.say(pause=0.1)) as (running, client):
        asked = [asyncio.create_task(client.post(CHAT, json=turn(name), headers=once())) for _ in range(5)]
        await until(lambda: count(running, "vllm:generation_tokens_total") >= 3)
        whole = await client.post(CHAT, json=turn(name, stream=False), headers=once())
        streams = await asyncio.gather(*asked)
        assert [response.status_code for response in (whole, *streams)] == [200] * 6
        assert [told(re.sub(r"id: \d+\n", "", one.text)) for one in streams] == [(TEXT, ["stop"])] * 5
        assert whole.json()["choices"][0]["message"]["content"] == TEXT
        assert running.backend.opened == 1
        assert await turns_of(running, name) == [(TEXT, "stop")]
        replayed = [one.headers.get("x-idempotent-replay") for one in (*streams, whole)]
        assert sorted(map(str, replayed)) == ["None"] + ["true"] * 5
        assert {one.headers["x-session-id"] for one in (*streams, whole)} == {name}
        assert sum(results(running).values()) == 6
        assert results(running)["coalesced"] == 5
        assert count(running, "vllm:request_success_total", finished_reason="stop") == 6
        assert count(running, "vllm:generation_tokens_total") == len(scripted.ANSWER)


async def test_others_do_not_join_it(embedded: EmbeddedValkey, name: str) -> None:
    """Another key, no key, another user, another session: the first two are told that the session is busy."""
    async with (
        world(embedded, scripted.say(pause=0.1)) as (running, client),
        world(embedded, scripted.say()) as (_, elsewhere),
    ):
        first = asyncio.create_task(client.post(CHAT, json=turn(name), headers=once()))
        await until(lambda: running.backend.running == 1)
        for at, headers in ((client, once("other")), (client, {}), (elsewhere, once())):
            assert (await at.post(CHAT, json=turn(name), headers=headers)).status_code == 409
        for fields in (turn(name, user="v"), turn(name + "x")):
            assert (await client.post(CHAT, json=fields, headers=once())).headers.get("x-idempotent-replay") is None
        assert running.backend.opened == 3
        await first
        # Another server has it from the store.
        again = await elsewhere.post(CHAT, json=turn(name), headers=once())
        assert again.headers["x-idempotent-replay"] == "true"
        assert heard(again.text.split("\n\n")) == TEXT


async def test_it_goes_on_without_its_client(embedded: EmbeddedValkey, name: str) -> None:
    async with world(embedded, scripted.say(pause=0.05)) as (running, client):
        await broken(client, turn(name), once(), 3)
        await until(lambda: running.backend.running == 0)
        await until(lambda: count(running, "forebay:cancelled_total") == 1)
        assert await turns_of(running, name) == [(TEXT, "stop")]
        assert running.backend.opened == 1
        # Without a key, who leaves ends it.
        await broken(client, turn(name, "two"), {}, 3)
        await until(lambda: running.backend.running == 0)
        await until(lambda: not running.server.server_state.tasks)
        kept = await turns_of(running, name)
        assert kept[1][1] is None
        assert TEXT.startswith(kept[1][0])


@pytest.mark.parametrize("window", [0.0, 0.3])
async def test_behind_the_window_it_is_cut_and_kept_so(embedded: EmbeddedValkey, name: str, window: float) -> None:
    async with world(embedded, scripted.say(FOREVER, pause=0.02), window=window) as (running, client):
        reader, writer = await raw_request(running, once(), **{k: v for k, v in turn(name).items() if k != "model"})
        while b"word" not in await reader.readline():
            pass
        reset(writer)
        left = await until(lambda: count(running, "forebay:cancelled_total") == 1)
        assert await until(lambda: running.backend.running == 0) - left < window + 0.1
        assert running.backend.left[-1] - left > window - 0.1
        await until(lambda: not running.app.state.answers.turns._flights._flying)
        (kept,) = await turns_of(running, name)
        assert kept[0].startswith("word ")
        assert kept[1] is None
        # It has been, and does not run again.
        again = await client.post(CHAT, json=turn(name), headers=once())
        assert again.headers["x-idempotent-replay"] == "true"
        assert running.backend.opened == 1


async def test_who_comes_back_in_time_stops_the_clock(embedded: EmbeddedValkey, name: str) -> None:
    async with world(embedded, scripted.say(pause=0.2), window=0.3) as (running, client):
        await broken(client, turn(name), once(), 2)
        again = await client.post(CHAT, json=turn(name), headers=once())
        assert told(re.sub(r"id: \d+\n", "", again.text)) == (TEXT, ["stop"])
        assert running.backend.opened == 1


@pytest.mark.parametrize("seen", range(1, 9))
async def test_a_broken_stream_goes_on_behind_what_was_seen(embedded: EmbeddedValkey, name: str, seen: int) -> None:
    async with world(embedded, scripted.say(pause=0.03)) as (running, client):
        frames = await broken(client, turn(name), once(), seen + 1)
        assert [re.match(r"id: (\d+)", frame) is not None for frame in frames] == [False] + [True] * min(seen, 7) + (
            [False] * (seen - 7)
        )
        last = re.findall(r"^id: (\d+)$", "\n".join(frames), re.MULTILINE)[-1]
        rest = await client.post(CHAT, json=turn(name), headers=once(**{"last-event-id": last}))
        assert heard(frames) + heard(rest.text.split("\n\n")) == TEXT
        assert '"role"' not in rest.text
        assert rest.text.count('"finish_reason":"stop"') == 1
        assert rest.text.endswith("data: [DONE]\n\n")
        ids = [int(id) for id in re.findall(r"^id: (\d+)$", rest.text, re.MULTILINE)]
        assert ids == sorted(ids)
        assert ids[-1] == len(scripted.ANSWER)
        assert running.backend.opened == 1
        # From the first one on, and behind the end too: as long as the window.
        whole = await client.post(CHAT, json=turn(name), headers=once(**{"last-event-id": "0"}))
        assert heard(whole.text.split("\n\n")) == TEXT


async def test_what_is_no_longer_here_is_not_gone_on_with(embedded: EmbeddedValkey, name: str) -> None:
    async with world(embedded, scripted.say(), window=0.1) as (running, client):
        first = await client.post(CHAT, json=turn(name), headers=once())
        await until(lambda: not running.app.state.answers.turns._flights._listed)
        for key, last in (("k", "3"), ("never", "3"), ("k", "x"), ("k", "-1"), ("k", "")):
            response = await client.post(CHAT, json=turn(name), headers=once(key, **{"last-event-id": last}))
            assert (response.status_code, response.json()["error"]["param"]) == (400, "last-event-id")
        running.backend.script = scripted.say(pause=0.1)
        other = asyncio.create_task(client.post(CHAT, json=turn(name + "x"), headers=once()))
        await until(lambda: running.backend.running == 1)
        unsent = await client.post(CHAT, json=turn(name + "x"), headers=once(**{"last-event-id": "9"}))
        assert (unsent.status_code, unsent.json()["error"]["param"]) == (400, "last-event-id")
        await other
        again = await client.post(CHAT, json=turn(name), headers=once())
        assert heard(again.text.split("\n\n")) == heard(first.text.split("\n\n"))
        assert running.backend.opened == 2


async def test_a_turn_that_fails_is_told_to_all_and_may_be_tried_again(embedded: EmbeddedValkey, name: str) -> None:
    async with world(embedded, scripted.fail(EngineFailure("broken"), pause=0.2)) as (running, client):
        asked = [client.post(CHAT, json=turn(name), headers=once()) for _ in range(3)]
        assert [response.status_code for response in await asyncio.gather(*asked)] == [500] * 3
        assert running.backend.opened == 1
        running.backend.script = scripted.say()
        await until(lambda: not running.app.state.answers.turns._flights._flying)
        again = await client.post(CHAT, json=turn(name), headers=once())
        assert heard(again.text.split("\n\n")) == TEXT
        assert await turns_of(running, name) == [(TEXT, "stop")]


async def test_what_could_not_be_kept_has_no_end(embedded: EmbeddedValkey, name: str) -> None:
    """The conversation is deleted while a turn of it runs: its stream ends with an error, and nobody joins it."""
    async with world(embedded, scripted.say(pause=0.1)) as (running, client):
        first = asyncio.create_task(client.post(CHAT, json=turn(name), headers=once()))
        await until(lambda: count(running, "vllm:generation_tokens_total") >= 2)
        key = SessionKey("", "u", name)
        await running.app.state.sessions.delete(key)
        running.app.state.answers.purge("", key.digest())
        again = await client.post(CHAT, json=turn(name), headers=once())
        assert heard(again.text.split("\n\n")) == TEXT
        assert running.backend.opened == 2
        text = (await first).text
        assert '"code":"turn_in_progress"' in text
        assert '"finish_reason":"stop"' not in text
        assert "[DONE]" not in text


@pytest.mark.parametrize("headers", [{}, once()])
async def test_a_session_is_held_as_long_as_its_turn_takes(
    embedded: EmbeddedValkey, name: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.server.conversation.RENEWAL", 0.05)
    async with world(embedded, scripted.say(first=1.0)) as (running, client):
        running.app.state.sessions._lease = 300  # milliseconds
        first = asyncio.create_task(client.post(CHAT, json=turn(name), headers=headers))
        await asyncio.sleep(0.8)
        assert (await client.post(CHAT, json=turn(name, "two"))).status_code == 409
        assert (await first).status_code == 200
        assert await turns_of(running, name) == [(TEXT, "stop")]


async def test_a_known_answer_is_a_turn_too(embedded: EmbeddedValkey, name: str) -> None:
    """The two kinds of flight, one behind the other."""
    async with world(embedded, scripted.say(pause=0.05)) as (running, client):
        fields = {"temperature": 0, "messages": [{"role": "user", "content": name}]}
        both = [client.post(CHAT, json=turn(name + end, **fields), headers=once()) for end in ("a", "b", "b")]
        kinds = [response.headers["x-cache"] for response in await asyncio.gather(*both)]
        assert sorted(kinds) == ["coalesced", "coalesced", "miss"]
        known = await client.post(CHAT, json=turn(name + "c", **fields), headers=once())
        assert known.headers["x-cache"] == "hit"
        assert heard(known.text.split("\n\n")) == TEXT
        for end in "abc":
            assert await turns_of(running, name + end) == [(TEXT, "stop")]
        assert running.backend.opened == 1


async def test_at_the_end_of_the_server_what_was_said_is_kept(embedded: EmbeddedValkey, name: str) -> None:
    async with world(embedded, scripted.say(FOREVER, pause=0.02)) as (running, client):
        await broken(client, turn(name), once(), 3)
        await until(lambda: count(running, "forebay:cancelled_total") == 1)
    async with world(embedded, scripted.say()) as (running, client):
        (kept,) = await turns_of(running, name)
        assert kept[0].startswith("word ")
        assert kept[1] is None
        await client.post(CHAT, json=turn(name, "two"))
        assert running.backend.requests[-1].messages == says("one", kept[0], "two")
