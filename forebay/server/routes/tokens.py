"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from ...config import Settings
from ...contract import Backend, Busy
from ..body import read_body
from ..tokens import parse_detokenize, parse_tokenize


async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of messages as the chat template renders them."""
    backend: Backend = request.app.state.backend
    settings: Settings = request.app.state.settings
    with _place(request.app.state):
        body = await read_body(request, int(settings.server.max_body))
        asked = parse_tokenize(body, backend.card, settings.server)
        tokens = await backend.tokenize(
            asked.source(),
            bos=asked.add_special_tokens is not False,
            parse_special=asked.parse_special is True,
            generation_prompt=asked.add_generation_prompt is not False,
            variables=asked.chat_template_kwargs,
        )
    answer: dict[str, object] = {"count": len(tokens.ids), "max_model_len": backend.card.max_context}
    answer["tokens"] = tokens.ids
    if asked.return_token_strs:
        answer["token_strs"] = tokens.texts
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    backend: Backend = request.app.state.backend
    settings: Settings = request.app.state.settings
    with _place(request.app.state):
        body = await read_body(request, int(settings.server.max_body))
        text = await backend.detokenize(parse_detokenize(body, backend.card))
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")


@contextmanager
def _place(state: Any) -> Iterator[None]:
    """As many at once as chats may wait: each holds a body. Raises Busy."""
    if state.tokenizing >= state.settings.max_queue:
        raise Busy(f"{state.tokenizing} requests are being tokenized already", retry_after=1)
    state.tokenizing += 1
    try:
        yield
    finally:
        state.tokenizing -= 1
