"""A closed loop of clients: each sends its next request as soon as its last one ended.

What is measured, in seconds on the client's clock:

* **TTFT**: from sending to the first frame with text. Frames without text (the role) do not count.
* **e2e**: from sending to the end of the answer.
* **ITL**: the gap between two frames with text, divided by the tokens a gap stands for. A server may merge tokens
  into one frame when it is busy, or split none off while a character is half done; frames do not say how many they
  carry, so each gap of a request stands for (completion_tokens - 1) / (frames - 1) tokens. That is exact when every
  frame is one token, and always exact in the mean: time from first to last text / (completion_tokens - 1).
* Token counts are the server's ``usage``. A server that sends none is counted in frames (``usage_missing``).

A request that is refused, breaks off, or ends in an error frame is a failure and counts in no latency. So are the
turns of a conversation that could not be asked because one before them failed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from .client import Endpoint, RequestFailed
from .workload import drawn, prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. ``prompt_tokens`` is in words; ``model`` None takes the server's first.

    ``prompts``: "distinct", "shared" (one for all), or from how many they are drawn. With ``turns``, each of the
    ``requests`` is a conversation of so many requests: the whole history and ``turn_words`` more words every time.
    ``cache``: answers may come from a cache of answers.
    """

    concurrency: int = 16
    requests: int = 64
    prompt_tokens: int = 300
    output_tokens: int = 100
    warmup: int = 2
    seed: str = "0"
    prompts: str | int = "distinct"
    turns: int = 1
    turn_words: int = 60
    stream: bool = True
    strict_openai: bool = False
    timeout: float = 600.0
    model: str | None = None
    cache: bool = False

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """A request. Greedy and, unless strict, of an exact length."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if not self.strict_openai:
            body["ignore_eos"] = True
        return body

    def message(self, index: int, turn: int = 0) -> dict[str, str]:
        """What the user of the ``index``-th request or conversation says in a turn."""
        match self.prompts:
            case "distinct":
                which = index
            case "shared":
                which = 0
            case int() as n:
                which = drawn(self.seed, index, n)
            case other:
                raise ValueError(f"prompts: {other!r}")
        if turn:
            return {"role": "user", "content": prompt(f"{self.seed}/turn {turn}", which, self.turn_words)}
        return {"role": "user", "content": prompt(self.seed, which, self.prompt_tokens)}


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. ``failure`` is None when it went well; ``itl`` is seconds per token, one value per gap."""

    e2e: float
    failure: str | None = None
    ttft: float | None = None
    itl: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    usage_missing: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """All samples of a run, and its wall time in seconds (warm-up excluded)."""

    plan: Plan
    url: str
    seconds: float
    samples: tuple[Sample, ...]


async def run_closed_loop(endpoint: Endpoint, plan: Plan, advance: Callable[[Sample], None] = lambda _: None) -> Result:
    """Warm up, then measure ``plan.requests`` requests. ``advance`` is called after each sample.

    Raises Unreachable if there is no server; requests that fail are samples, not errors.
    """
    # What is asked twice is computed twice, unless it is the cache that is measured. And a closed loop waits: who is
    # refused would ask again at once.
    headers = {"x-forebay-cache": "on" if plan.cache else "off", "x-slo-ttft-ms": str(round(1000 * plan.timeout))}
    async with endpoint.session(plan.timeout, headers) as session:
        # Asked even where the model is given: a server that is not there should be one line, not N failures.
        first = await endpoint.first_model(session)
        plan = replace(plan, model=plan.model or first)
        await _drive(endpoint, session, plan, range(plan.requests, plan.requests + plan.warmup), lambda _: None)
        start = time.perf_counter()
        samples = await _drive(endpoint, session, plan, range(plan.requests), advance)
        return Result(plan, endpoint.url, time.perf_counter() - start, tuple(samples))


async def _drive(
    endpoint: Endpoint,
    session: aiohttp.ClientSession,
    plan: Plan,
    indices: range,
    advance: Callable[[Sample], None],
) -> list[Sample]:
    todo = iter(indices)
    samples: list[Sample] = []

    async def client() -> None:
        for index in todo:
            async for sample in _converse(endpoint, session, plan, index):
                samples.append(sample)
                advance(sample)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, len(indices))):
            group.create_task(client())
    return samples


async def _converse(
    endpoint: Endpoint, session: aiohttp.ClientSession, plan: Plan, index: int
) -> AsyncIterator[Sample]:
    """One request, or the requests of one conversation: always ``plan.turns`` samples."""
    history: list[dict[str, str]] = []
    for turn in range(plan.turns):
        history.append(plan.message(index, turn))
        sample, answer = await _measure(endpoint, session, plan.body(history))
        yield sample
        if sample.failure is not None:
            for _ in range(turn + 1, plan.turns):
                yield Sample(0.0, failure="not asked: an earlier turn failed")
            return
        history.append({"role": "assistant", "content": answer})


async def _measure(endpoint: Endpoint, session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[Sample, str]:
    """The request as a sample, and the answer's text."""
    arrivals: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    start = time.perf_counter()
    try:
        async for chunk in endpoint.chat(session, body):
            if chunk.text:
                arrivals.append(time.perf_counter())
                pieces.append(chunk.text)
            if chunk.usage:
                usage = dict(chunk.usage)
    except RequestFailed as error:
        return Sample(time.perf_counter() - start, failure=str(error)), ""
    end = time.perf_counter()
    tokens = int(usage.get("completion_tokens") or len(arrivals))
    details = usage.get("prompt_tokens_details") or {}
    sample = Sample(
        e2e=end - start,
        ttft=arrivals[0] - start if arrivals and body["stream"] else None,
        itl=_per_token_gaps(arrivals, tokens),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=tokens,
        cached_tokens=int(details.get("cached_tokens") or 0),
        usage_missing=not usage,
    )
    return sample, "".join(pieces)


def _per_token_gaps(arrivals: list[float], tokens: int) -> tuple[float, ...]:
    """Gaps between frames, scaled to seconds per token; see the top of this file."""
    if len(arrivals) < 2 or tokens < 2:
        return ()
    tokens_per_gap = (tokens - 1) / (len(arrivals) - 1)
    return tuple((b - a) / tokens_per_gap for a, b in itertools.pairwise(arrivals))
