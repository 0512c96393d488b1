"""/v1/conversations and their items."""

from __future__ import annotations

import secrets
import time

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ...config import Settings
from ...contract import InvalidRequest, Message, MethodNotAllowed, NotFound
from ...state.sessions import History, Record, SessionKey, Sessions
from ..auth import caller_of
from ..body import read_body
from ..conversation import Conversation, idempotency_key, own_key
from ..conversations import parse_conversation, parse_items, parse_metadata
from ..items import items_of, listed, messages, no_query, page, said_items
from ..threads import conversation
from ..turn import sessions_of
from .sessions import purge


class ItemNotFound(NotFound):
    code = "item_not_found"


async def create_conversation(request: Request) -> Response:
    """Make a conversation, empty or with messages."""
    sessions, settings, body = await _body(request)
    asked = parse_conversation(body, settings.server)
    said = messages(asked.items, "items")
    key = own_key(request.headers, caller_of(request.scope), f"conv_{secrets.token_hex(16)}")
    record = Record(time.time(), dict(asked.metadata))
    await sessions.create(key, record)
    if said:
        await _append(request, sessions, key, said, "")
    return JSONResponse(_shown(key, record))


async def get_conversation(request: Request) -> Response:
    """A conversation's metadata."""
    no_query(request.query_params)
    key, history = await _find(request)
    return JSONResponse(_shown(key, history.record))


async def update_conversation(request: Request) -> Response:
    """Give a conversation other metadata."""
    sessions, _, body = await _body(request)
    asked = parse_metadata(body)
    key, history = await _find(request)
    record = Record(history.record.created if history.record else 0, dict(asked.metadata))
    await sessions.describe(key, record)
    return JSONResponse(_shown(key, record))


async def delete_conversation(request: Request) -> Response:
    """Delete a conversation with all that is kept of it."""
    no_query(request.query_params)
    key, _ = await _find(request)
    await purge(request.app.state, key)
    return JSONResponse({"id": key.session, "object": "conversation.deleted", "deleted": True})


async def list_items(request: Request) -> Response:
    """What was said in a conversation."""
    _, history = await _find(request)
    return JSONResponse(page([item for turn in history.turns for item in items_of(turn)], request.query_params))


async def get_item(request: Request) -> Response:
    """One item of a conversation."""
    no_query(request.query_params)
    _, history = await _find(request)
    id = request.path_params["item_id"]
    for turn in history.turns:
        for item in items_of(turn):
            if item["id"] == id:
                return JSONResponse(item)
    raise ItemNotFound(f"there is no item {id[:80]!r} in it, or no longer", param="item_id")


async def create_items(request: Request) -> Response:
    """Put messages at the end of a conversation."""
    sessions, settings, body = await _body(request)
    asked = parse_items(body, settings.server)
    key, _ = await _find(request)
    idempotency = idempotency_key(request.headers)
    return JSONResponse(listed(await _append(request, sessions, key, messages(asked.items, "items"), idempotency)))


async def delete_item(request: Request) -> Response:
    """Refused: later turns were answered in the knowledge of it."""
    raise MethodNotAllowed("items are not deleted one by one; delete the conversation")


async def _body(request: Request) -> tuple[Sessions, Settings, bytes]:
    no_query(request.query_params)
    sessions = sessions_of(request, None)
    settings: Settings = request.app.state.settings
    return sessions, settings, await read_body(request, int(settings.server.max_body))


async def _find(request: Request) -> tuple[SessionKey, History]:
    """Raises ConversationNotFound."""
    id = request.path_params["conversation_id"]
    key = own_key(request.headers, caller_of(request.scope), id)
    return key, await conversation(sessions_of(request, None), key, "conversation_id")


async def _append(
    request: Request, sessions: Sessions, key: SessionKey, said: tuple[Message, ...], idempotency: str
) -> list[dict[str, object]]:
    """A turn without an answer; returns its items."""
    deadline = time.monotonic() + request.app.state.settings.admission.queue_timeout
    begun = await sessions.begin(key, idempotency=idempotency, deadline=deadline, there=True)
    if begun.replay is not None:
        if begun.replay.answered:
            raise InvalidRequest("Idempotency-Key: it stands for something else already", param="idempotency-key")
        return said_items(begun.replay)
    turn = Conversation(sessions, begun, said)
    try:
        return said_items(await turn.keep(answered=False))
    finally:
        await turn.close()


def _shown(key: SessionKey, record: Record | None) -> dict[str, object]:
    known = record or Record(0, {})
    fields = {"id": key.session, "object": "conversation", "created_at": int(known.created)}
    return {**fields, "metadata": known.metadata}
