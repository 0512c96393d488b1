"""Server-sent events of a chat stream, in OpenAI's chunk format."""

from __future__ import annotations

import msgspec

from ..contract import FinishReason, ForebayError, Usage
from .errors import error_body

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the frames back
)

_encode = msgspec.json.encode


def usage_fields(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_frame(error: ForebayError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


class Chunks:
    """The frames of one stream. What does not change from chunk to chunk is encoded once."""

    def __init__(self, answer_id: str, created: int, model: str, *, include_usage: bool) -> None:
        head = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def _chunk(self, delta: bytes, finish: bytes = b"null") -> bytes:
        choice = b'{"index":0,"delta":' + delta + b',"logprobs":null,"finish_reason":' + finish + b"}"
        return self._head + choice + self._tail

    def role(self) -> bytes:
        return self._chunk(b'{"role":"assistant","content":""}')

    def text(self, text: str) -> bytes:
        return self._chunk(b'{"content":' + _encode(text) + b"}")

    def finish(self, reason: FinishReason) -> bytes:
        return self._chunk(b"{}", _encode(reason))

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage_fields(usage)) + b"}\n\n"
