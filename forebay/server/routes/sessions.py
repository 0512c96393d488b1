"""DELETE /v1/sessions/{id}: the conversations of chats. And what deleting means, for all that is kept of one."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ...contract import ConversationNotFound, Resume
from ...state.sessions import History, SessionKey
from ..auth import caller_of
from ..conversation import own_key
from ..items import no_query
from ..turn import sessions_of


async def purge(state: Any, key: SessionKey) -> bool:
    """Delete all that is kept of a session; returns whether there was any. ``state`` is the application's."""
    # The turns first: after that no answer that is being made can be kept.
    was: History | None = await state.sessions.delete(key)
    state.answers.purge(key.tenant, key.digest())
    if was is not None:
        await state.backend.forget(key.tenant, Resume(turns=tuple((turn.read, turn.wrote) for turn in was.turns)))
    return was is not None


async def delete_session(request: Request) -> Response:
    """Delete what is kept of a conversation by its `session_id`."""
    no_query(request.query_params)
    sessions_of(request, None)
    id = request.path_params["session_id"]
    if not await purge(request.app.state, own_key(request.headers, caller_of(request.scope), id)):
        raise ConversationNotFound(f"there is no session {id[:64]!r}, or no longer", param="session_id")
    return JSONResponse({"id": id, "object": "session.deleted", "deleted": True})
