"""/v1/responses as the official client sees it. A scripted model, a real Valkey."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
import scripted
from openai.types.responses import Response, ResponseStreamEvent
from scripted import MODEL, ScriptedBackend, Served, served, until

from forebay.config import KeySettings, StateSettings
from forebay.contract import Delta, EngineFailure, GenRequest, Message, Resume, Usage
from forebay.server.auth import key_digest
from forebay.state.embedded import EmbeddedValkey
from forebay.state.sessions import SessionKey, Sessions
from forebay.state.store import Store

pytestmark = pytest.mark.anyio
RESPONSES = "/v1/responses"
ANSWER = "".join(scripted.ANSWER)
NOWHERE = "resp_" + "0" * 64
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def official(running: Served, key: str = "none", user: str = "") -> openai.AsyncOpenAI:
    headers = {"x-user-id": user} if user else {}
    return openai.AsyncOpenAI(base_url=running.url + "/v1", api_key=key, max_retries=0, default_headers=headers)


@pytest.fixture
async def server(embedded: EmbeddedValkey) -> AsyncIterator[Served]:
    async with served(ScriptedBackend(), state_url=embedded.url) as running:
        yield running


@pytest.fixture
async def client(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:  # type: ignore[override]
    async with official(server) as opened:
        yield opened


def asked(text: str = "one", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text, **fields}


def says(*texts: str) -> tuple[Message, ...]:
    return tuple(Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts))


def session(response: Response) -> str:
    """The part of its id that is its session's."""
    return response.id[:-32]


def events(text: str, after: int = -1) -> list[dict[str, Any]]:
    """Of a stream: each as the SDK's own types have it, named and numbered as it is."""
    found = []
    for frame in text.split("\n\n"):
        if frame and not frame.startswith(":"):
            name, data = frame.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
            EVENT.validate_python(found[-1])
            after += len(found[-1].get("delta", "."))
            assert found[-1]["sequence_number"] == after
    return found


