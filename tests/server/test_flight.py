"""Single flight over HTTP: equal questions at once make one generation, and nobody's trouble is another's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ANSWER, ScriptedBackend, body, fail, say, served, until
from test_endings import CHAT, FOREVER, TEXT, count, raw_request, reset, stalled_stream, world

from forebay.admission.ask import Ask
from forebay.contract import DeadlineExceeded, Delta, EngineFailure, Usage
from forebay.server.flight import Flights, Member, merged
from forebay.server.formats import thinking_tokens
from forebay.server.source import Told

pytestmark = pytest.mark.anyio
GREEDY = body(temperature=0)
STREAM = body(temperature=0, stream=True)


def results(running: Any) -> dict[str, float]:
    kinds = ("hit", "coalesced", "miss", "bypass")
    return {kind: count(running, "forebay:answer_cache_total", result=kind) for kind in kinds}


def told(text: str) -> tuple[str, list[str]]:
    """What a stream said, and its finish reasons. Raises where a frame or the ending is not what it must be."""
    *frames, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames if frame != ": keep-alive"]
    assert [c["delta"].get("role") for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    finishes = [c["finish_reason"] for c in chunks if c["finish_reason"]]
    return "".join(c["delta"].get("content", "") for c in chunks), finishes


@pytest.mark.parametrize("same_bytes", [True, False])
async def test_a_hundred_equal_questions_are_one_generation(same_bytes: bool) -> None:
    """With the same bytes they are not even read a second time, and none is refused though the queue is short."""
    async with world(say(pause=0.05), capacity=1, max_queue=100 - 98 * same_bytes) as (running, client):
        sent = [STREAM if same_bytes else {**STREAM, "user": str(i)} for i in range(100)]
        first = asyncio.create_task(client.post(CHAT, json=sent[0], timeout=30))
        if same_bytes:
            await until(lambda: running.backend.opened == 1)
        answers = await asyncio.gather(first, *(client.post(CHAT, json=one, timeout=30) for one in sent[1:]))
        assert [answer.status_code for answer in answers] == [200] * 100
        assert [told(answer.text) for answer in answers] == [(TEXT, ["stop"])] * 100
        assert running.backend.opened == 1
        ids = {json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))["id"] for answer in answers}
        assert len(ids) == 100
        assert len(running.backend.requests) == (1 if same_bytes else 100)
        assert count(running, "vllm:generation_tokens_total") == len(ANSWER)
        assert count(running, "vllm:prompt_tokens_total") == 6
        assert count(running, "vllm:request_success_total", finished_reason="stop") == 100
        assert count(running, "vllm:time_to_first_token_seconds_count") == 100
        assert count(running, "vllm:inter_token_latency_seconds_count") == len(ANSWER) - 1
        seen = results(running)
        assert (seen["miss"], seen["bypass"], seen["hit"] + seen["coalesced"]) == (1, 0, 99)
        assert seen["coalesced"] > 0
        kinds = [answer.headers["x-cache"] for answer in answers]
        assert {kind: kinds.count(kind) for kind in seen} == seen


async def test_who_leaves_disturbs_nobody_and_the_last_one_cancels() -> None:
    async with world(say(FOREVER, pause=0.01)) as (running, _):
        pairs = [await raw_request(running, **{k: v for k, v in STREAM.items() if k != "model"}) for _ in range(3)]
        await until(lambda: results(running)["coalesced"] == 2)
        for reader, writer in pairs[:2]:  # the one that opened it first
            while b"word" not in await reader.readline():
                pass
            reset(writer)
        await until(lambda: count(running, "forebay:cancelled_total") == 2)
        reader, writer = pairs[2]
        for _ in range(40):
            assert (await reader.readline()) != b""
        assert running.backend.running == 1
        left = time.monotonic()
        reset(writer)
        await until(lambda: running.backend.running == 0)
        assert running.backend.left[-1] - left < 0.1
        await until(lambda: count(running, "forebay:cancelled_total") == 3)
        assert running.backend.opened == 1
        assert running.app.state.gate.waiting == 0
        # What was cut is not an answer.
        running.backend.script = say()
        async with httpx.AsyncClient(base_url=running.url) as client:
            response = await client.post(CHAT, json=GREEDY)
            assert (response.headers["x-cache"], response.status_code) == ("miss", 200)


async def test_the_last_one_leaves_the_queue_too() -> None:
    async with world(say(FOREVER, pause=0.05), capacity=1) as (running, _):
        _, first = await raw_request(running)
        await until(lambda: running.backend.running == 1)
        waiting = [await raw_request(running, temperature=0) for _ in range(2)]
        gate = running.app.state.gate
        await until(lambda: results(running)["coalesced"] == 1)
        assert gate.waiting == 1
        waiting[0][1].close()
        await until(lambda: count(running, "forebay:cancelled_total") == 1)
        assert gate.waiting == 1
        left = time.monotonic()
        waiting[1][1].close()
        assert await until(lambda: gate.waiting == 0) - left < 0.1
        first.close()
        await until(lambda: running.backend.running == 0)
        assert running.backend.opened == 1


async def test_one_that_comes_late_hears_all_from_the_beginning() -> None:
    async with world(say(pause=0.1)) as (running, client):
        first = asyncio.create_task(client.post(CHAT, json=STREAM))
        await until(lambda: count(running, "vllm:generation_tokens_total") >= 4)
        late = await client.post(CHAT, json=STREAM)
        assert late.headers["x-cache"] == "coalesced"
        assert told(late.text) == told((await first).text) == (TEXT, ["stop"])
        whole = await client.post(CHAT, json=GREEDY)
        assert whole.headers["x-cache"] == "hit"
        assert whole.json()["choices"][0]["message"]["content"] == TEXT
        usage = whole.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 7, 13)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 6
        assert running.backend.opened == 1


async def test_a_slow_reader_holds_nobody_up() -> None:
    big = ("x" * 65_536,) * 200
    async with world(say(big), reader_timeout=0.5) as (running, client), stalled_stream(running, temperature=0):
        await until(lambda: running.backend.opened == 1)
        response = await client.post(CHAT, json=STREAM, timeout=30)
        assert told(response.text) == ("".join(big), ["stop"])
        assert response.headers["x-cache"] in ("coalesced", "hit")
        await until(lambda: count(running, "forebay:cancelled_total") == 1)  # the slow one was cut, alone
        assert running.backend.opened == 1


async def test_a_members_deadline_is_its_own() -> None:
    async with world(say(pause=0.01), capacity=1, queue_timeout=0.5) as (running, client):
        running.backend.script = say(FOREVER, pause=0.05)
        _, blocker = await raw_request(running)
        await until(lambda: running.backend.running == 1)
        running.backend.script = say()
        early = asyncio.create_task(client.post(CHAT, json=STREAM))
        await asyncio.sleep(0.3)
        late = asyncio.create_task(client.post(CHAT, json=STREAM))
        refused = await early
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "deadline_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert running.app.state.gate.waiting == 1
        blocker.close()
        assert told((await late).text) == (TEXT, ["stop"])
        assert running.backend.opened == 2


async def test_the_backends_deadline_is_that_of_the_last() -> None:
    """The backend gives up at the deadline of those it knew of; who has come since is answered all the same."""
    plan = [fail(DeadlineExceeded("late"), pause=0.4), say()]

    async def play(request: Any, n_prompt: int) -> AsyncIterator[Delta]:
        async for delta in plan.pop(0)(request, n_prompt):
            yield delta

    async with world(play, queue_timeout=0.3) as (running, client):
        early = asyncio.create_task(client.post(CHAT, json=STREAM))
        await until(lambda: running.backend.opened == 1)
        await asyncio.sleep(0.2)
        late = asyncio.create_task(client.post(CHAT, json=STREAM))
        assert told((await late).text) == (TEXT, ["stop"])
        assert (await early).status_code in (200, 503)  # it may be just before its turn, or just behind
        assert running.backend.opened == 2
    plan = [fail(DeadlineExceeded("late"))]
    async with world(play) as (running, client):
        assert (await client.post(CHAT, json=STREAM)).status_code == 503
        assert running.backend.opened == 1


@pytest.mark.parametrize("after", [0, 2])
async def test_an_error_is_everyones_and_is_not_kept(after: int) -> None:
    async with world(fail(EngineFailure("broken"), after=after, pause=0.2)) as (running, client):
        responses = await asyncio.gather(*(client.post(CHAT, json=STREAM) for _ in range(5)))
        assert running.backend.opened == 1
        assert all('"code":"engine_failure"' in response.text for response in responses)
        assert {response.status_code for response in responses} == {200 if after else 500}
        assert not any("[DONE]" in response.text for response in responses)
        assert count(running, "forebay:request_errors_total", code="engine_failure") == 5
        running.backend.script = say()
        again = await client.post(CHAT, json=STREAM)
        assert (again.headers["x-cache"], told(again.text)) == ("miss", (TEXT, ["stop"]))


async def test_an_answer_that_breaks_off_is_an_error_and_not_kept() -> None:
    async with world(say(("a", "b"), finish=None)) as (running, client):
        for _ in range(2):
            assert "engine_failure" in (await client.post(CHAT, json=STREAM)).text
        assert running.backend.opened == 2


async def test_one_who_leaves_before_it_began_leaves_nothing_behind() -> None:
    class Watched(Told):
        closed = False

        async def close(self) -> None:
            self.closed = True

    source, flights = Watched(()), Flights[None]()
    member = Member(flights.begin(b"key", None, lambda _: source, lambda: DeadlineExceeded("late")), Ask(0.0))
    await member.close()
    assert source.closed
    assert flights.find(b"key") is None


async def test_a_generation_that_ends_is_left_in_peace() -> None:
    """All members have their last word and go, while the backend still tidies up."""

    class Tidy(ScriptedBackend):
        tidied = 0

        @asynccontextmanager
        async def open(self, *args: Any, **more: Any) -> AsyncIterator[AsyncIterator[Delta]]:
            async with super().open(*args, **more) as deltas:
                yield deltas
            await asyncio.sleep(0.2)
            self.tidied += 1

    backend = Tidy(say())
    async with served(backend) as running, httpx.AsyncClient(base_url=running.url) as client:
        assert told((await client.post(CHAT, json=STREAM)).text) == (TEXT, ["stop"])
        await until(lambda: not running.app.state.answers._flights._flying)
        assert backend.tidied == 1


async def test_law_8_at_the_end_of_the_drain_every_member_is_told() -> None:
    async with world(say(FOREVER, pause=0.05), capacity=2) as (running, client):
        asked = [asyncio.create_task(client.post(CHAT, json=STREAM, timeout=20)) for _ in range(3)]
        await until(lambda: results(running)["coalesced"] == 2)
        running.server.should_exit = True
        for one in asked:
            assert '"code":"engine_unavailable"' in (await one).text.strip().split("\n\n")[-1]
        assert running.backend.running == 0


async def test_law_1_every_member_has_one_ending() -> None:
    """Clients of three questions that leave when they like; each is counted once, and nothing is left of them."""
    kinds = [say(pause=0.02), say(first=0.05), fail(EngineFailure("x"), after=2, pause=0.02), say(FOREVER, pause=0.01)]
    async with world(say(), capacity=2, max_queue=6, queue_timeout=0.3) as (running, client):
        turns = iter(range(10_000))

        def mixed(request: Any, n_prompt: int) -> Any:
            return kinds[next(turns) % len(kinds)](request, n_prompt)

        running.backend.script = mixed
        sent = 0
        for round_ in range(6):
            pending = []
            for i in range(20):
                fields = body(temperature=0, stream=i % 2 == 0, seed=round_, max_tokens=5 + i % 3)
                pending.append(asyncio.wait_for(client.post(CHAT, json=fields), 0.05 + 0.02 * i))
            sent += len(await asyncio.gather(*pending, return_exceptions=True))
            running.app.state.answers.purge("")
        await until(lambda: running.backend.running == 0 and running.app.state.gate.waiting == 0)
        await until(lambda: not running.server.server_state.tasks)
        success = sum(count(running, "vllm:request_success_total", finished_reason=r) for r in ("stop", "length"))
        errors = count(running, "forebay:request_errors_total", code="engine_failure")
        rejected = sum(
            count(running, "vllm:admission_rejections_total", reason=r) for r in ("queue_full", "deadline_exceeded")
        )
        cancelled = count(running, "forebay:cancelled_total")
        assert min(success, errors, cancelled) > 0
        # Some left before their request was there.
        assert 0.9 * sent < success + errors + rejected + cancelled == sum(results(running).values()) <= sent
        assert running.backend.opened == len(running.backend.left) <= results(running)["miss"]
        assert not running.app.state.answers._flights._flying
        assert not running.app.state.answers._flights._listed


_deltas = st.builds(
    Delta,
    text=st.text(max_size=3),
    n_tokens=st.integers(0, 3),
    usage=st.builds(Usage, st.just(3), st.integers(0, 9)),
    started=st.just(1.0),
    finish=st.sampled_from([None, "stop"]),
    reasoning=st.text(max_size=3),
    ids=st.lists(st.integers(0, 9), max_size=2).map(tuple),
)


@settings(deadline=None)
@given(st.lists(_deltas, min_size=1, max_size=6), st.data())
def test_merging_loses_nothing_whatever_is_merged_first(deltas: list[Delta], data: Any) -> None:
    cut = data.draw(st.integers(0, len(deltas)))
    parts = [one for part in (deltas[:cut], deltas[cut:]) if part for one in merged(part)]
    whole = merged(deltas)
    assert merged(parts) == whole
    for field in ("text", "reasoning"):
        assert "".join(getattr(one, field) for one in whole) == "".join(getattr(one, field) for one in deltas)
    assert [id for one in whole for id in one.ids] == [id for one in deltas for id in one.ids]
    assert sum(one.n_tokens for one in whole) == sum(one.n_tokens for one in deltas)
    assert sum(map(thinking_tokens, whole)) == sum(map(thinking_tokens, deltas))
    assert (whole[-1].usage, whole[-1].finish) == (deltas[-1].usage, deltas[-1].finish)
    if not any(one.reasoning for one in deltas):
        assert len(whole) == 1
