"""Conversations over HTTP: a turn sends only what is new. A scripted model, a real Valkey."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
import scripted
from scripted import MODEL, ScriptedBackend, Served, served, until

from forebay.contract import Delta, EngineFailure, GenRequest, Message, Prepared, Resume
from forebay.server.conversation import Conversation
from forebay.state.embedded import EmbeddedValkey
from forebay.state.sessions import Begun, History, SessionKey, Sessions, Turn

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


@pytest.fixture
async def server(embedded: EmbeddedValkey) -> AsyncIterator[Served]:
    async with served(ScriptedBackend(), state_url=embedded.url) as running:
        yield running


_names = (f"session {number}" for number in range(10**6))


@pytest.fixture
def name() -> str:
    return next(_names)


def turn(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


ANSWER = "".join(scripted.ANSWER)


def says(*texts: str) -> tuple[Message, ...]:
    return tuple(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts))


async def test_a_turn_sends_only_what_is_new(server: Served, http: httpx.AsyncClient, name: str) -> None:
    first = await http.post(CHAT, json=turn("one", session_id=name))
    second = await http.post(CHAT, json=turn("two"), headers={"x-session-id": name})
    streamed = await http.post(CHAT, json=turn("three", session_id=name, stream=True))
    for response in (first, second, streamed):
        assert response.status_code == 200
        assert response.headers["x-session-id"] == name
        assert response.headers["x-session-dropped-turns"] == "0"
    assert streamed.text.endswith("data: [DONE]\n\n")
    await http.post(CHAT, json=turn("four", session_id=name))
    assert server.backend.requests[-1].messages == says("one", ANSWER, "two", ANSWER, "three", ANSWER, "four")
    await http.post(CHAT, json=turn("alone"))
    assert server.backend.requests[-1].messages == says("alone")


async def test_the_official_client_holds_a_conversation(server: Served, name: str) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        for text in ("one", "two"):
            answer = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": text}], extra_body={"session_id": name}
            )
        assert answer.choices[0].message.content == ANSWER
    assert server.backend.requests[-1].messages == says("one", ANSWER, "two")


async def test_sessions_are_a_users_own(server: Served, http: httpx.AsyncClient, name: str) -> None:
    await http.post(CHAT, json=turn("mine", session_id=name, user="a"))
    for fields, headers in (({"user": "b"}, {}), ({}, {}), ({"user": "a"}, {"x-user-id": "c"}), ({"user": "A"}, {})):
        await http.post(CHAT, json=turn("new", session_id=name, **fields), headers=headers)
        assert server.backend.requests[-1].messages == says("new")
    await http.post(CHAT, json=turn("more", session_id=name), headers={"x-user-id": "a"})
    assert server.backend.requests[-1].messages == says("mine", ANSWER, "more")


async def test_one_turn_at_a_time_over_two_servers(embedded: EmbeddedValkey, name: str) -> None:
    """Twenty at once: some are answered, one after the other, and the rest told to try again."""

    async def ask(url: str, text: str) -> httpx.Response:
        """On a machine with much to do the store may take too long. Then nobody knows whether it was a turn, until the
        same key has its answer."""
        once, unknown = {"idempotency-key": text}, False
        async with asyncio.timeout(30):
            while True:
                response = await client.post(url, json=turn(text, session_id=name), headers=once)
                unknown = unknown or response.status_code == 503
                if response.status_code == 200 or not unknown:
                    return response
                await asyncio.sleep(0.1)

    slow = scripted.say(pause=0.02)
    async with (
        served(ScriptedBackend(slow, capacity=20), state_url=embedded.url) as one,
        served(ScriptedBackend(slow, capacity=20), state_url=embedded.url) as two,
        httpx.AsyncClient(timeout=30) as client,
    ):
        urls = [(one, two)[i % 2].url + CHAT for i in range(20)]
        responses = await asyncio.gather(*(ask(url, str(i)) for i, url in enumerate(urls)))
        done = [i for i, response in enumerate(responses) if response.status_code == 200]
        refused = [response for response in responses if response.status_code == 409]
        assert len(done) + len(refused) == 20
        assert done
        assert refused
        for response in refused:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "turn_in_progress"
        # Turn 1 on one server, turn 2 on the other.
        for number, url in enumerate(urls[:2]):
            assert (await ask(url, f"last {number}")).status_code == 200
        messages = two.backend.requests[-1].messages
        users = [m.content for m in messages if m.role == "user"]
        assert sorted(users[:-2], key=int) == sorted(map(str, done), key=int)
        assert users[-2:] == ["last 0", "last 1"]
        assert [m.role for m in messages] == ["user", "assistant"] * (len(done) + 1) + ["user"]


async def test_an_idempotent_retry_is_the_same_turn(server: Served, http: httpx.AsyncClient, name: str) -> None:
    sent, once = turn("one", session_id=name), {"idempotency-key": "k 1"}
    first = await http.post(CHAT, json=sent, headers=once)
    for stream in (False, True):
        again = await http.post(CHAT, json=sent | {"stream": stream}, headers=once)
        assert again.status_code == 200
        assert again.headers["x-idempotent-replay"] == "true"
        if stream:
            chunks = [json.loads(line[6:]) for line in again.text.splitlines() if line.startswith("data: {")]
            assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == ANSWER
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            assert again.json()["choices"] == first.json()["choices"]
    assert server.backend.opened == 1
    await http.post(CHAT, json=turn("two", session_id=name), headers={"idempotency-key": "k 2"})
    assert server.backend.requests[-1].messages == says("one", ANSWER, "two")


async def test_a_turn_is_told_what_the_ones_before_read_and_wrote(
    server: Served, http: httpx.AsyncClient, name: str
) -> None:
    wrote = tuple(range(1, len(scripted.ANSWER) + 1))
    for number, stream in enumerate([False, True, False]):
        fields = turn(f"{number}", session_id=name, stream=stream)
        fields["messages"].insert(0, {"role": "system", "content": "be kind"})
        response = await http.post(CHAT, json=fields, headers={"idempotency-key": str(number)})
        assert response.status_code == 200
    assert (await http.post(CHAT, json=fields, headers={"idempotency-key": "2"})).status_code == 200  # no turn
    assert server.backend.resumes == [
        Resume(),
        Resume(3, ((b"1", wrote),)),
        Resume(6, ((b"1", wrote), (b"2", wrote))),
    ]
    await http.post(CHAT, json=turn("alone"))
    assert server.backend.resumes[-1] is None


@pytest.mark.parametrize(("dropped", "resume"), [(0, Resume(4, ((b"1", (1,)), (b"2", (2,))))), (1, Resume())])
async def test_what_was_read_is_of_no_use_when_the_store_has_dropped_a_part_of_it(dropped: int, resume: Resume) -> None:
    turns = (
        Turn(id="1", created=0, said=says("one"), answer="a", read=b"1", wrote=(1,)),
        Turn(id="2", created=0, said=says("two"), answer="b", read=b"2", wrote=(2,)),
    )
    begun = Begun(SessionKey("", "u", "s"), "fence", History(turns, dropped))
    conversation = Conversation(cast(Any, None), begun, says("three"))
    heard = []

    async def prepare(messages: tuple[Message, ...], known: Resume) -> Prepared:
        heard.append(known)
        assert messages == says("one", "a", "two", "b", "three")
        return Prepared(1, b"", None)

    await conversation.fit(prepare, prepare, 100)
    assert heard == [resume]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_cut_is_kept_as_far_as_it_came(
    embedded: EmbeddedValkey, name: str, stream: bool
) -> None:
    backend = ScriptedBackend(scripted.say(("half ", "of ", "it"), pause=0.4))
    async with (
        served(backend, state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await client.post(CHAT, json=turn("one", session_id=name, stream=stream))
        await until(lambda: backend.running == 0 and not running.server.server_state.tasks)
        assert (await client.post(CHAT, json=turn("two", session_id=name))).status_code == 200
        assert backend.requests[-1].messages == says("one", "half of ", "two")
        assert backend.resumes[-1] == Resume(2, ((b"1", (1, 2)),))


async def test_a_turn_that_fails_before_its_first_token_was_none(embedded: EmbeddedValkey, name: str) -> None:
    plan = [
        scripted.say(),
        scripted.fail(EngineFailure("x")),
        scripted.fail(EngineFailure("x"), after=1),
        scripted.say(),
    ]

    async def play(request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
        async for delta in plan.pop(0)(request, n_prompt):
            yield delta

    backend = ScriptedBackend(play)
    async with (
        served(backend, state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        statuses = [
            (await client.post(CHAT, json=turn(text, session_id=name))).status_code
            for text in ("one", "two", "three", "four")
        ]
        assert statuses == [200, 500, 500, 200]
        assert backend.requests[-1].messages == says("one", ANSWER, "three", "word ", "four")


@pytest.mark.parametrize("once", [{}, {"idempotency-key": "k"}])
@pytest.mark.parametrize(("stream", "hold"), [(False, 10.0), (True, 10.0), (True, 0.0)])
async def test_who_is_told_of_a_failure_finds_the_session_free(
    embedded: EmbeddedValkey,
    name: str,
    stream: bool,
    hold: float,
    once: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it takes to give the session back."""
    abort = Sessions.abort

    async def slow(self: Sessions, begun: Begun) -> bool:
        await asyncio.sleep(0.2)
        return await abort(self, begun)

    monkeypatch.setattr(Sessions, "abort", slow)
    backend = ScriptedBackend(scripted.fail(EngineFailure("x"), pause=0.1))
    async with (
        served(backend, state_url=embedded.url, stream_hold=hold) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        async with client.stream("POST", CHAT, json=turn("one", session_id=name, stream=stream), headers=once) as told:
            async for piece in told.aiter_text():
                if "engine_failure" in piece:
                    break
            assert told.status_code == (500 if hold else 200)
            backend.script = scripted.say()
            assert (await client.post(CHAT, json=turn("two", session_id=name))).status_code == 200
        assert backend.requests[-1].messages == says("two")


@pytest.mark.parametrize("stream", [True, False])
async def test_what_could_not_be_kept_is_not_told_as_done(embedded: EmbeddedValkey, name: str, stream: bool) -> None:
    """The conversation is deleted while a turn is answered."""
    backend = ScriptedBackend(scripted.say(pause=0.05))
    async with (
        served(backend, state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        sent = client.post(CHAT, json=turn("one", session_id=name, user="u", stream=stream))
        asking = asyncio.create_task(sent)
        await until(lambda: backend.running == 1)
        await running.app.state.sessions.delete(SessionKey("", "u", name))
        response = await asking
        if stream:
            assert '"code":"turn_in_progress"' in response.text
            assert "[DONE]" not in response.text
        else:
            assert response.status_code == 409
        assert (await client.post(CHAT, json=turn("two", session_id=name, user="u"))).status_code == 200
        assert backend.requests[-1].messages == says("two")


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"session_id": "a", "n": 2}, {}, "n"),
        ({"session_id": "a"}, {"x-session-id": "b"}, "session_id"),
        ({"session_id": ""}, {}, "session_id"),
        ({"session_id": 5}, {}, "session_id"),
        ({"session_id": "x" * 257}, {}, "session_id"),
        ({}, {"x-session-id": "x" * 257}, "x-session-id"),
        ({"session_id": "a"}, {"x-user-id": "x" * 257}, "x-user-id"),
        ({"session_id": "a"}, {"idempotency-key": "x" * 257}, "idempotency-key"),
    ],
)
async def test_bad_names_are_refused(
    http: httpx.AsyncClient, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    response = await http.post(CHAT, json=turn("x", **fields), headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_without_a_store_a_session_is_a_400() -> None:
    async with served(ScriptedBackend()) as running, httpx.AsyncClient(base_url=running.url) as client:
        response = await client.post(CHAT, json=turn("x", session_id="a"))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "session_id")


async def test_when_the_store_is_gone_sessions_fail_closed_and_chats_go_on(tmp_path: Path) -> None:
    async with (
        served(ScriptedBackend(), state_url=f"unix://{tmp_path}/none.sock") as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        response = await client.post(CHAT, json=turn("x", session_id="a"))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "state_unavailable")
        assert int(response.headers["retry-after"]) >= 1
        assert (await client.post(CHAT, json=turn("x"))).status_code == 200
        assert 'vllm:admission_rejections_total{model_name="scripted",reason="state_unavailable"} 1.0' in (
            (await client.get("/metrics")).text
        )


async def test_a_long_conversation_never_fails_and_is_cut_rarely(embedded: EmbeddedValkey, name: str) -> None:
    """Sixty turns in a context that holds some ten: the system prompt stays, whole turns go, many at a time."""
    backend = ScriptedBackend(scripted.say(("word",) * 7), max_context=200)  # a token for each word of a message
    async with (
        served(backend, state_url=embedded.url, default_max_tokens=20) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        dropped, sent_before, recomputed, new = [], (), 0, 0
        for number in range(60):
            fields = turn(f"{number} " + "w " * 12, session_id=name)
            if number == 0:
                fields["messages"].insert(0, {"role": "system", "content": "be kind"})
            response = await client.post(CHAT, json=fields)
            assert response.status_code == 200, response.text
            dropped.append(int(response.headers["x-session-dropped-turns"]))
            resume = backend.resumes[-1]
            assert resume is not None
            if number and dropped[-1] == dropped[-2]:
                assert (len(resume.turns), resume.known) == (number - dropped[-1], 2 * (number - dropped[-1]) + 1)
            else:  # another turn is the first now: what was read before was about more
                assert resume == Resume()
            messages = backend.requests[-1].messages
            assert messages[0] == Message("system", "be kind")
            assert messages[1].content.startswith(f"{dropped[-1]} ")
            assert [m.role for m in messages[1:]] == ["user", "assistant"] * (number - dropped[-1]) + ["user"]
            kept = messages[: len(sent_before)] == sent_before
            cost = [len(m.content.split()) for m in messages]
            recomputed += 0 if kept else sum(cost[:-1])
            new += cost[-1]
            sent_before = messages
        cuts = len(set(dropped)) - 1
        assert 0 < cuts <= 12
        assert dropped == sorted(dropped)
        assert recomputed / new < 3
        response = await client.post(CHAT, json=turn("w " * 300, session_id=name))
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert (await client.post(CHAT, json=turn("short", session_id=name))).status_code == 200
