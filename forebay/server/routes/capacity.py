"""GET /v1/capacity."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ...admission.gate import Gate


async def capacity(request: Request) -> Response:
    """What the server can do for requests as they came lately, and how much of it is free."""
    gate: Gate = request.app.state.gate
    return JSONResponse({"object": "capacity", **asdict(gate.capacity())})
