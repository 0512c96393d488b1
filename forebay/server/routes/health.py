"""GET /health, /ready and /metrics: for supervisors, load balancers and scrapers."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ...contract import EngineUnavailable, Load
from ..metrics import CONTENT_TYPE

_FAILED = "failed"  # the backend's state when it will not restart its engine any more
_HEARTBEAT_LIMIT = 3.0  # seconds


async def health(request: Request) -> Response:
    """200 while the process is up and its engine has not failed for good."""
    load: Load = request.app.state.backend.load()
    if load.state == _FAILED:
        raise EngineUnavailable("the engine has failed and will not be restarted", retry_after=30)
    return JSONResponse({"status": "ok", "state": load.state})


async def ready(request: Request) -> Response:
    """200 if a request sent now would be served; overload stays ready."""
    reason = _unready(request.app.state.backend.load(), draining=request.app.state.draining)
    if reason:
        raise EngineUnavailable(reason)
    return JSONResponse({"status": "ready"})


def _unready(load: Load, *, draining: bool) -> str | None:
    if draining:
        return "draining: the server is shutting down"
    if not load.ready:
        return f"the engine is not ready: {load.state}"
    if load.heartbeat_age >= _HEARTBEAT_LIMIT:
        return f"no sign of life from the engine for {load.heartbeat_age:.1f} s"
    return None


async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE)
