"""/health, /ready, /metrics, the OpenAPI document and the access log."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import MODEL, ScriptedBackend, Served, body, fail, say, served

from forebay.config import ServerSettings
from forebay.contract import EngineFailure
from forebay.server.log import configure, formatter

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    """Series as printed, without the model's label: ``name{label=value}`` -> value."""
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert labels.pop("model_name") == MODEL
            inner = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[f"{sample.name}{{{inner}}}" if inner else sample.name] = sample.value
    return found


async def test_health(client: httpx.AsyncClient, server: Served) -> None:
    for state in ("ready", "loading", "restarting"):
        server.backend.state, server.backend.ready = state, state == "ready"
        assert (await client.get("/health")).json() == {"status": "ok", "state": state}
    server.backend.state = "failed"
    assert (await client.get("/health")).status_code == 503


async def test_ready_says_why_not(client: httpx.AsyncClient, server: Served) -> None:
    backend = server.backend

    async def reason() -> str:
        response = await client.get("/ready")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        return str(response.json()["error"]["message"])

    assert (await client.get("/ready")).status_code == 200
    backend.capacity = 0
    assert (await client.get("/ready")).status_code == 200  # overload stays ready
    backend.heartbeat_age = 2.9
    assert (await client.get("/ready")).status_code == 200
    backend.heartbeat_age = 3.0
    assert "no sign of life" in await reason()
    backend.ready, backend.state = False, "warming up"
    assert "warming up" in await reason()
    server.app.state.draining = True
    assert "draining" in await reason()


async def test_load_metrics(client: httpx.AsyncClient) -> None:
    found = await scrape(client)
    assert found["vllm:num_requests_running"] == 0
    assert found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == pytest.approx(0.3)
    assert found["vllm:prefix_cache_queries_total"] == 100
    assert found["vllm:prefix_cache_hits_total"] == 40
    assert found["vllm:num_preemptions_total"] == 3
    assert found["vllm:cache_config_info{block_size=16,num_gpu_blocks=10}"] == 1
    assert found["vllm:iteration_tokens_total_bucket{le=8.0}"] == 4
    assert found["vllm:iteration_tokens_total_bucket{le=64.0}"] == 9
    assert found["vllm:iteration_tokens_total_bucket{le=+Inf}"] == found["vllm:iteration_tokens_total_count"] == 10
    assert found["vllm:iteration_tokens_total_sum"] == 321
    assert found["forebay:kv_pages{state=running}"] == 2
    assert found["forebay:engine_restarts_total"] == 2
    assert found["vllm:request_success_total{finished_reason=stop}"] == 0
    assert found["vllm:admission_rejections_total{reason=queue_full}"] == 0


async def test_counts_agree_with_each_other_and_with_the_client() -> None:
    backend = ScriptedBackend(say(pause=0.02), capacity=3)
    async with served(backend, max_queue=4) as running, httpx.AsyncClient(base_url=running.url) as client:
        fields = [{"stream": True, "stream_options": {"include_usage": True}}, {}]
        responses = await asyncio.gather(*(client.post(CHAT, json=body(**fields[i % 2])) for i in range(20)))
        backend.script = fail(EngineFailure("x"), after=2)
        broken = [await client.post(CHAT, json=body(stream=True)) for _ in range(3)]
        backend.script = fail(EngineFailure("x"))
        nothing = await client.post(CHAT, json=body())
        backend.ready = False
        unready = await client.post(CHAT, json=body())
        found = await scrape(client)

    usages = []
    for response in (r for r in responses if r.status_code == 200):
        if response.headers["content-type"].startswith("text/event-stream"):
            usages.append(json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["usage"])
        else:
            usages.append(response.json()["usage"])
    done, refused = len(usages), sum(r.status_code == 503 for r in responses)
    assert done >= 7
    assert refused > 0
    assert done + refused == 20
    assert (nothing.status_code, unready.status_code) == (500, 503)
    prompt, answer = 6, sum(u["completion_tokens"] for u in usages)

    first_tokens = done + len(broken)
    assert found["vllm:request_success_total{finished_reason=stop}"] == done
    assert found["vllm:e2e_request_latency_seconds_count"] == done
    assert found["vllm:request_decode_time_seconds_count"] == done
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time"):
        assert found[f"vllm:{name}_seconds_count"] == first_tokens
    assert found["vllm:prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usages) + prompt * len(broken)
    assert found["vllm:generation_tokens_total"] == answer + 2 * len(broken)
    assert found["vllm:inter_token_latency_seconds_count"] == found["vllm:generation_tokens_total"] - first_tokens
    assert found["vllm:admission_rejections_total{reason=queue_full}"] == refused
    assert found["vllm:admission_rejections_total{reason=engine_unavailable}"] == 1
    assert found["forebay:request_errors_total{code=engine_failure,model_name=scripted}"] == len(broken) + 1
    assert found["forebay:cancelled_total"] == 0


async def test_openapi_lists_the_request_schema(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    posted = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schemas = document["components"]["schemas"]
    fields = schemas[posted.rsplit("/", 1)[1]]["properties"]
    assert {"model", "messages", "temperature", "stream_options"} <= set(fields)
    refs = [part.split('"')[0] for part in json.dumps(document).split('"$ref": "')[1:]]
    assert refs
    assert all(ref.rsplit("/", 1)[1] in schemas for ref in refs)


async def test_one_access_line_per_request(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="forebay.access")
    await client.post(f"{CHAT}?key=secret", json=body(stream=True), headers={"x-request-id": "mine"})
    await client.get("/no%0Awhere")
    records = [r for r in caplog.records if r.name == "forebay.access"]
    lines = [json.loads(formatter("json").format(r)) for r in records]
    assert len(lines) == 2
    chat, missing = lines
    expected = {
        "level": "info",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "prompt_tokens": 6,
        "completion_tokens": 7,
        "request_id": "mine",
    }
    assert expected.items() <= chat.items()
    assert chat["ms"] > 0
    assert (missing["path"], missing["status"]) == ("/no%0Awhere", 404)
    text = formatter("text").format(records[0])
    assert f"method=POST path={CHAT} status=200" in text
    assert "request_id=mine" in text
    assert "capital" not in text + json.dumps(lines)
    assert "secret" not in text + json.dumps(lines)


def test_log_settings_reach_every_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root, access = logging.getLogger(), logging.getLogger("uvicorn.access")
    monkeypatch.setattr(root, "handlers", [])
    levels = root.level, access.level
    try:
        configure(ServerSettings(log_format="json", log_level="warning"))
        logging.getLogger("forebay.server").info("quiet")
        logging.getLogger("uvicorn.error").warning("loud")
    finally:
        root.setLevel(levels[0])
        access.setLevel(levels[1])
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [("warning", "loud")]
