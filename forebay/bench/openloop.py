"""An open loop: each request is sent when it is due, whatever became of those before it.

What is measured, in seconds:

* **All latencies count from when a request was due**, not from when it was sent: a server that stalls makes those late
  that fell due meanwhile, and who measures must not hide that by sending them later.
* **Lag** is the generator's own fault: from when a request was due to when it was begun. **Stall** is the same of its
  event loop, seen by a sleeper: what has arrived cannot be read meanwhile.
* **TTFT** is the first frame with text, **gaps** are between such frames, in seconds per token (see load.py).
* A 429 or 503 is a refusal. Everything else that is no whole answer is a failure: other statuses, error frames, streams
  that break off. Who is still unanswered at the end is left, and counts as neither.

Connections are kept, as by a proxy in front of the server: thousands of refusals a second would else be measured as
thousands of handshakes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import resource
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import msgspec

from .client import Endpoint, events, reason
from .load import Plan

REFUSALS = (429, 503)
_AHEAD = 0.2  # seconds before the first request
_STALL_EVERY = 0.01


@dataclass(frozen=True, slots=True)
class Phase:
    """``rate`` requests per second, for so many seconds."""

    rate: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Due:
    """A request of ``user``, ``at`` seconds after the start."""

    at: float
    user: str = ""


@dataclass(frozen=True, slots=True)
class Manners:
    """How who asks behaves. ``retry``: after a refusal, up to ``most`` times, "after" what Retry-After says.

    ``leaves``: seconds without a first token after which it goes away. ``headers`` are sent with each request. ``keep``
    connections for the next one.
    """

    retry: Literal["never", "at once", "after"] = "never"
    most: int = 20
    leaves: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    keep: bool = True


@dataclass(slots=True)
class Outcome:
    """One request as it was sent. ``attempt`` 0 is the first try, ``number`` that of the request it belongs to.

    ``took``: to its end, ``first``: to the first text, ``lag``: to its sending, all from ``at``, when it was due.
    ``code``: of a refusal or an error frame. ``predicted``: what the server said that the first text would take.
    ``left``: the client went away.
    """

    number: int
    at: float
    user: str = ""
    attempt: int = 0
    lag: float = 0.0
    status: int = 0
    code: str = ""
    failure: str | None = None
    left: bool = False
    retry_after: float | None = None
    took: float = 0.0
    first: float | None = None
    gaps: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    predicted: float | None = None

    @property
    def refused(self) -> bool:
        return self.status in REFUSALS

    @property
    def whole(self) -> bool:
        """Answered to the end."""
        return self.status == 200 and self.failure is None and not self.left

    @property
    def gap(self) -> float:
        """The mean over its tokens; 0 of an answer of one frame."""
        return statistics.fmean(self.gaps) if self.gaps else 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """What became of all requests that fell due within ``seconds``. ``stalls``: how late the generator's loop woke."""

    plan: Plan
    seconds: float
    outcomes: tuple[Outcome, ...]
    stalls: tuple[float, ...] = ()


def poisson(phases: Iterable[Phase], seed: str) -> list[float]:
    """When requests fall due that know nothing of each other, phase after phase."""
    pick = random.Random(f"{seed}/arrivals")  # noqa: S311 - a workload, not a secret
    begin, found = 0.0, []
    for phase in phases:
        at = begin + pick.expovariate(phase.rate) if phase.rate else begin + phase.seconds
        while at < begin + phase.seconds:
            found.append(at)
            at += pick.expovariate(phase.rate)
        begin += phase.seconds
    return found


def steady(rate: float, seconds: float, seed: str) -> list[float]:
    """One request somewhere in each interval of 1 / rate: random, but as many for everybody."""
    pick = random.Random(f"{seed}/steady")  # noqa: S311 - as above
    return [(number + pick.random()) / rate for number in range(round(rate * seconds))]


