"""DELETE /v1/cache."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from ..answers import Answers
from ..auth import caller_of


async def purge(request: Request) -> Response:
    """Forget the answers that the cache has of the caller's tenant."""
    answers: Answers = request.app.state.answers
    return JSONResponse({"purged": answers.purge(caller_of(request.scope).tenant)})
