"""Streams of /v1/responses that are come back to by the response's id. A scripted model, a real Valkey."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest
import scripted
from hypothesis import given
from hypothesis import strategies as st
from scripted import MODEL, Script, ScriptedBackend, Served, served, until
from test_responses import RESPONSES, asked, events, official
from test_running import once

from forebay.config import KeySettings
from forebay.contract import Delta, EngineFailure, GenRequest, Usage
from forebay.server.auth import key_digest
from forebay.server.flight import merged
from forebay.server.response_format import ResponseFormat
from forebay.state.embedded import EmbeddedValkey
from forebay.state.sessions import Turn

pytestmark = pytest.mark.anyio
PARTS = (("", ""), ("Hm", ""), (", hm.", ""), ("", ""), ("", "It "), ("", "is "), ("", "so"), ("", "."))
THOUGHT, SAID = ("".join(texts) for texts in zip(*PARTS, strict=True))


async def slowly(_request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
    for i, (reasoning, text) in enumerate(PARTS, 1):
        await asyncio.sleep(0.03)
        yield Delta(text, 1, Usage(n_prompt, i), time.monotonic(), "stop" if i == len(PARTS) else None, reasoning)


@asynccontextmanager
async def world(
    embedded: EmbeddedValkey, script: Script = slowly, **settings: Any
) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    async with (
        served(ScriptedBackend(script), state_url=embedded.url, **settings) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        yield running, client


async def broken(running: Served, key: str, count: int) -> tuple[str, list[dict[str, Any]]]:
    """A response's id, and so many of its first events; then the stream is dropped."""
    seen: list[dict[str, Any]] = []
    async with official(running) as client:
        created = client.responses.create(model=MODEL, input="one", stream=True, extra_headers=once(key))
        async with await created as stream:
            async for event in stream:
                seen.append(event.model_dump())
                if len(seen) == count:
                    break
    return seen[0]["response"]["id"], seen


def texts(told: list[dict[str, Any]]) -> tuple[str, str]:
    """Thinking and answer, as they were streamed."""

    def of(kind: str) -> str:
        return "".join(event["delta"] for event in told if event["type"] == f"response.{kind}.delta")

    return of("reasoning_text"), of("output_text")


