"""Named keys: default deny on every route, one tenant per key, and prefix caches apart."""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import Any

import httpx
import pytest
from scripted import MODEL, ScriptedBackend, body, served
from starlette.routing import Route

from forebay.config import KeySettings
from forebay.server import auth

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


def entry(key: str, tenant: str, service_class: str = "interactive") -> KeySettings:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return KeySettings.model_validate({"sha256": digest, "tenant": tenant, "class": service_class})


KEYS = {"alice": entry("key-a", "acme"), "bob": entry("key-b", "acme", "batch"), "carol": entry("key-c", "other")}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_route_of_the_app_but_the_probes_needs_a_key() -> None:
    async with (
        served(ScriptedBackend(), keys=KEYS) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        without: dict[tuple[str, str], int] = {}
        for route in running.app.router.routes:
            assert isinstance(route, Route), "a new kind of route: teach this test to ask it"
            for method in route.methods or ():
                path = route.path.replace("{model_id:path}", MODEL)
                without[route.path, method] = (await client.request(method, path, json={})).status_code
                assert (await client.request(method, path, json={}, headers=bearer("key-c"))).status_code != 401
                wrong = await client.request(method, path, json={}, headers=bearer("key-d"))
                assert (wrong.status_code == 401) == (without[route.path, method] == 401)
        assert {path for (path, _), status in without.items() if status != 401} == {"/health", "/ready", "/metrics"}
        assert {CHAT, "/tokenize", "/detokenize", "/v1/models", "/openapi.json"} <= {path for path, _ in without}
        assert (await client.get("/nowhere")).status_code == 401


async def test_each_key_has_its_tenants_salt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        served(ScriptedBackend(), keys=KEYS, api_key="key-0") as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        for key in ("key-a", "key-b", "key-c", "key-0"):
            assert (await client.post(CHAT, json=body(), headers=bearer(key))).status_code == 200
        for header in (
            "key-a",
            "Basic key-a",
            f"Bearer {KEYS['alice'].sha256}",
            "Bearer acme",
            "Bearer alice",
            "Bearer",
        ):
            denied = await client.post(CHAT, json=body(), headers={"authorization": header})
            assert denied.status_code == 401
    assert [request.salt for request in running.backend.requests] == ["acme", "acme", "other", ""]
    lines = [r.fields for r in caplog.records if r.name == "forebay.access"]  # type: ignore[attr-defined]
    assert [line["key"] for line in lines] == ["alice", "bob", "carol"] + [None] * 7
    assert "key-a" not in caplog.text
    assert KEYS["alice"].sha256 not in caplog.text


async def test_a_default_that_does_not_fit_keeps_the_salt() -> None:
    async with (
        served(ScriptedBackend(max_context=100), keys=KEYS) as running,
        httpx.AsyncClient(base_url=running.url, headers=bearer("key-a")) as client,
    ):
        assert (await client.post(CHAT, json=body())).status_code == 200
        assert [request.salt for request in running.backend.requests] == ["acme", "acme"]


async def test_without_keys_there_is_one_tenant(client: httpx.AsyncClient, server: Any) -> None:
    await client.post(CHAT, json=body(), headers=bearer("key-a"))
    assert [request.salt for request in server.backend.requests] == [""]


async def test_every_known_hash_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one) + len(other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(auth, "hmac", type("Watched", (), {"compare_digest": staticmethod(compare)}))
    async with (
        served(ScriptedBackend(), keys=KEYS, api_key="key-0") as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        for key in ("key-a", "key-0", "x", "x" * 5000):
            await client.get("/v1/models", headers=bearer(key))
            assert compared == [64] * 4
            compared.clear()
