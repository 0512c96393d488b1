"""What crosses the walls between rooms. Standard library only, so every room may import it.

The error tree (a foreign error is mapped to one of these at the border of its room, nowhere else)::

    ForebayError                500  server_error
    ├── InvalidRequest          400  invalid_request_error, names the field
    │   └── ContextTooLong      400  code context_length_exceeded
    ├── Unauthorized            401  authentication_error
    ├── NotFound                404  not_found_error
    │   └── ConversationNotFound     also for one that is another's
    ├── MethodNotAllowed        405  invalid_request_error
    ├── BodyTooLarge            413  invalid_request_error
    ├── TryLater                     has retry_after
    │   ├── Conflict            409  invalid_request_error
    │   ├── RateLimited         429  rate_limit_error, this key or user has more than its part
    │   └── Busy                503  overloaded_error
    │       ├── DeadlineExceeded     waited in the queue longer than allowed
    │       ├── EngineUnavailable    the engine is starting, restarting or gone
    │       ├── StateUnavailable     Redis or Valkey does not answer, or not in time
    │       └── StateFull            its memory is full
    ├── StateCorrupt            500  what it answers is not what was written
    ├── EngineFailure           500  the engine failed this request while it ran
    └── Unsupported             500  a model or setting is refused at start (never sent over HTTP)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

FinishReason = Literal["stop", "length"]


class ForebayError(Exception):
    """Base of all errors that a caller may see. ``param`` names the request field at fault."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ForebayError):
    status = 400
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class Unauthorized(ForebayError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class NotFound(ForebayError):
    status = 404
    kind = "not_found_error"


class ConversationNotFound(NotFound):
    code = "conversation_not_found"


class MethodNotAllowed(ForebayError):
    status = 405
    kind = "invalid_request_error"


class TryLater(ForebayError):
    """The same request may do later; ``retry_after`` is in seconds. ``code``: the reason, where it is another than the
    class says."""

    def __init__(
        self, message: str, *, retry_after: float = 1.0, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class Conflict(TryLater):
    """Somebody else is at it."""

    status = 409
    kind = "invalid_request_error"
    code = "turn_in_progress"


class RateLimited(TryLater):
    """Others get their part; this one has had its own."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limited"


class BodyTooLarge(ForebayError):
    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class Busy(TryLater):
    """No room now."""

    status = 503
    kind = "overloaded_error"
    code = "queue_full"


class DeadlineExceeded(Busy):
    code = "deadline_exceeded"


class EngineUnavailable(Busy):
    code = "engine_unavailable"


class StateUnavailable(Busy):
    code = "state_unavailable"


class StateFull(Busy):
    code = "state_full"


class StateCorrupt(ForebayError):
    code = "state_corrupt"


class EngineFailure(ForebayError):
    code = "engine_failure"


class Unsupported(ForebayError):
    code = "unsupported"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message as plain text. ``role`` is one of system, user, assistant. ``reasoning``: what an answer said
    before its content, where the client sends it back."""

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that does not say is sampled with: the model's own recommendation, or else OpenAI's defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class GenRequest:
    """One validated request, still text: ``messages`` of a chat, or else a ``prompt``.

    A prompt is text (a BOS goes in front where the model wants one; ``parse_special``: special tokens written in it
    count as such) or token ids as they are. ``variables`` go to the chat template.

    ``max_tokens`` None means as many as the context allows. ``temperature`` 0 is greedy; ``top_k`` 0 and
    ``top_p`` 1 are off. ``seed`` None: the backend draws one. ``salt`` separates prefix caches (one per tenant).
    ``ttl``: a turn of a conversation that may go on for so many seconds; its KV is kept the longer. 0: it is none.
    ``logit_bias`` maps token ids to what is added to their logits. No text of ``bad_words`` is generated, neither as it
    is nor after a space, in the tokens that it is usually written in. ``logprobs``: log probabilities of each token and
    of so many of the likeliest; None: of none.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    parse_special: bool = False
    variables: Mapping[str, bool | str] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    salt: str = ""
    ttl: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready to run: ``n_tokens`` prompt tokens, of which ``cached`` need probably not be computed, and at
    most ``max_tokens`` of an answer; ``key`` is SHA-256 over all that decides the answer.

    ``order`` and ``resume`` belong to the backend; the server only hands them back: ``resume`` in the Resume of the
    conversation's next turn (empty for a request that has none itself).
    """

    n_tokens: int
    key: bytes
    order: object
    resume: bytes = b""
    max_tokens: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    """How a chat's prompt goes on from earlier turns, which are the first ``known`` of its messages and end with an
    answer. ``turns``: of each, the oldest first, ``Prepared.resume`` and the ``Delta.ids`` of its answer."""

    known: int = 0
    turns: tuple[tuple[bytes, tuple[int, ...]], ...] = ()


#: Where the KV of a prompt's beginning may come from, the fastest first.
TIERS = ("none", "device", "host", "disk")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request so far. ``cached_tokens`` of the prompt were known from before; ``tier`` is the
    slowest place that any of them came from: device, host or disk, or none."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    tier: str = "none"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer: ``data`` is its bytes, for a special token as the vocabulary writes it. ``top``: bytes
    and log probability (natural) of the likeliest. ``offset``: characters of the answer before it."""

    data: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one request: new text (may be empty), the tokens behind it, and on the last one why it ended.

    ``started`` (seconds on time.monotonic()) is when its prefill began. ``reasoning``: new text that the model marks as
    its thinking. A token's ``logprobs`` come with its first character, its id in ``ids`` with its last; the ids are
    those of the answer's text, so the token that ended it is not among them, nor is what a stop string took away.
    """

    text: str
    n_tokens: int
    usage: Usage
    started: float
    finish: FinishReason | None = None
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a backend computes, as it measures it: a step takes ``base`` seconds, and ``decode`` for each sequence
    that generates in it, and ``prefill`` for each token of a prompt. Beside such sequences a step takes at most
    ``chunk`` tokens of prompts."""

    base: float
    decode: float
    prefill: float
    chunk: int


@dataclass(frozen=True, slots=True)
class Load:
    """What a backend says of itself now. Counters are cumulative over restarts; ``pages`` maps state -> count.

    ``credits`` is how many more requests it can take at once (front + engine agree on it; may be negative).
    ``heartbeat_age`` is seconds since the last news from the engine. ``step_tokens`` maps an upper bound
    (tokens in a step) -> number of steps at or under it, cumulative, for the iteration histogram. ``tiers``: pages of
    KV below the device by what became of them (``disk_hit``, ``saved``, ...), and ``disk_bytes``. ``slots``: sequences
    that it can run at once; ``owed``: prompt tokens that it has taken and not computed yet; ``pace``: None where it was
    not measured.
    """

    ready: bool
    state: str
    running: int = 0
    waiting: int = 0
    credits: int = 0
    heartbeat_age: float = 0.0
    restarts: int = 0
    pages: Mapping[str, int] = field(default_factory=dict)
    page_size: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_tokens: Mapping[int, int] = field(default_factory=dict)
    step_tokens_sum: int = 0
    tiers: Mapping[str, int] = field(default_factory=dict)
    slots: int = 0
    owed: int = 0
    pace: Pace | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the server tells of the model it serves. ``max_context`` is prompt + answer, in tokens."""

    id: str
    created: int
    max_context: int
    vocab_size: int
    sampling: SamplingDefaults = SamplingDefaults()
    summary: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, and how the vocabulary writes each."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]


class Backend(Protocol):
    """What the server needs of an engine, local or upstream. Entered once for its whole life."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    @property
    def card(self) -> ModelCard: ...

    async def prepare(self, request: GenRequest, resume: Resume | None = None) -> Prepared:
        """Template, tokenize, check against the limits. With ``resume``, the prompt is an extension of the earlier
        turns' tokens where that can be. Raises InvalidRequest / ContextTooLong."""
        ...

    async def tokenize(
        self,
        source: str | tuple[Message, ...],
        *,
        bos: bool = True,
        parse_special: bool = False,
        generation_prompt: bool = True,
        variables: Mapping[str, bool | str] | None = None,
    ) -> Tokens:
        """Text as in GenRequest (``bos``: with a BOS in front where the model wants one), or messages through the
        template (``generation_prompt``: up to where an answer begins). Raises InvalidRequest / ContextTooLong."""
        ...

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, all within the vocabulary. Special tokens have none; half a character is dropped."""
        ...

    def open(
        self, prepared: Prepared, *, choice: int = 0, deadline: float | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Run it; entering does not suspend. Leaving the context for any reason is the cancel. ``choice`` is added to
        the seed. ``deadline`` (time.monotonic() seconds): a request whose prefill has not begun by then ends with
        DeadlineExceeded."""
        ...

    async def forget(self, salt: str, resume: Resume, spare: int = 0) -> None:
        """Keep no KV of these turns that nobody else has, in any tier; but that of the first ``spare`` of them."""
        ...

    def load(self) -> Load:
        """What it says of itself now. Cheap: read on every admission."""
        ...

    def watch(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called in the event loop whenever load() may have changed."""
        ...
