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

from forebay.state.embedded import EmbeddedValkey

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(600),
    # schemathesis builds its regular expressions and strategies with what others have deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning"),
]
EXAMPLES = 150
#: Of /v1/responses.
ENDS = ("event: response.completed\n", "event: response.incomplete\n")


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
        last = response.text.removesuffix("\n\n").rpartition("\n\n")[2]
        assert last == "data: [DONE]" or '"error":{' in last or last.startswith(ENDS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["sound", "broken"])
async def test_no_request_of_the_document_makes_a_500_or_a_hang(mode: GenerationMode, embedded: EmbeddedValkey) -> None:
    seen: dict[str, set[int]] = {}

    def attack(url: str, operation: Any, conversation: str) -> None:
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
            if operation.method != "delete" and "conversation_id" in case.path_parameters:
                case.path_parameters["conversation_id"] = conversation
            response = session.request(**case.as_transport_kwargs(base_url=url), timeout=20)
            seen.setdefault(operation.label, set()).add(response.status_code)
            judge(response)

        ask()

    backend = ScriptedBackend(capacity=100)
    async with (
        served(backend, state_url=embedded.url) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        conversation = (await client.post("/v1/conversations", json={})).json()["id"]
        document = (await client.get("/openapi.json")).json()
        for operation in operations(document):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue  # there is nothing to break: any text is a path's parameter
            await asyncio.to_thread(attack, running.url, operation, conversation)
        assert (await client.get("/health")).status_code == 200
        assert backend.running == 0
        routes = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert seen.keys() <= routes
    if mode is GenerationMode.POSITIVE:
        assert seen.keys() == routes
        # What the document calls sound is mostly answered; the rest are limits that it cannot say.
        refused = {"POST /v1/embeddings"}
        posts = {label for label in routes if label.startswith("POST /")} - refused
        assert all(200 in seen[label] for label in posts), seen
    else:
        assert all(400 in statuses for label, statuses in seen.items() if label.startswith("POST /"))