def others(told: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """All events that have no piece of text."""
    return [(event["type"], event["sequence_number"]) for event in told if "delta" not in event]


@pytest.mark.parametrize("seen", range(1, 20, 2))
async def test_a_broken_stream_goes_on_behind_what_was_seen(embedded: EmbeddedValkey, seen: int) -> None:
    """While it runs, behind its end, and from the store: always the same events."""
    async with world(embedded) as (running, client), world(embedded) as (_, elsewhere):
        id, first = await broken(running, f"goes on {seen}", seen)
        last = first[-1]["sequence_number"]
        path = f"{RESPONSES}/{id}?stream=true"
        rest = [await client.get(f"{path}&starting_after={last}") for _ in range(2)]
        whole = [await client.get(path)]
        assert all(response.headers["x-cache"] == "coalesced" for response in (*rest, *whole))
        running.app.state.answers.turns._flights._listed.clear()  # as when the window is over
        for at in (client, elsewhere):
            rest.append(await at.get(f"{path}&starting_after={last}"))
            whole.append(await at.get(path))
        expected = others(events(whole[0].text))
        assert expected[-1][0] == "response.completed"
        for response in whole:
            assert texts(events(response.text)) == (THOUGHT, SAID)
            assert others(events(response.text)) == expected
        for response in rest:
            told = first + events(response.text, last)
            assert texts(told) == (THOUGHT, SAID)
            assert others(told) == expected
            assert response.headers["content-type"].startswith("text/event-stream")
        assert running.backend.opened == 1
        final = events(whole[-1].text)[-1]["response"]
        assert (await client.get(f"{RESPONSES}/{id}")).json() == final


async def test_the_official_client_goes_on(embedded: EmbeddedValkey) -> None:
    async with world(embedded) as (running, _), official(running) as client:
        id, first = await broken(running, "official", 6)
        last = first[-1]["sequence_number"]
        stream = await client.responses.retrieve(id, stream=True, starting_after=last)
        told = [event.model_dump() async for event in stream]
        assert texts(first + told) == (THOUGHT, SAID)
        async with client.responses.stream(response_id=id, starting_after=last) as again:
            seen = [event.sequence_number async for event in again]
            final = await again.get_final_response()
        assert (final.id, final.output_text, min(seen) > last) == (id, SAID, True)
        assert running.backend.opened == 1


async def test_all_that_read_one_response_have_the_same_numbers(embedded: EmbeddedValkey) -> None:
    """The one that opened it, one with the same key, and some that came by its id."""
    async with world(embedded) as (running, client):
        sent = asked(stream=True)
        first = asyncio.create_task(client.post(RESPONSES, json=sent, headers=once("all")))
        await until(lambda: running.backend.running == 1)
        second = asyncio.create_task(client.post(RESPONSES, json=sent, headers=once("all")))
        ((label, _),) = running.app.state.answers.turns._flights._listed.values()
        path = f"{RESPONSES}/resp_{label.begun.key.session[5:]}{label.begun.fence}?stream=true"
        responses = [await client.get(path), await client.get(path), await first, await second]
        told = [events(response.text) for response in responses]
        assert [others(one) for one in told] == [others(told[0])] * 4
        assert [texts(one) for one in told] == [(THOUGHT, SAID)] * 4
        assert len(told[1]) < len(told[2])  # it came late, and had few and long ones
        assert running.backend.opened == 1


async def test_a_stream_without_a_key_is_its_clients_own(embedded: EmbeddedValkey) -> None:
    """And one that another process runs is not there yet. When they are done they are told from the store."""
    async with world(embedded) as (_, client), world(embedded) as (_, elsewhere):
        for key, at in (("", client), ("", elsewhere), ("a key", elsewhere)):
            sent = {"idempotency-key": key} if key else {}
            async with client.stream("POST", RESPONSES, json=asked(stream=True), headers=sent) as response:
                rest = aiter(response.aiter_text())
                text = await anext(rest)
                id = events(text[: text.index("\n\n")])[0]["response"]["id"]
                refused = await at.get(f"{RESPONSES}/{id}?stream=true")
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "response_not_found")
                assert "when it is done" in refused.json()["error"]["message"]
                async for piece in rest:
                    text += piece
            told = events((await at.get(f"{RESPONSES}/{id}?stream=true")).text)
            assert others(told) == others(events(text))
            assert texts(told) == texts(events(text)) == (THOUGHT, SAID)


async def test_a_stream_is_a_users_own(embedded: EmbeddedValkey) -> None:
    hashes = {key: KeySettings(sha256=key_digest(key.encode()).hex(), tenant=key[0]) for key in ("a1", "a2", "b1")}
    async with (
        world(embedded, keys=hashes) as (running, _),
        official(running, "a1", "u") as mine,
        official(running, "a2", "u") as same,  # another key of the tenant, for the same user
        official(running, "a1", "v") as other_user,
        official(running, "a1") as no_user,
        official(running, "b1", "u") as other_tenant,
    ):
        stream = await mine.responses.create(model=MODEL, input="x", stream=True, extra_headers=once("own"))
        first = await anext(stream)
        assert first.type == "response.created"
        id = first.response.id
        for stranger in (other_user, no_user, other_tenant):
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.retrieve(id, stream=True)
        assert running.backend.running == 1
        for own in (mine, same):
            told = [event.model_dump() async for event in await own.responses.retrieve(id, stream=True)]
            assert texts(told) == (THOUGHT, SAID)
        await stream.close()


