"""The answer cache: what is given again, to whom, and for how long."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from product import metrics, product
from scripted import ANSWER, MODEL, ScriptedBackend, Served, body, say, served, until
from test_endings import CHAT, FOREVER, TEXT, count, raw_request, world
from test_flight import GREEDY, STREAM, results, told

from forebay.admission.ask import Ask
from forebay.cli import main
from forebay.config import AnswerSettings, KeySettings
from forebay.contract import Delta, GenRequest, Prepared, Resume, TokenLogprob, Usage
from forebay.server.answers import Answers, Shortcut
from forebay.server.running import Owner, RunningTurns
from forebay.state.embedded import EmbeddedValkey
from forebay.state.sessions import SessionKey

pytestmark = pytest.mark.anyio
COMPLETION = "/v1/completions"
ON, OFF = {"x-forebay-cache": "on"}, {"x-forebay-cache": "off"}


async def kind(client: httpx.AsyncClient, fields: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    response = await client.post(COMPLETION if "prompt" in fields else CHAT, json=fields, headers=headers)
    assert response.status_code == 200, response.text
    return response.headers["x-cache"]


# Which requests


@pytest.mark.parametrize(
    ("fields", "headers", "first", "second"),
    [
        ({"temperature": 0}, {}, "miss", "hit"),
        ({"temperature": 0}, ON, "miss", "hit"),
        ({"temperature": 0}, OFF, "bypass", "bypass"),
        ({"temperature": 1, "seed": 5}, {}, "miss", "hit"),
        ({"temperature": 1, "seed": 5}, OFF, "bypass", "bypass"),
        ({"temperature": 1}, {}, "bypass", "bypass"),
        ({}, {}, "bypass", "bypass"),
        ({"temperature": 1}, ON, "miss", "hit"),
        ({"temperature": 0, "n": 2}, {}, "bypass", "bypass"),
        ({"temperature": 0, "n": 2}, ON, "bypass", "bypass"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_shared(
    fields: dict[str, Any], headers: dict[str, str], first: str, second: str, stream: bool
) -> None:
    async with world(say()) as (running, client):
        assert await kind(client, body(stream=stream, **fields), headers) == first
        assert await kind(client, body(stream=stream, **fields), headers) == second
        assert running.backend.opened == (1 if second == "hit" else 2 * fields.get("n", 1))
        assert sum(results(running).values()) == 2


async def test_several_prompts_are_not_shared_and_one_is() -> None:
    async with world(say()) as (_, client):
        fields = {"model": MODEL, "temperature": 0}
        assert [await kind(client, fields | {"prompt": ["a", "b"]}) for _ in range(2)] == ["bypass"] * 2
        assert [await kind(client, fields | {"prompt": ["a"]}) for _ in range(2)] == ["miss", "hit"]


async def test_the_bytes_of_several_answers_never_lead_to_one() -> None:
    async with world(say()) as (_, client):
        two = {**GREEDY, "n": 2}
        assert [await kind(client, fields) for fields in (two, GREEDY, two)] == ["bypass", "miss", "bypass"]


async def test_an_opt_in_fixes_the_seed_and_nothing_else_does() -> None:
    async with world(say()) as (running, client):
        for headers in ({}, ON, OFF):
            await client.post(CHAT, json=body(temperature=1, stop=["x"]), headers=headers)
        assert [request.seed for request in running.backend.requests] == [None, 0, None]


async def test_what_changes_the_answer_is_another_question() -> None:
    async with world(say()) as (_, client):
        for more in ({}, {"max_tokens": 5}, {"stop": ["x"]}, {"seed": 7}, {"top_p": 0.5}, {"logprobs": True}):
            assert await kind(client, {**GREEDY, **more}) == "miss"
        # What changes only how it is told is none.
        for more in ({"stream": True}, {"user": "u"}, {"stream": True, "stream_options": {"include_usage": True}}):
            assert await kind(client, {**GREEDY, **more}) == "hit"
        text = {"model": MODEL, "prompt": "a b", "temperature": 0}
        assert [await kind(client, text | {"echo": echo}) for echo in (False, True, True)] == ["miss", "hit", "hit"]
        plain, echo = [(await client.post(COMPLETION, json=text | {"echo": e})).json() for e in (False, True)]
        assert echo["choices"][0]["text"] == "a b" + plain["choices"][0]["text"] == "a b" + TEXT


@pytest.mark.parametrize("value", ["", "ON", "yes", "on, off"])
@pytest.mark.parametrize("padding", [0, 100_000])
async def test_other_values_of_the_header_are_refused(client: httpx.AsyncClient, value: str, padding: int) -> None:
    fields = body(messages=[{"role": "user", "content": "x" * padding}])
    response = await client.post(CHAT, json=fields, headers={"x-forebay-cache": value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-forebay-cache")


async def test_the_cache_can_be_off() -> None:
    async with world(say(), answers=AnswerSettings(answer_cache=0)) as (running, client):
        assert [await kind(client, GREEDY, ON) for _ in range(2)] == ["bypass"] * 2
        assert running.backend.opened == 2
        refused = await client.post(CHAT, json=GREEDY, headers={"x-forebay-cache": "x"})
        assert refused.status_code == 400


async def test_the_whole_answer_is_given_again_with_its_parts() -> None:
    known = (TokenLogprob(b"a", -0.5, ((b"a", -0.5), (b"b", -1.0)), 0), TokenLogprob(b"b", -0.1, ((b"b", -0.1),), 1))
    usages = [Usage(6, 1), Usage(6, 2)]

    async def play(*_: Any) -> AsyncIterator[Delta]:
        yield Delta("a", 1, usages[0], 0.0, None, "hm ", known[:1])
        yield Delta("b", 1, usages[1], 0.0, "length", "", known[1:])

    async with world(play) as (_, client):
        fields = {**GREEDY, "logprobs": True, "top_logprobs": 2}
        first, second = [(await client.post(CHAT, json=fields)).json() for _ in range(2)]
        assert first["choices"] == second["choices"]
        assert first["id"] != second["id"]
        assert second["choices"][0]["message"]["reasoning_content"] == "hm "
        assert len(second["choices"][0]["logprobs"]["content"]) == 2
        streamed = await client.post(CHAT, json={**fields, "stream": True, "stream_options": {"include_usage": True}})
        assert streamed.headers["x-cache"] == "hit"
        assert '"cached_tokens":6' in streamed.text
        assert '"finish_reason":"length"' in streamed.text


# By the bytes of the body


async def test_the_same_bytes_are_not_read_twice() -> None:
    async with world(say()) as (running, client):
        for fields in (GREEDY, STREAM):
            asked = [await client.post(CHAT, json=fields) for _ in range(3)]
            prepared = len(running.backend.requests)
            again = await client.post(CHAT, json=fields)
            assert len(running.backend.requests) == prepared
            assert again.headers["x-cache"] == "hit"
            if fields is STREAM:
                assert told(again.text) == told(asked[0].text) == (TEXT, ["stop"])
            else:
                assert again.json()["choices"] == asked[0].json()["choices"]
        assert prepared == 2  # once for each of the two
        # The header and the path are of it, as is each byte.
        assert [await kind(client, body(temperature=1), headers) for headers in (ON, {}, ON)] == [
            "miss",
            "bypass",
            "hit",
        ]
        assert await kind(client, GREEDY, OFF) == "bypass"
        assert (await client.post(COMPLETION, json=GREEDY)).status_code == 400
        assert await kind(client, {**GREEDY, "seed": 3}) == "miss"
        assert running.backend.opened == 5


@pytest.mark.parametrize("fields", [GREEDY, STREAM])
async def test_a_known_answer_is_given_where_nobody_is_let_in(fields: dict[str, Any]) -> None:
    async with world(say(), capacity=1, max_queue=1) as (running, client):
        assert await kind(client, fields) == "miss"
        running.backend.script = say(FOREVER, pause=0.05)
        writers = [(await raw_request(running, stream=True))[1] for _ in range(2)]
        await until(lambda: running.app.state.gate.waiting == 1)
        assert await kind(client, fields) == "hit"
        prepared = len(running.backend.requests)
        unknown = await client.post(CHAT, json={**fields, "seed": 1})
        assert len(running.backend.requests) == prepared
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "queue_full")
        assert count(running, "vllm:admission_rejections_total", reason="queue_full") == 1
        # One that is being answered too: it takes no place.
        running.backend.ready, running.backend.state = False, "restarting"
        assert await kind(client, fields) == "hit"
        large = {**fields, "messages": [{"role": "user", "content": "x" * 70_000}]}
        assert (await client.post(CHAT, json=large)).json()["error"]["code"] == "engine_unavailable"
        running.app.state.draining = True
        assert (await client.post(CHAT, json=fields)).json()["error"]["code"] == "engine_unavailable"
        for writer in writers:
            writer.close()
        await until(lambda: running.backend.running == 0)


async def test_a_large_body_is_refused_before_it_is_read() -> None:
    async with world(say()) as (running, _):
        running.backend.ready = False
        for size, refused in ((2**16, False), (2**16 + 1, True)):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode())
            try:
                async with asyncio.timeout(0.5):
                    assert b" 503 " in await reader.readline()
                    assert refused
            except TimeoutError:
                assert not refused
            writer.close()


# Whose


@asynccontextmanager
async def tenants() -> AsyncIterator[tuple[Served, list[httpx.AsyncClient]]]:
    """Two keys of one tenant, and one of another."""
    keys = {
        name: KeySettings(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=tenant)
        for name, tenant in (("one", "a"), ("two", "a"), ("three", "b"))
    }
    async with served(ScriptedBackend(), keys=keys) as running:
        clients = [
            httpx.AsyncClient(base_url=running.url, headers={"authorization": f"Bearer {name}"}) for name in keys
        ]
        yield running, clients
        for client in clients:
            await client.aclose()


async def test_an_answer_is_never_another_tenants() -> None:
    async with tenants() as (running, (one, two, three)):
        for fields in (GREEDY, {**GREEDY, "user": "other bytes"}):
            kinds = [await kind(client, fields) for client in (one, two, three, three)]
            assert kinds == (["miss", "hit", "miss", "hit"] if fields is GREEDY else ["hit"] * 4)
        assert running.backend.opened == 2
        # Nor while it is made.
        running.backend.script = say(pause=0.05)
        late = {**GREEDY, "seed": 9}
        kinds = await asyncio.gather(*(kind(client, late) for client in (one, two, three)))
        assert sorted(kinds) == ["coalesced", "miss", "miss"]
        assert running.backend.opened == 4


async def test_a_purge_is_of_ones_own_tenant() -> None:
    async with tenants() as (running, (one, two, three)):
        for client in (one, three):
            for seed in (1, 2):
                await kind(client, {**GREEDY, "seed": seed})
        assert (await two.delete("/v1/cache")).json() == {"purged": 2}
        assert (await two.delete("/v1/cache")).json() == {"purged": 0}
        assert await kind(one, {**GREEDY, "seed": 1}) == "miss"
        assert await kind(three, {**GREEDY, "seed": 1}) == "hit"
        async with httpx.AsyncClient(base_url=running.url) as nobody:
            assert (await nobody.delete("/v1/cache")).status_code == 401


async def test_the_command_line_purges() -> None:
    async with tenants() as (running, (one, _, three)):
        assert [await kind(client, GREEDY) for client in (one, three)] == ["miss"] * 2
        args = ["cache", "purge", "--url", running.url]
        for key, code, said in (("one", 0, "1 answers forgotten"), ("x", 2, "authentication_error")):
            result = await asyncio.to_thread(CliRunner().invoke, main, [*args, "--api-key", key])
            assert (result.exit_code, said in result.output) == (code, True), result.output
        assert [await kind(client, GREEDY) for client in (one, three)] == ["miss", "hit"]


async def test_what_is_made_during_a_purge_is_told_and_forgotten() -> None:
    async with world(say(pause=0.05)) as (running, client):
        first = asyncio.create_task(client.post(CHAT, json=STREAM))
        await until(lambda: count(running, "vllm:generation_tokens_total") >= 2)
        assert (await client.delete("/v1/cache")).json() == {"purged": 0}
        assert told((await first).text) == (TEXT, ["stop"])
        assert await kind(client, STREAM) == "miss"
        # Nor is it joined any more.
        first = asyncio.create_task(client.post(CHAT, json={**STREAM, "seed": 1}))
        await until(lambda: running.backend.running == 1)
        await client.delete("/v1/cache")
        assert await kind(client, {**STREAM, "seed": 1}) == "miss"
        assert told((await first).text) == (TEXT, ["stop"])
        assert running.backend.opened == 4


# Conversations


async def test_a_turn_that_is_known_is_kept_as_any(embedded: EmbeddedValkey) -> None:
    async with (
        served(ScriptedBackend(), state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        for name, expected in (("answers a", "miss"), ("answers b", "hit")):
            response = await client.post(CHAT, json={**GREEDY, "session_id": name})
            assert (response.headers["x-cache"], response.headers["x-session-id"]) == (expected, name)
        assert running.backend.opened == 1
        for name in ("answers a", "answers b"):
            await client.post(CHAT, json=body(messages=[{"role": "user", "content": "more"}], session_id=name))
            texts = [message.content for message in running.backend.requests[-1].messages]
            assert texts == ["What is the capital of France?", TEXT, "more"]
        # The very same bytes are the next turn, not the last one again.
        assert await kind(client, GREEDY) == "hit"
        before = len(running.backend.requests)
        await client.post(CHAT, json={**GREEDY, "session_id": "answers a"})
        assert len(running.backend.requests[-1].messages) == 5
        response = await client.post(CHAT, json=GREEDY, headers={"x-session-id": "answers b"})
        assert len(running.backend.requests[-1].messages) == 5
        assert len(running.backend.requests) == before + 2


async def test_a_conversations_answers_can_be_purged(embedded: EmbeddedValkey) -> None:
    async with (
        served(ScriptedBackend(), state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        await kind(client, {**GREEDY, "session_id": "purged", "user": "u"})
        await kind(client, {**GREEDY, "seed": 4})
        answers: Answers = running.app.state.answers
        assert answers.purge("", SessionKey("", "u", "another").digest()) == 0
        assert answers.purge("", SessionKey("", "u", "purged").digest()) == 1
        assert await kind(client, {**GREEDY, "session_id": "new"}) == "miss"
        assert await kind(client, {**GREEDY, "seed": 4}) == "hit"


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_is_prepared_while_its_conversation_is_deleted_is_not_kept(
    embedded: EmbeddedValkey, leaves: bool
) -> None:
    """Nobody knows yet of the answer when the conversation's answers are forgotten. Also where its client leaves, and
    it is told to another only."""

    class Slow(ScriptedBackend):
        go = asyncio.Event()

        async def prepare(self, request: GenRequest, resume: Resume | None = None) -> Prepared:
            prepared = await super().prepare(request, resume)
            await self.go.wait()
            return prepared

    backend = Slow(say(first=0.3))
    async with (
        served(backend, state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        asking = asyncio.create_task(client.post(CHAT, json={**GREEDY, "session_id": "deleted"}))
        await until(lambda: len(backend.requests) == 1)
        assert (await client.delete("/v1/sessions/deleted")).status_code == 200
        backend.go.set()
        if leaves:
            await until(lambda: backend.running == 1)
            other = asyncio.create_task(kind(client, GREEDY))
            await until(lambda: results(running)["coalesced"] == 1)
            asking.cancel()
            await until(lambda: count(running, "forebay:cancelled_total") == 1)
            assert await other == "coalesced"
        else:
            assert (await asking).status_code == 409
        # And its KV: what the store had of it, which was nothing, and what was said and is not kept.
        await until(lambda: len(backend.forgotten) == 2)
        (_, before), (_, lost) = backend.forgotten
        assert before.turns == ()
        assert [read for read, _ in lost.turns] == [b"1"]
        assert await kind(client, {**GREEDY, "session_id": f"after {leaves}"}) == "miss"
        assert await kind(client, GREEDY) == "hit"


# How much, and for how long


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def whole(text: str = "x", **fields: Any) -> tuple[Delta, ...]:
    return (Delta(text, 1, Usage(5, 1), 0.0, "stop", **fields),)


async def form() -> Any:
    raise AssertionError("not asked for")


async def test_answers_age() -> None:
    """From when they were made; that they are asked for makes them no younger."""
    async with world(say(), answers=AnswerSettings(answer_ttl=0.5)) as (running, client):
        clock = Clock()
        running.app.state.answers._clock = clock
        assert await kind(client, GREEDY) == "miss"
        for now, expected in ((100.4, "hit"), (100.6, "miss"), (101.0, "hit"), (101.2, "miss")):
            clock.now = now
            assert await kind(client, GREEDY) == expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("akpg"), st.integers(0, 7), st.integers(0, 3000)), max_size=60))
def test_bytes_are_bounded_and_counted(steps: list[tuple[str, int, int]]) -> None:
    """Random histories against a list: the bytes are those of what is there, and the longest unused goes first."""
    limit = 12_000
    answers = Answers(limit, 50.0, RunningTurns(0), clock := Clock())
    model: dict[bytes, tuple[int, float, bool, str]] = {}  # the longest unused first; what is too old is still there
    for what, number, size in steps:
        clock.now += 5
        tenant = "ab"[number % 2]
        key = bytes([number]) * 32 + what.encode()
        match what:
            case "a":  # as a flight does at its end
                answers._put(key, entry := answers._entry(Owner(tenant), whole("x" * size)))
                model.pop(key, None)
                model[key] = (entry.size, clock.now + 50, True, tenant)
            case "k":
                answers.remember(key, Owner(tenant), Shortcut(b"", form, False), size)
                model.pop(key, None)
                model[key] = (size + 1024, clock.now + 50, False, tenant)
            case "p":
                gone = [k for k, v in model.items() if v[3] == tenant]
                assert answers.purge(tenant) == sum(model[k][2] for k in gone)
                for k in gone:
                    del model[k]
            case "g":
                stale = size % 2 == 0
                for part in "ak":
                    wanted = bytes([number]) * 32 + part.encode()
                    known = model.get(wanted)
                    there = known is not None and known[1] + 150 > clock.now
                    alive = known is not None and known[1] > clock.now
                    found = answers.find(wanted, Ask(0.0), stale=stale) or answers.known(wanted, stale=stale)
                    assert (found is not None) == (alive or (there and stale))
                    if isinstance(found, tuple):
                        assert found[1] == ("hit" if alive else "stale")
                    if known is not None and not there:
                        del model[wanted]
                    elif known is not None and found is not None:
                        del model[wanted]
                        model[wanted] = known
        while sum(v[0] for v in model.values()) > limit:
            del model[next(iter(model))]
        assert answers.bytes == sum(v[0] for v in model.values()) <= limit
        assert list(answers._entries) == list(model)


def test_what_is_larger_than_all_of_it_pushes_nothing_out() -> None:
    answers = Answers(5000, 50.0, RunningTurns(0))
    answers.remember(b"a", Owner(""), Shortcut(b"", form, False), 100)
    answers.remember(b"b", Owner(""), Shortcut(b"", form, False), 5000)
    assert answers.known(b"a")
    assert answers.known(b"b") is None


def test_log_probabilities_count() -> None:
    top = tuple((b"x", -1.0) for _ in range(20))
    entries = tuple(TokenLogprob(b"x", -1.0, top, i) for i in range(100))
    answers = Answers(2**30, 50.0, RunningTurns(0))
    assert answers._entry(Owner(""), whole(logprobs=entries)).size > 100 * 20 * 150


async def test_the_metrics_tell_of_the_cache() -> None:
    async with world(say()) as (running, client):
        await client.post(CHAT, json=GREEDY)
        text = (await client.get("/metrics")).text
        assert 'forebay:answer_cache_total{result="miss"} 1.0' in text
        assert 'forebay:answer_cache_total{result="hit"} 0.0' in text
        assert f"forebay:answer_cache_bytes {float(running.app.state.answers.bytes)}" in text
        assert running.app.state.answers.bytes > len(json.dumps(GREEDY))
        for _ in range(3):
            await client.post(CHAT, json=GREEDY)
        assert count(running, "vllm:generation_tokens_total") == len(ANSWER)
        assert count(running, "vllm:request_success_total", finished_reason="stop") == 4
        assert count(running, "vllm:e2e_request_latency_seconds_count") == 4
        assert count(running, "vllm:request_queue_time_seconds_count") == 1
        assert results(running) == {"hit": 3, "coalesced": 0, "miss": 1, "bypass": 0}


async def test_with_the_engine(tiny_folder: Path, tmp_path: Path) -> None:
    """Greedy, and drawn with a seed: what is told again is what is computed, and nothing is computed for it."""
    options = ["--kv-memory", "32MiB", "--threads", "1", "--answer-cache", "8MiB"]
    with product(str(tiny_folder), tmp_path, *options) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            for more in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
                fields = {**body(max_tokens=24, ignore_eos=True, **more), "model": "tiny-chat"}
                same = await asyncio.gather(*(client.post(CHAT, json={**fields, "user": str(i)}) for i in range(8)))
                kinds = [response.headers["x-cache"] for response in same]
                assert (kinds.count("miss"), kinds.count("bypass")) == (1, 0)
                computed = metrics((await client.get("/metrics")).text)["vllm:iteration_tokens_total_sum"]
                hits = [await client.post(CHAT, json=fields) for _ in range(2)]
                assert [hit.headers["x-cache"] for hit in hits] == ["hit"] * 2
                after = metrics((await client.get("/metrics")).text)
                assert after["vllm:iteration_tokens_total_sum"] == computed
                anew = await client.post(CHAT, json=fields, headers=OFF)
                answers = [response.json()["choices"] for response in (*same, *hits, anew)]
                assert answers == [answers[0]] * 11
            assert after["vllm:generation_tokens_total"] == 24 * 3  # two questions, and the first one anew
