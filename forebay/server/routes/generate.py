"""POST /v1/chat/completions and /v1/completions; /v1/embeddings, which is refused."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...contract import Backend, GenRequest, InvalidRequest
from ..auth import caller_of
from ..completions import parse_completion
from ..conversation import session_key
from ..formats import ChatFormat, CompletionFormat, Format
from ..schemas import parse_chat
from ..turn import answer, let_in


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation, as one JSON object or, with `stream: true`, token by token."""
    arrived = await let_in(request)
    card = request.app.state.backend.card
    call = parse_chat(arrived.body, card, request.app.state.settings.server)

    async def form() -> Format:
        wanted = call.requests[0].logprobs is not None
        return ChatFormat(card.id, include_usage=call.include_usage, logprobs=wanted)

    key = session_key(request.headers, caller_of(request.scope), call.session, call.user)
    return await answer(arrived, call, form, key)


async def create_completion(request: Request) -> Response:
    """Go on from one or more prompts, as one JSON object or, with `stream: true`, token by token."""
    arrived = await let_in(request)
    backend: Backend = request.app.state.backend
    call = parse_completion(arrived.body, backend.card, request.app.state.settings.server)

    async def form() -> Format:
        texts = [await _echo(backend, one) if call.echo else "" for one in call.requests]
        echoes = [text for text in texts for _ in range(call.n)]
        wanted = call.requests[0].logprobs is not None
        return CompletionFormat(backend.card.id, echoes, include_usage=call.include_usage, logprobs=wanted)

    return await answer(arrived, call, form, None)


async def create_embedding(request: Request) -> Response:
    """Refused: a chat model has no embeddings worth the name."""
    model = request.app.state.backend.card.id
    raise InvalidRequest(f"{model!r} is a chat model; it gives no embeddings", param="model")


async def _echo(backend: Backend, asked: GenRequest) -> str:
    return await backend.detokenize(asked.prompt) if isinstance(asked.prompt, tuple) else asked.prompt or ""