def crowd(times: Iterable[float], users: int = 500) -> list[Due]:
    """Requests of so many users, in turn."""
    return [Due(at, f"user-{number % users}") for number, at in enumerate(times)]


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Frame(msgspec.Struct):
    """What is read of a streamed frame or a whole answer."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Frame).decode


async def run_open_loop(
    endpoint: Endpoint,
    plan: Plan,
    dues: Sequence[Due],
    seconds: float,
    *,
    manners: Manners = Manners(),
    grace: float = 60.0,
) -> Trace:
    """Send all ``dues``, which fall within ``seconds``; bodies as ``plan`` has them, the n-th prompt for the n-th of
    them. ``grace`` seconds after the end, who is not answered yet goes away. Raises Unreachable if there is no server.
    """
    _allow_files()
    async with _session(endpoint, manners, cache=plan.cache) as session:
        named = plan.model or await endpoint.first_model(session)
        generator = _Generator(endpoint, session, manners, time.perf_counter() + _AHEAD)
        stalls: list[float] = []
        watch = asyncio.create_task(_watch_stalls(stalls))
        for number, due in enumerate(dues):
            # Made before it is due, so that making it is no lag.
            body = msgspec.json.encode({**plan.body([plan.message(number)]), "model": named})
            await generator.until(due.at)
            generator.begin(number, due, body, stream=plan.stream)
        await generator.until(seconds)
        watch.cancel()
        await generator.end(grace)
        return Trace(plan, seconds, tuple(generator.outcomes), tuple(stalls))


def _session(endpoint: Endpoint, manners: Manners, *, cache: bool) -> aiohttp.ClientSession:
    if manners.keep:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    else:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={
            "Content-Type": "application/json",
            "x-forebay-cache": "on" if cache else "off",
            **({"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}),
            **manners.headers,
        },
    )


class _Generator:
    """Clients on one session. ``start`` is on time.perf_counter()."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession, manners: Manners, start: float) -> None:
        self.outcomes: list[Outcome] = []
        self._url = f"{endpoint.base}/chat/completions"
        self._session = session
        self._manners = manners
        self._start = start
        self._clients: set[asyncio.Task[None]] = set()
        self._broken: list[BaseException] = []

    def begin(self, number: int, due: Due, body: bytes, *, stream: bool) -> None:
        client = asyncio.create_task(self._ask(number, due, body, stream=stream))
        self._clients.add(client)
        client.add_done_callback(self._ended)

    def _ended(self, client: asyncio.Task[None]) -> None:
        self._clients.discard(client)
        if not client.cancelled() and (error := client.exception()) is not None:
            self._broken.append(error)

    async def until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, at - self._now()))

    async def end(self, grace: float) -> None:
        """All are done, or gone after so many seconds. Raises what went wrong here, not with the server."""
        if self._clients:
            await asyncio.wait(self._clients, timeout=grace)
        late = list(self._clients)
        for client in late:
            client.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if self._broken:
            raise self._broken[0]

    async def _ask(self, number: int, due: Due, body: bytes, *, stream: bool) -> None:
        """A request, and again as often as the manners have it."""
        at = due.at
        for attempt in itertools.count():
            outcome = Outcome(number, at, due.user, attempt)
            self.outcomes.append(outcome)
            await self._send(outcome, body, stream=stream)
            if not outcome.refused or self._manners.retry == "never" or attempt == self._manners.most:
                return
            at = self._now()
            if self._manners.retry == "after":
                at += outcome.retry_after or 1.0
                await self.until(at)

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _send(self, outcome: Outcome, body: bytes, *, stream: bool) -> None:
        outcome.lag = self._now() - outcome.at
        arrivals: list[float] = []
        patience = asyncio.timeout(self._manners.leaves)
        try:
            async with patience:
                await self._read(outcome, body, arrivals, patience, stream=stream)
        except TimeoutError:
            outcome.left = patience.expired()
            outcome.failure = None if outcome.left else "connection: timeout"
        except (aiohttp.ClientError, OSError) as error:
            outcome.failure = f"connection: {error or type(error).__name__}"
        except (msgspec.DecodeError, ValueError) as error:
            outcome.failure = f"not a chat frame: {error}"
        except asyncio.CancelledError:
            outcome.left = True
            raise
        finally:
            outcome.took = self._now() - outcome.at
            if arrivals:
                outcome.first = arrivals[0] - outcome.at
                tokens = (outcome.completion_tokens or len(arrivals)) - 1
                scale = max(1, tokens) / max(1, len(arrivals) - 1)
                outcome.gaps = tuple((b - a) / scale for a, b in itertools.pairwise(arrivals))
                outcome.completion_tokens = outcome.completion_tokens or len(arrivals)

    async def _read(
        self, outcome: Outcome, body: bytes, arrivals: list[float], patience: asyncio.Timeout, *, stream: bool
    ) -> None:
        headers = {"x-user-id": outcome.user} if outcome.user else None
        async with self._session.post(self._url, data=body, headers=headers) as response:
            outcome.status = response.status
            if response.status != 200:
                _refused(outcome, response.headers, await response.read())
                return
            if (told := response.headers.get("x-forebay-predicted-ttft-ms", "")).isdigit():
                outcome.predicted = int(told) / 1e3
            finished = False
            async for data in events(response.content) if stream else _whole(response):
                frame = _decode(data)
                if frame.error is not None:
                    outcome.code = frame.error.code or ""
                    outcome.failure = f"error frame: {frame.error.message}"
                    return
                for choice in frame.choices:
                    said = choice.delta or choice.message
                    if said is not None and said.content:
                        arrivals.append(self._now())
                        patience.reschedule(None)
                    finished |= choice.finish_reason is not None
                if frame.usage is not None:
                    _count(outcome, frame.usage)
            if not finished:
                outcome.failure = "stream broke off: no finish_reason"


async def _whole(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    yield await response.read()


def _refused(outcome: Outcome, headers: Mapping[str, str], body: bytes) -> None:
    try:
        error = _decode(body).error
        outcome.code = (error.code if error else None) or "none"
    except msgspec.DecodeError:
        outcome.code = "none"
    try:
        outcome.retry_after = float(headers.get("Retry-After", ""))
    except ValueError:
        outcome.retry_after = None
    if not outcome.refused:
        outcome.failure = reason(outcome.status, body)


def _count(outcome: Outcome, usage: _Usage) -> None:
    outcome.prompt_tokens = usage.prompt_tokens
    outcome.completion_tokens = usage.completion_tokens
    outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0


async def _watch_stalls(stalls: list[float]) -> None:
    while True:
        due = time.perf_counter() + _STALL_EVERY
        await asyncio.sleep(_STALL_EVERY)
        stalls.append(max(0.0, time.perf_counter() - due))


def _allow_files() -> None:
    """As many connections as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stand_back(by: int) -> None:
    """Let the server go first, for good. To be called when the servers are started: they would inherit it."""
    if by:
        os.nice(by)
