"""The API key: default deny. Only the routes named here answer without it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from ..contract import Unauthorized

#: Probes and scrapers carry no keys; like vLLM's, these three stay open. They tell no content.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class Auth:
    """ASGI middleware. It asks the router's own routes which one will answer, so that no trick with the path or
    the Host header can make it and the router disagree; what matches no route needs the key too."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], key: str) -> None:
        self.app = app
        self.routes = routes
        self.digest = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not self._is_open(scope) and not self._has_key(scope):
            raise Unauthorized("a valid API key is needed: Authorization: Bearer <key>")
        await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        matches = [(route.matches(scope)[0], route) for route in self.routes]
        for wanted in (Match.FULL, Match.PARTIAL):  # the router's order; PARTIAL is a wrong method
            for match, route in matches:
                if match is wanted:
                    return getattr(route, "path", None) in OPEN_PATHS
        return False

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, sent = Headers(scope=scope).get("authorization", "").partition(" ")
        same = hmac.compare_digest(_digest(sent.strip().encode("latin-1")), self.digest)
        return same and scheme.lower() == "bearer"


def _digest(key: bytes) -> bytes:
    # Hashes have one length, so the comparison's time tells nothing of the key's.
    return hashlib.sha256(key).digest()
