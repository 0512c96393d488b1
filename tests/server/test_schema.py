"""The whole OpenAPI document, with requests made up from it: no 500, no hang, errors in one shape."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from scripted import MODEL, ScriptedBackend, served

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(600),
    # schemathesis builds its regular expressions and strategies with what others have deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning"),
]
EXAMPLES = 150


def operations(document: dict[str, Any]) -> Iterator[Any]:
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        yield result.ok()


def judge(response: requests.Response) -> None:
    """What every answer owes, whatever was asked."""
    # 503 alone is ours to give: the scripted backend never fails.
    assert response.status_code < 500 or response.status_code == 503, response.text
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert len(response.content) < 2000
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n") or '"error"' in response.text


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["sound", "broken"])
async def test_no_request_of_the_document_makes_a_500_or_a_hang(mode: GenerationMode) -> None:
    seen: dict[str, set[int]] = {}

    def attack(url: str, operation: Any) -> None:
        session = requests.Session()

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            derandomize=True,  # the same in CI each time
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = MODEL  # else every request would end as one for another model
            response = session.request(**case.as_transport_kwargs(base_url=url), timeout=20)
            seen.setdefault(operation.label, set()).add(response.status_code)
            judge(response)

        ask()

    backend = ScriptedBackend(capacity=100)
    async with served(backend) as running, httpx.AsyncClient(base_url=running.url) as client:
        document = (await client.get("/openapi.json")).json()
        for operation in operations(document):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue  # there is nothing to break: any text is a path's parameter
            await asyncio.to_thread(attack, running.url, operation)
        assert (await client.get("/health")).status_code == 200
        assert backend.running == 0
        routes = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert seen.keys() <= routes
    if mode is GenerationMode.POSITIVE:
        assert seen.keys() == routes
        # What the document calls sound is mostly answered; the rest are limits that it cannot say.
        assert all(200 in seen[f"POST {path}"] for path in ("/v1/chat/completions", "/v1/completions", "/detokenize"))
    else:
        assert all(400 in statuses for label, statuses in seen.items() if label.startswith("POST /"))