async def thinks(_request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
    parts = [("", ""), ("Hm", ""), ("", ""), (", hm.", ""), ("", "It "), ("", "is"), ("", "")]
    for i, (reasoning, text) in enumerate(parts, 1):
        end = "stop" if i == len(parts) else None
        yield Delta(text, 1, Usage(n_prompt, i, cached_tokens=1, tier="host"), time.monotonic(), end, reasoning)


async def test_a_response_goes_on_from_the_previous(server: Served, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="one", metadata={"a": "b"}, temperature=0.5)
    assert (first.output_text, first.status, first.metadata) == (ANSWER, "completed", {"a": "b"})
    assert (first.temperature, first.previous_response_id, first.conversation) == (0.5, None, None)
    assert first.usage is not None
    assert (first.usage.input_tokens, first.usage.output_tokens, first.usage.total_tokens) == (1, 7, 8)
    assert first.usage.input_tokens_details.cached_tokens == 1
    second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    third = await client.responses.create(model=MODEL, input="three", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    assert server.backend.requests[-1].messages == says("one", ANSWER, "two", ANSWER, "three")
    assert session(first) == session(second) == session(third)
    for response in (first, second, third):
        assert await client.responses.retrieve(response.id) == response


async def test_a_response_goes_on_in_a_conversation(server: Served, client: openai.AsyncOpenAI) -> None:
    conversation = await client.conversations.create()
    await client.responses.create(model=MODEL, input="one", conversation=conversation.id)
    second = await client.responses.create(model=MODEL, input="two", conversation={"id": conversation.id})
    assert second.conversation is not None
    assert second.conversation.id == conversation.id
    assert server.backend.requests[-1].messages == says("one", ANSWER, "two")
    # What goes on from a response of it is none of its turns.
    aside = await client.responses.create(model=MODEL, input="aside", previous_response_id=second.id)
    assert aside.conversation is None
    assert server.backend.requests[-1].messages == says("one", ANSWER, "two", ANSWER, "aside")
    await client.responses.create(model=MODEL, input="three", conversation=conversation.id)
    assert server.backend.requests[-1].messages == says("one", ANSWER, "two", ANSWER, "three")


async def test_going_on_from_an_earlier_response_is_a_branch(server: Served, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="one")
    left = await client.responses.create(model=MODEL, input="left", previous_response_id=first.id)
    right = await client.responses.create(model=MODEL, input="right", previous_response_id=first.id)
    assert server.backend.requests[-1].messages == says("one", ANSWER, "right")
    assert session(left) != session(right)
    for branch, name in ((left, "left"), (right, "right")):
        await client.responses.create(model=MODEL, input="more", previous_response_id=branch.id)
        assert server.backend.requests[-1].messages == says("one", ANSWER, name, ANSWER, "more")
        assert (await client.responses.retrieve(branch.id)).output_text == ANSWER
    # Of what was copied the tokens are known too.
    resume = server.backend.resumes[-1]
    assert resume is not None
    assert (resume.known, len(resume.turns)) == (4, 2)


@pytest.mark.parametrize("on_conflict", ["reject", "queue"])
async def test_two_that_go_on_at_once_do_not_wait_for_each_other(
    embedded: EmbeddedValkey, on_conflict: Literal["reject", "queue"]
) -> None:
    backend = ScriptedBackend(scripted.say(first=0.4))
    async with (
        Store(embedded.url) as store,
        served(backend, state_url=embedded.url) as running,
        official(running) as client,
    ):
        running.app.state.sessions = Sessions(store, StateSettings(on_conflict=on_conflict))
        first = await client.responses.create(model=MODEL, input="one")
        both = [client.responses.create(model=MODEL, input=text, previous_response_id=first.id) for text in "ab"]
        left, right = await asyncio.gather(*both)
        assert session(left) != session(right)
        assert backend.most_running == 2


async def test_instructions_are_for_one_response(server: Served, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="one", instructions="be kind")
    kind = Message("system", "be kind")
    assert server.backend.requests[-1].messages == (kind, *says("one"))
    assert (await client.responses.retrieve(first.id)).instructions == "be kind"
    second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert server.backend.requests[-1].messages == says("one", ANSWER, "two")
    assert server.backend.resumes[-1] == Resume()  # the tokens of a prompt that had them are another's
    assert second.instructions is None
    third = {"input": "three", "previous_response_id": second.id}
    await client.responses.create(model=MODEL, instructions="be brief", **third)
    assert server.backend.requests[-1].messages[0] == Message("system", "be brief")
    alone = await client.responses.create(model=MODEL, input="one", instructions="be kind", store=False)
    assert server.backend.requests[-1].messages == (kind, *says("one"))
    assert alone.instructions == "be kind"


async def test_what_is_not_to_be_stored_is_not(
    server: Served, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    first = await client.responses.create(model=MODEL, input="one")
    conversation = await client.conversations.create(items=[{"role": "user", "content": "one"}])
    for fields in ({}, {"previous_response_id": first.id}, {"conversation": conversation.id}):
        for stream in (False, True):
            text = (await http.post(RESPONSES, json=asked("two", store=False, stream=stream, **fields))).text
            response = events(text)[-1]["response"] if stream else json.loads(text)
            assert (response["store"], response["status"]) == (False, "completed")
            assert (await http.get(f"{RESPONSES}/{response['id']}")).status_code == 404
            wanted = {1: says("two"), 2: (*says("one"), *says("two")), 3: says("one", ANSWER, "two")}
            messages = server.backend.requests[-1].messages
            assert messages == wanted[1 if not fields else 3 if "previous_response_id" in fields else 2]
    second = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    assert session(second) == session(first)  # nobody has gone on from it meanwhile
    assert len((await client.conversations.items.list(conversation.id)).data) == 1


@pytest.mark.parametrize("thinking", [False, True])
async def test_a_stream_ends_with_what_is_kept(embedded: EmbeddedValkey, thinking: bool) -> None:
    backend = ScriptedBackend(thinks if thinking else scripted.say(("", "The ", "", "end", "")))
    async with (
        served(backend, state_url=embedded.url) as running,
        official(running) as client,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        async with client.responses.stream(model=MODEL, input="one") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert deltas == (["It ", "is"] if thinking else ["The ", "end"])
        kept = (await http.get(f"{RESPONSES}/{final.id}")).json()
        Response.model_validate(kept)
        assert final.output_text == "".join(deltas)
        told = events((await http.post(RESPONSES, json=asked(stream=True))).text)
        assert told[-1]["type"] == "response.completed"
        assert (await http.get(f"{RESPONSES}/{told[-1]['response']['id']}")).json() == told[-1]["response"]
        whole = (await http.post(RESPONSES, json=asked())).json()
        assert (await http.get(f"{RESPONSES}/{whole['id']}")).json() == whole
        for response in (kept, told[-1]["response"], whole):
            assert [item["type"] for item in response["output"]] == ["reasoning", "message"][not thinking :]
            assert response["output"][0]["content"][0]["text"] == ("Hm, hm." if thinking else "The end")
            assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == (2 if thinking else 0)
        # The items that were streamed are the final ones, piece by piece.
        done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
        assert done == told[-1]["response"]["output"]
        for index, item in enumerate(done):
            own = [event for event in told if event.get("output_index") == index]
            names = [event["type"].removeprefix("response.") for event in own]
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            assert names[:2] == ["output_item.added", "content_part.added"]
            assert set(names[2:-3]) == {f"{kind}.delta"}
            assert names[-3:] == [f"{kind}.done", "content_part.done", "output_item.done"]
            assert "".join(event["delta"] for event in own[2:-3]) == item["content"][0]["text"]


async def test_an_answer_that_thinks_to_its_end_has_no_message(embedded: EmbeddedValkey) -> None:
    async def play(_request: GenRequest, n_prompt: int) -> AsyncIterator[Delta]:
        yield Delta("", 1, Usage(n_prompt, 1), time.monotonic(), "length", "Hm")

    async with (
        served(ScriptedBackend(play), state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        whole = (await http.post(RESPONSES, json=asked())).json()
        told = events((await http.post(RESPONSES, json=asked(stream=True))).text)
        for response in (whole, told[-1]["response"]):
            assert [item["type"] for item in response["output"]] == ["reasoning"]
            assert (await http.get(f"{RESPONSES}/{response['id']}")).json() == response


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_short_is_incomplete(embedded: EmbeddedValkey, stream: bool) -> None:
    backend = ScriptedBackend(scripted.say(("half",), finish="length"))
    async with (
        served(backend, state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        text = (await http.post(RESPONSES, json=asked(max_output_tokens=1, stream=stream))).text
        response = events(text)[-1]["response"] if stream else json.loads(text)
        assert (response["status"], response["max_output_tokens"]) == ("incomplete", 1)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
        assert backend.requests[-1].max_tokens == 1
        assert not stream or events(text)[-1]["type"] == "response.incomplete"
        assert (await http.get(f"{RESPONSES}/{response['id']}")).json() == response


async def test_an_answer_that_broke_off_is_kept_as_such(embedded: EmbeddedValkey) -> None:
    backend = ScriptedBackend(scripted.say(("half ", "of ", "it"), pause=2.0))
    async with served(backend, state_url=embedded.url) as running, official(running) as client:
        async with await client.responses.create(model=MODEL, input="one", stream=True) as stream:
            async for event in stream:
                if event.type == "response.created":
                    id = event.response.id
                if event.type == "response.output_text.delta":
                    break
        await until(lambda: backend.running == 0 and not running.server.server_state.tasks)
        kept = await client.responses.retrieve(id)
        assert (kept.status, kept.output_text, kept.incomplete_details) == ("incomplete", "half ", None)
        await client.responses.create(model=MODEL, input="two", previous_response_id=id)
        assert backend.requests[-1].messages == says("one", "half ", "two")


@pytest.mark.parametrize("after", [0, 2])
async def test_a_failure_in_the_stream_is_an_event(embedded: EmbeddedValkey, after: int) -> None:
    backend = ScriptedBackend(scripted.fail(EngineFailure("it broke"), after=after, pause=0.2))
    async with (
        served(backend, state_url=embedded.url, stream_hold=0.05) as running,
        official(running) as client,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        text = (await http.post(RESPONSES, json=asked(stream=True))).text
        assert "[DONE]" not in text
        told = events(text)
        assert (told[0]["type"], told[-1]["type"]) == ("response.created", "response.failed")
        response = told[-1]["response"]
        assert (response["status"], response["error"]["message"]) == ("failed", "it broke")
        assert [item["content"][0]["text"] for item in response["output"]] == (["word word "] if after else [])
        async with client.responses.stream(model=MODEL, input="one") as stream:
            assert [event.type async for event in stream][-1] == "response.failed"
        assert (await http.post(RESPONSES, json=asked())).status_code == 500


async def test_what_could_not_be_kept_is_not_told_as_completed(embedded: EmbeddedValkey) -> None:
    backend = ScriptedBackend(scripted.say(pause=0.1))
    async with (
        served(backend, state_url=embedded.url) as running,
        official(running) as client,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        conversation = await client.conversations.create()
        asking = asyncio.create_task(http.post(RESPONSES, json=asked(stream=True, conversation=conversation.id)))
        await until(lambda: backend.running == 1)
        await client.conversations.delete(conversation.id)
        assert events((await asking).text)[-1]["type"] == "response.failed"


async def test_a_retry_is_the_same_response(
    server: Served, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    first = await client.responses.create(model=MODEL, input="one")
    await client.responses.create(model=MODEL, input="other", previous_response_id=first.id)
    last = await client.responses.create(model=MODEL, input="one")
    conversation = await client.conversations.create()
    opened = server.backend.opened
    for number, fields in enumerate(
        (
            {},
            {"previous_response_id": first.id},  # a branch
            {"previous_response_id": last.id},  # no branch: by the retry, another is the last
            {"conversation": conversation.id},
        )
    ):
        once = {"idempotency-key": f"key {number}"}
        response = (await http.post(RESPONSES, json=asked("two", **fields), headers=once)).json()
        for stream in (False, True):
            again = await http.post(RESPONSES, json=asked("two", stream=stream, **fields), headers=once)
            assert again.headers["x-idempotent-replay"] == "true"
            assert (events(again.text)[-1]["response"] if stream else again.json()) == response
        assert (await http.get(f"{RESPONSES}/{response['id']}")).json() == response
    assert server.backend.opened == opened + 4
    assert (await client.responses.retrieve(last.id)).id == last.id


@pytest.mark.parametrize("broken", [False, True])
async def test_a_retry_at_another_server_tells_what_is_kept(embedded: EmbeddedValkey, broken: bool) -> None:
    script = scripted.fail(EngineFailure("it broke"), after=2) if broken else thinks
    async with (
        served(ScriptedBackend(script), state_url=embedded.url) as one,
        served(ScriptedBackend(), state_url=embedded.url) as two,
        httpx.AsyncClient() as http,
    ):
        once = {"idempotency-key": f"broken {broken}"}
        first = await http.post(one.url + RESPONSES, json=asked(), headers=once)
        assert first.status_code == (500 if broken else 200)
        for stream in (False, True):
            again = await http.post(two.url + RESPONSES, json=asked(stream=stream), headers=once)
            assert again.headers["x-idempotent-replay"] == "true"
            response = events(again.text)[-1]["response"] if stream else again.json()
            assert (response["status"], response["incomplete_details"]) == (
                "incomplete" if broken else "completed",
                None,
            )
            assert (await http.get(f"{two.url}{RESPONSES}/{response['id']}")).json() == response
            assert broken or response == first.json()
        assert two.backend.opened == 0


async def test_two_retries_at_once_are_one_response(embedded: EmbeddedValkey) -> None:
    """One server lets the second in on the first; another tells it to wait."""
    slow = scripted.say(pause=0.03)
    async with (
        served(ScriptedBackend(slow), state_url=embedded.url) as one,
        served(ScriptedBackend(slow), state_url=embedded.url) as two,
        official(one) as client,
        httpx.AsyncClient() as http,
    ):
        first, once = await client.responses.create(model=MODEL, input="one"), {"idempotency-key": "k"}
        for fields in ({}, {"previous_response_id": first.id}):
            opened = one.backend.opened + two.backend.opened
            sent = [
                http.post(running.url + RESPONSES, json=asked(stream=i == 1, **fields), headers=once)
                for i, running in enumerate((one, one, two))
            ]
            whole, streamed, refused = await asyncio.gather(*sent)
            if whole.status_code == 409:  # the other server was faster
                whole, refused = refused, whole
                assert streamed.status_code == 409
            else:
                assert events(streamed.text)[-1]["response"] == whole.json()
            assert whole.status_code == 200
            assert refused.status_code == 409 or refused.json() == whole.json()  # it may have been late
            assert one.backend.opened + two.backend.opened == opened + 1
            kept = await http.get(f"{one.url}{RESPONSES}/{whole.json()['id']}")
            assert kept.json() == whole.json()


async def test_a_key_that_stands_for_something_else_is_refused(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    conversation = await client.conversations.create()
    once = {"idempotency-key": "k"}
    items = {"items": [{"role": "user", "content": "x"}]}
    path = f"/v1/conversations/{conversation.id}/items"
    added = [(await http.post(path, json=items, headers=once)).json() for _ in range(2)]
    assert added[0] == added[1]
    response = await http.post(RESPONSES, json=asked(conversation=conversation.id), headers=once)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "idempotency-key")


async def test_responses_are_a_users_own(embedded: EmbeddedValkey) -> None:
    hashes = {key: KeySettings(sha256=key_digest(key.encode()).hex(), tenant=key[0]) for key in ("a1", "a2", "b1")}
    async with (
        served(ScriptedBackend(), state_url=embedded.url, keys=hashes) as running,
        official(running, "a1", "u") as mine,
        official(running, "a2", "u") as same,  # another key of the tenant, for the same user
        official(running, "a1", "v") as other_user,
        official(running, "a1") as no_user,
        official(running, "b1", "u") as other_tenant,
    ):
        response = await mine.responses.create(model=MODEL, input="one")
        conversation = await mine.conversations.create()
        for stranger in (other_user, no_user, other_tenant):
            for refused in (
                stranger.responses.retrieve(response.id),
                stranger.responses.input_items.list(response.id),
                stranger.responses.delete(response.id),
                stranger.responses.create(model=MODEL, input="x", previous_response_id=response.id),
                stranger.responses.create(model=MODEL, input="x", previous_response_id=response.id, store=False),
                stranger.responses.create(model=MODEL, input="x", conversation=conversation.id),
                stranger.responses.create(model=MODEL, input="x", conversation=conversation.id, store=False),
                stranger.conversations.retrieve(conversation.id),
                stranger.conversations.update(conversation.id, metadata={}),
                stranger.conversations.delete(conversation.id),
                stranger.conversations.items.list(conversation.id),
                stranger.conversations.items.create(conversation.id, items=[{"role": "user", "content": "x"}]),
            ):
                with pytest.raises(openai.NotFoundError):
                    await refused
        assert (await same.responses.retrieve(response.id)).id == response.id
        assert (await same.conversations.retrieve(conversation.id)).id == conversation.id


async def test_what_is_not_there_is_a_404(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model=MODEL, input="one")
    ids = (NOWHERE, response.id[:-1] + ("0" if response.id[-1] != "0" else "1"), "x", response.id.upper())
    for id in ids:
        got = await http.get(f"{RESPONSES}/{id}")
        assert (got.status_code, got.json()["error"]["code"]) == (404, "response_not_found")
        assert (await http.delete(f"{RESPONSES}/{id}")).status_code == 404
        sent = await http.post(RESPONSES, json=asked(previous_response_id=id))
        assert (sent.status_code, sent.json()["error"]["param"]) == (404, "previous_response_id")
    hidden = "conv_" + response.id[5:37]  # the session behind a response is no conversation
    for id in ("conv_" + "0" * 32, "x", hidden):
        for store in (True, False):
            sent = await http.post(RESPONSES, json=asked(conversation=id, store=store))
            assert (sent.status_code, sent.json()["error"]["code"]) == (404, "conversation_not_found")
            assert sent.json()["error"]["param"] == "conversation"
        assert (await http.get(f"/v1/conversations/{id}")).status_code == 404


async def test_deleting_the_last_response_takes_all_before_it(
    server: Served, client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    first = await client.responses.create(model=MODEL, input="one")
    last = await client.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    refused = await http.delete(f"{RESPONSES}/{first.id}")
    assert refused.status_code == 400
    assert last.id in refused.json()["error"]["message"]
    gone = await http.delete(f"{RESPONSES}/{last.id}")
    assert gone.json() == {"id": last.id, "object": "response", "deleted": True}
    for response in (first, last):
        assert (await http.get(f"{RESPONSES}/{response.id}")).status_code == 404
    assert not await server.app.state.sessions.delete(SessionKey("", "key:", "conv_" + last.id[5:37]))
    conversation = await client.conversations.create()
    part = await client.responses.create(model=MODEL, input="one", conversation=conversation.id)
    with pytest.raises(openai.BadRequestError, match=conversation.id):
        await client.responses.delete(part.id)


async def test_input_is_taken_in_all_its_forms(server: Served, client: openai.AsyncOpenAI) -> None:
    given: list[Any] = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "message", "role": "user", "content": "d"},
    ]
    response = await client.responses.create(model=MODEL, input=given)
    assert server.backend.requests[-1].messages == (
        Message("system", "be kind"),
        Message("user", "a\nb"),
        Message("assistant", "c"),
        Message("user", "d"),
    )
    items = await client.responses.input_items.list(response.id, order="asc")
    assert [(item.role, item.content[0].text) for item in items.data] == [  # type: ignore[union-attr]
        ("system", "be kind"),
        ("user", "a\nb"),
        ("assistant", "c"),
        ("user", "d"),
    ]


async def test_the_items_of_an_answer_may_be_sent_back(embedded: EmbeddedValkey) -> None:
    """As OpenAI's guide has it: ``input += response.output``."""
    async with served(ScriptedBackend(thinks), state_url=embedded.url) as running, official(running) as client:
        talk: list[Any] = [{"role": "user", "content": "one"}]
        response = await client.responses.create(model=MODEL, input=talk)
        talk += [*response.output, {"role": "user", "content": "two"}]
        await client.responses.create(model=MODEL, input=talk)
        answer = Message("assistant", "It is", None, "Hm, hm.")
        assert running.backend.requests[-1].messages == (*says("one"), answer, *says("two"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "a", "previous_response_id": "b"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}, "input.1.role"),
        ({"input": [{"content": "x"}]}, "input.0"),
        ({"input": [{"type": "reasoning", "content": "x"}, {"role": "user", "content": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"max_tokens": 1, "max_output_tokens": 2}, "max_output_tokens"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"truncation": "middle"}, "truncation"),
        ({"colour": "red"}, "colour"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_what_is_not_supported_is_named(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    response = await http.post(RESPONSES, json=asked() | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_queries_and_headers_of_elsewhere_are_named(http: httpx.AsyncClient) -> None:
    response = await http.post(RESPONSES, json=asked(), headers={"x-session-id": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-session-id")
    stream = "stream=true&starting_after="
    for query, param in (
        ("stream=yes", "stream"),
        ("starting_after=1", "starting_after"),
        (stream, "starting_after"),
        (stream + "-1", "starting_after"),
        (stream + "1e9", "starting_after"),
        (stream + "9" * 30, "starting_after"),
        ("include=x", "include"),
    ):
        response = await http.get(f"{RESPONSES}/{NOWHERE}?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_fields_that_change_nothing_are_taken(http: httpx.AsyncClient) -> None:
    neutral = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "background": False, "include": []}
    neutral |= {"text": {"format": {"type": "text"}}, "service_tier": "auto", "reasoning": None, "top_logprobs": 0}
    labels = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "p"}
    response = await http.post(RESPONSES, json=asked() | neutral | labels | {"top_k": 5, "seed": 1, "stop": ["x"]})
    assert response.status_code == 200, response.text
    assert {name: response.json()[name] for name in labels} == labels


async def test_without_a_store_nothing_is_kept() -> None:
    async with served(ScriptedBackend()) as running, httpx.AsyncClient(base_url=running.url) as http:
        for fields in ({}, {"store": False}):
            response = await http.post(RESPONSES, json=asked(**fields))
            assert (response.status_code, response.json()["store"]) == (200, False)
        for field, value in (("store", True), ("conversation", "conv_x"), ("previous_response_id", NOWHERE)):
            response = await http.post(RESPONSES, json=asked(**{field: value}))
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)
            assert "--state-url" in response.json()["error"]["message"]
        assert (await http.get(f"{RESPONSES}/{NOWHERE}")).status_code == 400
        assert (await http.post("/v1/conversations", json={})).status_code == 400


async def test_without_truncation_a_thread_that_does_not_fit_is_refused(embedded: EmbeddedValkey) -> None:
    backend = ScriptedBackend(scripted.say(("word ",) * 20), max_context=100)  # a token for each word of a message
    async with (
        served(backend, state_url=embedded.url, default_max_tokens=20) as running,
        httpx.AsyncClient(base_url=running.url) as http,
    ):
        last, truncated = None, 0
        for _ in range(6):
            sent = asked("w " * 12, previous_response_id=last, truncation="disabled")
            strict = await http.post(RESPONSES, json=sent)
            if strict.status_code != 200:
                error = strict.json()["error"]
                assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
                truncated += 1
                strict = await http.post(RESPONSES, json=sent | {"truncation": "auto"})
            assert strict.json()["truncation"] == ("auto" if truncated else "disabled")
            last = strict.json()["id"]
        assert truncated >= 2  # also when an earlier turn has left out some already