async def test_a_chats_turn_is_no_response(embedded: EmbeddedValkey) -> None:
    """Though the items of a conversation tell its id."""
    async with world(embedded) as (_, client):
        conversation = (await client.post("/v1/conversations")).json()["id"]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "session_id": conversation}
        assert (await client.post("/v1/chat/completions", json=chat, headers=once())).status_code == 200
        items = (await client.get(f"/v1/conversations/{conversation}/items")).json()["data"]
        answer = next(item for item in items if item["type"] == "message" and item["role"] == "assistant")
        id = f"resp_{conversation[5:]}{answer['id'].removeprefix('msg_')}"
        assert (await client.get(f"{RESPONSES}/{id}?stream=true")).status_code == 404


async def test_a_failure_is_told_to_who_came_back(embedded: EmbeddedValkey) -> None:
    async def fails(request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
        async for delta in slowly(request, n_prompt):
            if delta.finish is not None:
                raise EngineFailure("it broke")
            yield delta

    async with world(embedded, fails) as (running, client):
        id, first = await broken(running, "fails", 6)
        path = f"{RESPONSES}/{id}?stream=true&starting_after={first[-1]['sequence_number']}"
        told = events((await client.get(path)).text, first[-1]["sequence_number"])
        assert told[-1]["type"] == "response.failed"
        kept = events((await client.get(path)).text, first[-1]["sequence_number"])
        assert kept[-1]["type"] == "response.incomplete"
        for rest in (told, kept):
            assert texts(first + rest) == (THOUGHT, SAID.removesuffix("."))


async def test_what_has_no_text_is_not_sent_and_is_no_sign_of_life(embedded: EmbeddedValkey) -> None:
    script = scripted.say(("word", *[""] * 20), pause=0.03)
    async with world(embedded, script, keep_alive=0.1) as (_, client):
        text = (await client.post(RESPONSES, json=asked(stream=True))).text
        assert texts(events(text)) == ("", "word")
        assert sum("delta" in event for event in events(text)) == 1
        assert text.count(": keep-alive") >= 2


_text = st.text("ab\n\U0001f600", max_size=4)


@given(st.lists(_text, max_size=4), st.lists(_text, max_size=4), st.sampled_from(["stop", "length"]), st.data())
def test_wherever_a_stream_broke_the_rest_is_the_same(thought: list[str], said: list[str], end: Any, data: Any) -> None:
    """However its pieces were joined, for the one stream and for the other; and as the store has it."""
    parts = [*((text, "") for text in thought), *(("", text) for text in said), ("", "")]
    deltas = [
        Delta(text, 1, Usage(1, i), 0.0, end if i == len(parts) else None, reasoning)
        for i, (reasoning, text) in enumerate(parts, 1)
    ]
    turn = Turn(id="t", created=0, said=(), answer="".join(said), reasoning="".join(thought), finish=end)
    whole = Delta(turn.answer, len(parts), Usage(1, len(parts)), 0.0, end, turn.reasoning)

    def stream(after: int = -1) -> list[dict[str, Any]]:
        cut = data.draw(st.integers(0, len(deltas)))
        pieces = data.draw(st.sampled_from([deltas, [*merged(deltas[:cut] or deltas), *deltas[cut or len(deltas) :]]]))
        stored = data.draw(st.booleans())
        form = ResponseFormat("resp_t", {}, turn if stored else None, after)
        frames = form.opening(0)
        for delta in [whole] if stored else pieces:
            frames += form.delta(0, delta)
        frames += form.finish(0, end) + form.ending(Usage(1, len(parts)))
        told = [line for line in frames.decode().split("\n") if line.startswith("data: ")]
        return [msgspec.json.decode(line.removeprefix("data: ")) for line in told]

    seen = stream()
    upto = data.draw(st.integers(0, len(seen)))
    last = seen[upto - 1]["sequence_number"] if upto else -1
    rest = stream(last)
    assert texts(seen) == texts(seen[:upto] + rest) == ("".join(thought), "".join(said))
    assert others(seen) == others(seen[:upto] + rest)
    numbers = [event["sequence_number"] for event in seen[:upto] + rest]
    assert numbers == sorted(set(numbers))
