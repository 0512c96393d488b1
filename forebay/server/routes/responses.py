"""/v1/responses: answers that go on from one another, in OpenAI's newer shape."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import JSONResponse, Response

from ...contract import InvalidRequest
from ...state.sessions import History, SessionKey
from ..asks import ask_of
from ..auth import caller_of
from ..conversation import own_key
from ..entrance import arrived_of, reply_of
from ..formats import Format
from ..items import no_query, page, said_items
from ..replay import replay
from ..response_format import ResponseFormat, kept_response
from ..responses import parse_response
from ..running import event_number
from ..threads import Thread, find_response, parts, response_id, unkept_id
from ..turn import answer, naming, sessions_of
from .sessions import purge


async def create_response(request: Request) -> Response:
    """Answer an input, as one object or, with `stream: true`, as events."""
    arrived = arrived_of(request)
    state = request.app.state
    if "x-session-id" in request.headers:
        raise InvalidRequest("x-session-id: here it is conversation or previous_response_id", param="x-session-id")
    asked = parse_response(arrived.body, state.backend.card, state.settings.server, keeps=state.sessions is not None)
    head: Mapping[str, Any] = asked.head
    if not (asked.store or asked.conversation or asked.previous):

        async def alone() -> Format:
            return ResponseFormat(unkept_id(), head)

        with naming("input"):
            return await answer(arrived, asked.call, alone)
    thread = Thread(
        sessions_of(request),
        partial(own_key, request.headers, caller_of(request.scope)),
        msgspec.json.encode(head),
        conversation=asked.conversation,
        previous=asked.previous,
        store=asked.store,
    )

    async def form() -> Format:
        id, about, replay = thread.told()
        if not about:
            raise InvalidRequest("Idempotency-Key: it stands for something else already", param="idempotency-key")
        return ResponseFormat(id, msgspec.json.decode(about), replay)

    with naming("input"):
        return await answer(arrived, asked.call, form, thread.begin, line=thread.line, joined=thread.joined)


async def get_response(request: Request) -> Response:
    """A response that was kept. With `stream=true` its events behind number `starting_after`, or all; then also one
    that is being answered here with an Idempotency-Key."""
    params = request.query_params
    no_query(params, "stream", "starting_after")
    stream, sent = params.get("stream", "false"), params.get("starting_after")
    if stream not in ("true", "false"):
        raise InvalidRequest("stream: must be true or false", param="stream")
    if stream == "true":
        return await _events(request, sent)
    if sent is not None:
        raise InvalidRequest("starting_after: needs stream=true", param="starting_after")
    id, _, history, index = await _find(request)
    return JSONResponse(kept_response(id, history.turns[index]))


async def _events(request: Request, sent: str | None) -> Response:
    arrival, state = time.monotonic(), request.app.state
    fault = "starting_after: must be the sequence_number of an event that was sent"
    after = -1 if sent is None else event_number(sent, fault, "starting_after")
    known = parts(partial(own_key, request.headers, caller_of(request.scope)), request.path_params["response_id"])
    running = state.answers.turns.rejoin(*known, ask_of(request, arrival)) if known else None
    if running is None:
        id, _, history, index = await _find(request)
        turn = history.turns[index]
        return replay(turn, ResponseFormat(id, msgspec.json.decode(turn.about), turn, after), stream=True, headers={})
    member, label = running
    form = ResponseFormat(request.path_params["response_id"], msgspec.json.decode(label.begun.about), after=after)
    return reply_of(state, (member, "coalesced"), form, arrival, stream=True, headers=label.headers)


async def list_input_items(request: Request) -> Response:
    """What was new in the request for a response."""
    _, _, history, index = await _find(request)
    return JSONResponse(page(said_items(history.turns[index]), request.query_params))


async def delete_response(request: Request) -> Response:
    """Delete a response, and with it those that it goes on from."""
    no_query(request.query_params)
    id, key, history, index = await _find(request)
    if history.record is not None:
        raise InvalidRequest(f"it is part of {key.session}, and goes with that", param="response_id")
    if index < len(history.turns) - 1:
        last = response_id(key.session, history.turns[-1].id)
        raise InvalidRequest(f"others go on from it; {last} is the last, and takes all with it", param="response_id")
    await purge(request.app.state, key)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def _find(request: Request) -> tuple[str, SessionKey, History, int]:
    id = request.path_params["response_id"]
    own = partial(own_key, request.headers, caller_of(request.scope))
    return id, *await find_response(sessions_of(request, None), own, id, "response_id")
