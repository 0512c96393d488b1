"""DELETE /v1/sessions/{id}: the conversations of chats. And what deleting means, for all that is kept of one."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ...contract import ConversationNotFound, Resume, StateCorrupt
from ...state.sessions import SessionKey
from ..auth import caller_of
from ..conversation import own_key
from ..items import no_query
from ..turn import sessions_of


async def purge(state: Any, key: SessionKey) -> bool:
    """Delete all that is kept of a session; returns whether there was any. ``state`` is the application's."""
    try:
        turns = (await state.sessions.history(key)).turns
    except StateCorrupt:  # then its KV goes when its time is over
        turns = ()
    # The turns first: after that no answer that is being made can be kept.
    was_there: bool = await state.sessions.delete(key)
    state.answers.purge(key.tenant, key.digest())
    await state.backend.forget(key.tenant, Resume(turns=tuple((turn.read, turn.wrote) for turn in turns)))
    return was_there


async def delete_session(request: Request) -> Response:
    """Delete what is kept of a conversation by its `session_id`."""
    no_query(request.query_params)
    sessions_of(request, None)
    id = request.path_params["session_id"]
    if not await purge(request.app.state, own_key(request.headers, caller_of(request.scope), id)):
        raise ConversationNotFound(f"there is no session {id[:64]!r}, or no longer", param="session_id")
    return JSONResponse({"id": id, "object": "session.deleted", "deleted": True})
