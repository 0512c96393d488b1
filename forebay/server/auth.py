"""API keys: default deny. Only the routes named here answer without one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import Settings
from ..contract import Unauthorized

#: Probes and scrapers carry no keys; like vLLM's, these three stay open. They tell no content.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
_CALLER = "forebay.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key a request has. Tenant "" is the one of the single key, and of a server without keys. The rest is as in
    KeySettings; ``batch``: its class is."""

    name: str = ""
    tenant: str = ""
    batch: bool = False
    rate: float = 0.0
    slo_ttft: float | None = None


def caller_of(scope: Scope) -> Caller:
    caller: Caller = scope.get(_CALLER, Caller())
    return caller


def callers(settings: Settings) -> dict[bytes, Caller]:
    """SHA-256 of each known key -> whose it is."""
    known = {
        bytes.fromhex(key.sha256): Caller(name, key.tenant, key.service_class == "batch", key.rate, key.slo_ttft)
        for name, key in settings.keys.items()
    }
    if settings.server.api_key is not None:
        known[key_digest(settings.server.api_key.get_secret_value().encode())] = Caller()
    return known


class Auth:
    """ASGI middleware. It asks the router's own routes which one will answer, so that no trick with the path or
    the Host header can make it and the router disagree; what matches no route needs the key too."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], known: Mapping[bytes, Caller]) -> None:
        self.app = app
        self.routes = routes
        self.known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not self._is_open(scope):
            caller = self._caller(scope)
            if caller is None:
                raise Unauthorized("a valid API key is needed: Authorization: Bearer <key>")
            scope[_CALLER] = caller
        await self.app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        matches = [(route.matches(scope)[0], route) for route in self.routes]
        for wanted in (Match.FULL, Match.PARTIAL):  # the router's order; PARTIAL is a wrong method
            for match, route in matches:
                if match is wanted:
                    return getattr(route, "path", None) in OPEN_PATHS
        return False

    def _caller(self, scope: Scope) -> Caller | None:
        scheme, _, sent = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = key_digest(sent.strip().encode("latin-1"))
        found = None
        for known, caller in self.known.items():  # all of them: the time must not tell which one it was
            if hmac.compare_digest(digest, known):
                found = caller
        return found if scheme.lower() == "bearer" else None


def key_digest(key: bytes) -> bytes:
    # Hashes have one length, so the comparison's time tells nothing of the key's.
    return hashlib.sha256(key).digest()
