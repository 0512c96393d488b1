"""Answers in OpenAI's shapes: a chat completion and a text completion, whole or in chunks. And in the simplest one.

An answer has one or more choices, told apart by their index. What does not change from chunk to chunk is encoded once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ..contract import Delta, FinishReason, ForebayError, TokenLogprob, Usage
from . import sse

_encode = msgspec.json.encode
#: JSON has no infinity; this is what OpenAI writes for a token that could not come.
_LEAST = -9999.0


def thinking_tokens(delta: Delta) -> int:
    """Tokens of thinking; where both came at once, as much of them as its part of the text."""
    if not delta.reasoning:
        return 0
    return delta.n_tokens * len(delta.reasoning) // (len(delta.reasoning) + len(delta.text))


@dataclass
class Collected:
    """A choice of an answer that is sent whole: the texts of its deltas, and why it ended."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    thinking_tokens: int = 0
    finish: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.content.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.logprobs.extend(delta.logprobs)
        self.thinking_tokens += thinking_tokens(delta)
        self.finish = delta.finish


class Format(Protocol):
    """How one answer looks on the wire. Frames are bytes of server-sent events."""

    def opening(self, index: int) -> bytes:
        """What comes before a choice's first text; may be nothing."""
        ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def finish(self, index: int, reason: FinishReason) -> bytes: ...

    def ending(self, usage: Usage) -> bytes:
        """All that comes behind the last choice's finish."""
        ...

    def failure(self, error: ForebayError) -> bytes:
        """What ends a stream that has begun and cannot go on."""
        ...

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        """The answer as one JSON object."""
        ...


class _Chunks:
    """Head and tail that all chunks of a stream share."""

    def __init__(self, id_prefix: str, kind: str, chunk_kind: str, model: str, *, include_usage: bool) -> None:
        self._head = {"id": f"{id_prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        self._head |= {"model": model, "system_fingerprint": None}
        self._before = b"data: " + _encode(self._head | {"object": chunk_kind})[:-1] + b',"choices":['
        self._include_usage = include_usage
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def ending(self, usage: Usage) -> bytes:
        if not self._include_usage:
            return sse.DONE
        return self._before + b'],"usage":' + _encode(_usage_fields(usage)) + b"}\n\n" + sse.DONE

    def failure(self, error: ForebayError) -> bytes:
        return sse.error_frame(error)

    def _whole(self, choices: list[dict[str, object]], usage: Usage) -> bytes:
        return _encode(self._head | {"choices": choices, "usage": _usage_fields(usage)})


class ChatFormat(_Chunks):
    """``logprobs``: they were asked for."""

    def __init__(self, model: str, *, include_usage: bool, logprobs: bool) -> None:
        super().__init__("chatcmpl", "chat.completion", "chat.completion.chunk", model, include_usage=include_usage)
        self._logprobs = logprobs

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'{"role":"assistant","content":""}')

    def delta(self, index: int, delta: Delta) -> bytes:
        parts = b""
        if delta.reasoning:
            parts = b'"reasoning_content":' + _encode(delta.reasoning)
        # A frame even without text (half a character, a held-back stop string, the end-of-turn token): a client that
        # times frames then times tokens.
        if delta.text or not parts:
            parts += (b"," if parts else b"") + b'"content":' + _encode(delta.text)
        known = _encode(_chat_logprobs(delta.logprobs)) if delta.logprobs else b"null"
        return self._chunk(index, b"{" + parts + b"}", known)

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self._chunk(index, b"{}", finish=_encode(reason))

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        shown: list[dict[str, object]] = []
        for index, choice in enumerate(choices):
            message: dict[str, object] = {"role": "assistant", "content": "".join(choice.content), "refusal": None}
            if reasoning := "".join(choice.reasoning):
                message["reasoning_content"] = reasoning
            known = _chat_logprobs(choice.logprobs) if self._logprobs else None
            shown.append({"index": index, "message": message, "logprobs": known, "finish_reason": choice.finish})
        return self._whole(shown, usage)

    def _chunk(self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, finish)
        return self._before + choice + self._after


class CompletionFormat(_Chunks):
    """``echoes`` has, for each choice, the text that is sent before its own."""

    def __init__(self, model: str, echoes: Sequence[str], *, include_usage: bool, logprobs: bool) -> None:
        super().__init__("cmpl", "text_completion", "text_completion", model, include_usage=include_usage)
        self._echoes = echoes
        self._logprobs = logprobs

    def opening(self, index: int) -> bytes:
        return self._chunk(index, self._echoes[index]) if self._echoes[index] else b""

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._chunk(index, delta.text, self._known(delta.logprobs) if delta.logprobs else None)

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return self._chunk(index, "", finish=reason)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        shown: list[dict[str, object]] = [
            {
                "index": index,
                "text": self._echoes[index] + "".join(choice.content),
                "logprobs": self._known(choice.logprobs) if self._logprobs else None,
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ]
        return self._whole(shown, usage)

    def _known(self, entries: Sequence[TokenLogprob]) -> dict[str, object]:
        return {
            "tokens": [_text(entry.data) for entry in entries],
            "token_logprobs": [max(_LEAST, entry.logprob) for entry in entries],
            "top_logprobs": [{_text(data): max(_LEAST, value) for data, value in entry.top} for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _chunk(
        self, index: int, text: str, known: dict[str, object] | None = None, finish: FinishReason | None = None
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": known, "finish_reason": finish}
        return self._before + _encode(choice) + self._after


class SimpleFormat:
    """An answer of POST /chat; its thinking is not told."""

    def __init__(self, session: str | None) -> None:
        self._session = session

    def opening(self, index: int) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        return b'data: {"answer":' + _encode(delta.text) + b"}\n\n"

    def finish(self, index: int, reason: FinishReason) -> bytes:
        return b""

    def ending(self, usage: Usage) -> bytes:
        return sse.DONE

    def failure(self, error: ForebayError) -> bytes:
        return sse.error_frame(error)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        return _encode({"answer": "".join(choices[0].content), "session_id": self._session})


def _chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, object]:
    def shown(data: bytes, value: float) -> dict[str, object]:
        return {"token": _text(data), "logprob": max(_LEAST, value), "bytes": list(data)}

    content = [
        shown(entry.data, entry.logprob) | {"top_logprobs": [shown(*top) for top in entry.top]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def _text(data: bytes) -> str:
    """A token as text. Parts of characters are escaped, so that different tokens look different."""
    return data.decode(errors="backslashreplace")


def _usage_fields(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "tier": usage.tier},
    }
