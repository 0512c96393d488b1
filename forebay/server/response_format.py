"""Answers in the shape of OpenAI's /v1/responses: one object, or the events that lead to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..contract import Busy, Delta, FinishReason, ForebayError, Usage
from ..state.sessions import Turn
from .conversation import replayed
from .errors import error_body
from .formats import Collected, thinking_tokens
from .items import has_message, message_item, output_items, output_part, reasoning_item

_encode = msgspec.json.encode
_Kind = Literal["reasoning", "message"]
#: What is the same for all of them.
_CONSTANT: Mapping[str, Any] = {
    "object": "response",
    "background": False,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
}


class ResponseFormat:
    """One response. ``head`` is what responses.parse_response made of its request. ``replay``: the turn that is told
    again, if it is one. ``after``: the number of the last event that was seen before; a stream goes on behind it.

    Events are numbered by what is said, not by how it comes: one with text counts for each character, and has the
    number of its last. So all streams of a response agree, of its pieces or of the whole (decision 0012).
    """

    def __init__(self, id: str, head: Mapping[str, Any], replay: Turn | None = None, after: int = -1) -> None:
        self._id = id
        self._turn = id[-32:]
        self._head = head
        self._replay = replay
        self._after = after
        self._number = 0  # of the next event
        self._created = False
        self._open: _Kind | None = None
        self._index = -1  # of the item that is open, or was the last
        self._said: dict[_Kind, list[str]] = {"reasoning": [], "message": []}
        self._thinking = 0
        self._finish: FinishReason | None = None

    def opening(self, index: int) -> bytes:
        self._created = True
        running = _object(self._id, self._head, "in_progress")
        created = self._event("response.created", response=running)
        return created + self._event("response.in_progress", response=running)

    def delta(self, index: int, delta: Delta) -> bytes:
        self._thinking += thinking_tokens(delta)
        frames = self._say("reasoning", delta.reasoning) if delta.reasoning else b""
        return frames + self._say("message", delta.text) if delta.text else frames

    def finish(self, index: int, reason: FinishReason) -> bytes:
        self._finish = reason
        frames = b""
        if self._open != "message" and has_message("", self._text("reasoning"), self._ended()):
            frames = self._close() + self._begin("message")
        return frames + self._close()

    def ending(self, usage: Usage) -> bytes:
        whole = self._whole(self._text("message"), self._text("reasoning"), usage, self._thinking)
        return self._event(f"response.{whole['status']}", response=whole)

    def failure(self, error: ForebayError) -> bytes:
        frames = b"" if self._created else self.opening(0)
        known = msgspec.json.decode(error_body(error))["error"]
        # OpenAI's own codes, which are few.
        known["code"] = "rate_limit_exceeded" if isinstance(error, Busy) else "server_error"
        failed = _object(self._id, self._head, "failed")
        failed["error"] = known
        text, reasoning = self._text("message"), self._text("reasoning")
        if text or reasoning:
            failed["output"] = output_items(self._turn, text, reasoning, None)
        return frames + self._event("response.failed", response=failed)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        (choice,) = choices
        self._finish = choice.finish
        text, reasoning = "".join(choice.content), "".join(choice.reasoning)
        return _encode(self._whole(text, reasoning, usage, choice.thinking_tokens))

    def _whole(self, text: str, reasoning: str, usage: Usage, thinking: int) -> dict[str, Any]:
        if self._replay is not None:  # which knows better than one that was told all at once
            thinking = self._replay.reasoning_tokens
        return _whole(self._id, self._head, (text, reasoning, self._ended()), usage, thinking)

    def _ended(self) -> FinishReason | None:
        """An answer that broke off is replayed as one that was too long."""
        return self._finish if self._replay is None else self._replay.finish

    def _text(self, kind: _Kind) -> str:
        return "".join(self._said[kind])

    def _say(self, kind: _Kind, text: str) -> bytes:
        frames = b"" if self._open == kind else self._close() + self._begin(kind)
        self._said[kind].append(text)
        self._number += len(text) - 1
        text = text[-max(self._number - self._after, 1) :]  # of which the beginning may have been seen
        if kind == "reasoning":
            return frames + self._of_part("reasoning_text.delta", delta=text)
        return frames + self._of_part("output_text.delta", delta=text, logprobs=[])

    def _begin(self, kind: _Kind) -> bytes:
        self._open = kind
        self._index += 1
        item = self._item() | {"content": [], "status": "in_progress"}
        return self._of_item("added", item) + self._of_part("content_part.added", part=self._part(""))

    def _close(self) -> bytes:
        """What ends the open item, if there is one."""
        if self._open is None:
            return b""
        text = self._text(self._open)
        if self._open == "reasoning":
            frames = self._of_part("reasoning_text.done", text=text)
        else:
            frames = self._of_part("output_text.done", text=text, logprobs=[])
        frames += self._of_part("content_part.done", part=self._part(text)) + self._of_item("done", self._item())
        self._open = None
        return frames

    def _item(self) -> dict[str, Any]:
        """The open item as it is now."""
        if self._open == "reasoning":
            return reasoning_item(self._turn, self._text("reasoning"))
        status = "completed" if self._ended() == "stop" else "incomplete"
        return message_item(self._turn, "assistant", self._text("message"), status)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text} if self._open == "reasoning" else output_part(text)

    def _of_item(self, what: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=self._index, item=item)

    def _of_part(self, kind: str, **fields: object) -> bytes:
        id = f"rs_{self._turn}" if self._open == "reasoning" else f"msg_{self._turn}"
        return self._event(f"response.{kind}", item_id=id, output_index=self._index, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        number = self._number
        self._number += 1
        if number <= self._after:
            return b""
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def kept_response(id: str, turn: Turn) -> dict[str, Any]:
    """The response that a turn was: as it was when it was told whole."""
    ended = (turn.answer, turn.reasoning, turn.finish)
    return _whole(id, msgspec.json.decode(turn.about), ended, replayed(turn).usage, turn.reasoning_tokens)


def _whole(
    id: str, head: Mapping[str, Any], ended: tuple[str, str, FinishReason | None], usage: Usage, thinking: int
) -> dict[str, Any]:
    """``ended``: the text, the reasoning and why they end. Without a reason they were broken off."""
    text, reasoning, finish = ended
    fields = _object(id, head, "completed" if finish == "stop" else "incomplete")
    fields["output"] = output_items(id[-32:], text, reasoning, finish)
    fields["incomplete_details"] = {"reason": "max_output_tokens"} if finish == "length" else None
    fields["usage"] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            "tier": usage.tier,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return fields


def _object(id: str, head: Mapping[str, Any], status: str) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": id,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    return {**_CONSTANT, **head, **told}
