"""Prometheus metrics under the names that dashboards for vLLM already read, and ``forebay:*`` for what is ours.

What the backend says of itself is read from Load at scrape time. What only the front sees of a request (latencies, its
ending) is counted by one Turn per request; tokens are counted once where the backend gives them out, however many
requests they are told to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..admission.ask import Ticket
from ..admission.gate import Gate
from ..contract import Busy, DeadlineExceeded, Delta, FinishReason, ForebayError, Load, RateLimited

#: How the answer cache took part: the answer was there, or there and too old; another request's generation was joined;
#: this one's was begun, which others may join; or not at all.
Result = Literal["hit", "stale", "coalesced", "miss", "bypass"]

#: Why a request may be refused for want of room, or of what is left of somebody's part.
REASONS = (
    *("queue_full", "queued_tokens", "predicted_wait", "deadline_exceeded", "engine_unavailable"),
    *("key_rate", "user_concurrency", "user_share", "user_tokens", "shed_batch", "shed_new"),
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAPS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_RATIOS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_SPANS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0)


class Metrics:
    """All metrics of one app. ``cached()`` is the bytes that its answer cache takes."""

    def __init__(self, model: str, load: Callable[[], Load], gate: Gate, cached: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_LoadCollector(model, load, lambda: gate.waiting))

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(name, text, registry=registry).set_function(value)

        gauge("forebay:answer_cache_bytes", "Bytes that the answer cache takes.", cached)
        gauge("forebay:brownout_level", "How much is done without while requests wait for long.", lambda: gate.level)
        gauge("forebay:queued_tokens", "Prompt tokens that wait at the gate.", lambda: gate.queued_tokens)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=registry, buckets=buckets).labels(model)

        def by_cause(name: str, text: str, label: str) -> Callable[[str], Counter]:
            family = Counter(name, text, ["model_name", label], registry=registry)
            return lambda value: family.labels(model, value)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.success = by_cause("vllm:request_success", "Requests answered to the end.", "finished_reason")
        self.rejections = by_cause("vllm:admission_rejections", "Chats refused before their first token.", "reason")
        self.errors = by_cause("forebay:request_errors", "Chats that failed after they were accepted.", "code")
        self.cancelled = Counter("forebay:cancelled", "Chats whose client went away or was cut.", registry=registry)
        self.admitted = Counter("forebay:admitted", "Generations that were let in.", registry=registry)
        self.expired = Counter("forebay:expired", "Chats that waited in vain, as long as they may.", registry=registry)
        self.prediction = Histogram(
            "forebay:ttft_prediction_ratio",
            "Time to first token of a generation, observed over predicted.",
            registry=registry,
            buckets=_RATIOS,
        )
        results = Counter(
            "forebay:answer_cache", "Requests by what the answer cache did.", ["result"], registry=registry
        )
        self.results = {result: results.labels(result) for result in get_args(Result)}
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _WAITS)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Time between two tokens of a request.", _GAPS)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _SPANS)
        self.queue_time = histogram("vllm:request_queue_time_seconds", "Arrival to start of prefill.", _WAITS)
        self.prefill_time = histogram("vllm:request_prefill_time_seconds", "Start of prefill to first token.", _WAITS)
        self.decode_time = histogram("vllm:request_decode_time_seconds", "First token to last token.", _SPANS)
        # A series that exists from the start has a rate from its first event on.
        for finish in ("stop", "length"):
            self.success(finish)
        for reason in REASONS:
            self.rejections(reason)

    def turn(self, arrival: float, choices: int, result: Result) -> Turn:
        self.results[result].inc()
        return Turn(self, arrival, choices, own=result in ("miss", "bypass"))

    def generation(self, prompt_tokens: int, ticket: Ticket) -> Callable[[Delta], None]:
        """Of one that was let in; to be called with all that the backend says to prompts of so many tokens together."""
        self.admitted.inc()
        begun = False

        def saw(delta: Delta) -> None:
            nonlocal begun
            if delta.n_tokens > 0:
                self.generation_tokens.inc(delta.n_tokens)
                if not begun:
                    begun = True
                    self.prompt_tokens.inc(prompt_tokens)
                    if ticket.predicted:
                        self.prediction.observe((time.monotonic() - ticket.ask.arrival) / ticket.predicted)

        return saw

    def rejected(self, error: ForebayError) -> None:
        self.rejections(error.code or "other").inc()
        if isinstance(error, DeadlineExceeded):
            self.expired.inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Turn:
    """Counts one request. The first ending counts; a later one is ignored, so that all endings add up.

    ``arrival`` is in seconds on time.monotonic(). It ends well when all ``choices`` have. Of several choices the first
    token of any is the request's first. ``own``: the generation was begun for it; else how long the engine took for
    each part of it is no news of this request.
    """

    def __init__(self, metrics: Metrics, arrival: float, choices: int, *, own: bool) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._open = choices
        self._own = own
        self._first: float | None = None
        self._last: dict[int, float] = {}  # choice -> when its last token came
        self._finish: FinishReason = "stop"
        self._ended = False

    def saw(self, choice: int, delta: Delta) -> None:
        metrics, now = self._metrics, time.monotonic()
        if delta.n_tokens > 0:
            if self._first is None:
                self._first = now
                metrics.ttft.observe(now - self._arrival)
                if self._own:
                    metrics.queue_time.observe(max(0.0, delta.started - self._arrival))
                    metrics.prefill_time.observe(max(0.0, now - delta.started))
            if self._own and choice in self._last:
                gap = (now - self._last[choice]) / delta.n_tokens
                for _ in range(delta.n_tokens):
                    metrics.itl.observe(gap)
            self._last[choice] = now
        if delta.finish is not None:
            self._open -= 1
            self._finish = "length" if delta.finish == "length" else self._finish
            if not self._open and self._end():
                metrics.success(self._finish).inc()
                metrics.e2e.observe(now - self._arrival)
                if self._own and self._first is not None:
                    metrics.decode_time.observe(max(self._last.values()) - self._first)

    def failed(self, error: ForebayError) -> None:
        if self._end():
            if isinstance(error, Busy | RateLimited) and self._first is None:
                self._metrics.rejected(error)
            else:
                self._metrics.errors(error.code or error.kind).inc()

    def cancelled(self) -> None:
        if self._end():
            self._metrics.cancelled.inc()

    def _end(self) -> bool:
        first, self._ended = not self._ended, True
        return first


class _LoadCollector(Collector):
    def __init__(self, model: str, load: Callable[[], Load], waiting: Callable[[], int]) -> None:
        self._model, self._load, self._waiting = model, load, waiting

    def describe(self) -> Iterable[Metric]:
        return ()  # names are fixed; this spares a call of load() at registration

    def collect(self) -> Iterator[Metric]:
        load, model = self._load(), {"model_name": self._model}

        def gauge(name: str, text: str, value: float, labels: dict[str, str]) -> Metric:
            family = GaugeMetricFamily(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            return family

        def counter(name: str, text: str, value: float, labels: dict[str, str]) -> Metric:
            family = CounterMetricFamily(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            return family

        pages = sum(load.pages.values())
        held = pages - load.pages.get("free", 0) - load.pages.get("cached", 0)  # cached pages are given up on demand
        yield gauge("vllm:num_requests_running", "Requests in the engine's batch.", load.running, model)
        waiting = self._waiting() + load.waiting
        yield gauge("vllm:num_requests_waiting", "Requests that wait, in front and engine.", waiting, model)
        usage = held / pages if pages else 0.0
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV pages in use; 1 is all.", usage, model)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", load.prefix_queries, model)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", load.prefix_hits, model)
        yield counter("vllm:num_preemptions", "Requests put back to make room.", load.preemptions, model)
        shape = model | {"block_size": str(load.page_size), "num_gpu_blocks": str(pages)}
        yield gauge("vllm:cache_config_info", "Shape of the KV cache.", 1, shape)
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens in one engine step.", labels=list(model))
        buckets = [(str(float(bound)), float(load.step_tokens[bound])) for bound in sorted(load.step_tokens)]
        steps.add_metric(list(model.values()), [*buckets, ("+Inf", float(load.steps))], load.step_tokens_sum)
        yield steps
        state = GaugeMetricFamily("forebay:kv_pages", "KV pages by state.", labels=["state"])
        for name, count in load.pages.items():
            state.add_metric([name], count)
        yield state
        tiers = CounterMetricFamily("forebay:kv_tier_pages", "KV pages below the device, by fate.", labels=["event"])
        for name, count in load.tiers.items():
            if name != "disk_bytes":
                tiers.add_metric([name], count)
        yield tiers
        yield gauge("forebay:kv_disk_bytes", "KV of conversations on disk.", load.tiers.get("disk_bytes", 0), {})
        yield counter("forebay:engine_restarts", "Times the engine was started again.", load.restarts, {})
