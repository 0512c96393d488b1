"""POST /v1/chat/completions and /v1/completions; /chat, the simple door; /v1/embeddings, which is refused."""

from __future__ import annotations

from functools import partial

from fastapi import Request
from starlette.responses import Response

from ...contract import Backend, InvalidRequest
from ..auth import caller_of
from ..completions import parse_completion
from ..conversation import idempotency_key, own_key, session_key
from ..conversations import parse_simple_chat, simple_call
from ..entrance import arrived_of
from ..formats import ChatFormat, CompletionFormat, Format, SimpleFormat
from ..schemas import parse_chat
from ..threads import new_session
from ..turn import answer, naming, sessions_of


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as one JSON object or, with `stream: true`, token by token."""
    arrived = arrived_of(request)
    if arrived.known is not None:
        return arrived.known
    card = request.app.state.backend.card
    call = parse_chat(arrived.body, card, request.app.state.settings.server)
    usage, logprobs = call.include_usage, call.requests[0].logprobs is not None

    async def form() -> Format:  # it may be kept with the answer, so it holds nothing large
        return ChatFormat(card.id, include_usage=usage, logprobs=logprobs)

    key = session_key(request.headers, caller_of(request.scope), call.session, call.user)
    if key is None:
        return await answer(arrived, call, form)
    return await answer(arrived, call, form, partial(sessions_of(request).begin, key), line=key.digest())


async def create_completion(request: Request) -> Response:
    """Go on from one or more prompts, as one JSON object or, with `stream: true`, token by token."""
    arrived = arrived_of(request)
    if arrived.known is not None:
        return arrived.known
    backend: Backend = request.app.state.backend
    call = parse_completion(arrived.body, backend.card, request.app.state.settings.server)
    usage, logprobs = call.include_usage, call.requests[0].logprobs is not None
    prompts, n = [one.prompt if call.echo else "" for one in call.requests], call.n

    async def form() -> Format:
        texts = [await _echo(backend, prompt) for prompt in prompts]
        echoes = [text for text in texts for _ in range(n)]
        return CompletionFormat(backend.card.id, echoes, include_usage=usage, logprobs=logprobs)

    return await answer(arrived, call, form)


async def simple_chat(request: Request) -> Response:
    """Say something, and get `{answer, session_id}`; with `stream: true` pieces, `{answer}` each."""
    arrived = arrived_of(request)
    state, headers = request.app.state, request.headers
    asked = parse_simple_chat(arrived.body)
    user = asked.user_id or ""
    if user and headers.get("x-user-id", user) != user:
        raise InvalidRequest("user_id and the header x-user-id differ; send one", param="user_id")
    key = session_key(headers, caller_of(request.scope), asked.session_id, user)
    if key is None and state.sessions is not None:
        session = new_session("chat", idempotency=idempotency_key(headers))
        key = own_key(headers, caller_of(request.scope), session, user)

    async def form() -> Format:
        return SimpleFormat(key.session if key else None)

    call = simple_call(asked.prompt, asked.stream, user, state.backend.card, state.settings.server)
    with naming("prompt"):
        if key is None:
            return await answer(arrived, call, form)
        return await answer(arrived, call, form, partial(sessions_of(request).begin, key), line=key.digest())


async def create_embedding(request: Request) -> Response:
    """Refused: a chat model has no embeddings worth the name."""
    model = request.app.state.backend.card.id
    raise InvalidRequest(f"{model!r} is a chat model; it gives no embeddings", param="model")


async def _echo(backend: Backend, prompt: str | tuple[int, ...] | None) -> str:
    return await backend.detokenize(prompt) if isinstance(prompt, tuple) else prompt or ""
