"""Items: the messages of a response's input and of a conversation, in OpenAI's newer shapes; in, and out again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import BeforeValidator, Field, ValidationInfo
from starlette.datastructures import QueryParams

from ..contract import FinishReason, InvalidRequest, Message
from ..state.sessions import Turn
from .fields import FIRST_FAULT, Neutral, ShortText, Strict, Text, drop_neutral

_NEUTRAL: Neutral = {"encrypted_content": (), "phase": (), "summary": ([],)}
#: An item's kind -> those of the parts of its content that are taken.
_PARTS = {"message": ("input_text", "output_text"), "reasoning": ("reasoning_text",)}
_LIMIT = re.compile(r"[1-9][0-9]?|100")


def _join_parts(content: object, info: ValidationInfo) -> object:
    """A list of text parts becomes one string, a line each, as in chats."""
    if not isinstance(content, list):
        return content
    kinds = _PARTS[info.data.get("type", "message")]
    if not content:
        raise ValueError("an empty list; at least one part is needed")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise ValueError(f"part {i} is not of type {' or '.join(kinds)}; other content is not supported yet")
        # What an answer's part has beside its text, as long as it is nothing.
        if not isinstance(part.get("text"), str) or any(part[name] for name in part.keys() - {"type", "text"}):
            raise ValueError(f"part {i} must be {{'type': {kind!r}, 'text': <string>}}")
        texts.append(part["text"])
    return "\n".join(texts)


class InputItem(Strict):
    """A message, `{role, content}`. Or, of type `reasoning`, what a model thought before the assistant's message that
    comes next: an answer's items may be sent back as they are."""

    type: Literal["message", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[
        Text,
        BeforeValidator(_join_parts, json_schema_input_type=str | list[dict[Literal["type", "text"], str]]),
    ] = Field(description="A string, or a list of {type: input_text, text} parts (output_text of an assistant).")
    # What answers carry and clients send back. They change no answer, so they are taken and not used.
    id: ShortText | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _known(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        kind = fields.get("type", "message")
        if not isinstance(kind, str) or kind not in _PARTS:
            raise ValueError(f"items of type {str(kind)[:64]!r} are not supported yet")
        return drop_neutral(fields, _NEUTRAL)

    @pydantic.model_validator(mode="after")
    def _messages_have_a_role(self) -> Self:
        if (self.role is None) != (self.type == "reasoning"):
            raise ValueError("role: one is needed for a message, and none for reasoning")
        return self


def _as_list(items: object) -> object:
    return [{"role": "user", "content": items}] if isinstance(items, str) else items


InputItems = Annotated[list[InputItem], FIRST_FAULT]
Input = Annotated[InputItems, BeforeValidator(_as_list, json_schema_input_type=str | list[InputItem])]


def _checked_metadata(entries: object) -> object:
    if isinstance(entries, dict):
        if len(entries) > 16:
            raise ValueError(f"{len(entries)} entries; at most 16 are taken")
        for name, value in entries.items():
            if len(name) > 64 or not isinstance(value, str) or len(value) > 512:
                raise ValueError(f"{name[:64]!r}: names have up to 64 characters, values are strings of up to 512")
    return entries


#: Labels of the client's own, given back as they are.
Metadata = Annotated[
    dict[Text, Text], BeforeValidator(_checked_metadata, json_schema_input_type=dict[str, str]), Field(max_length=16)
]


def messages(items: Sequence[InputItem], field: str) -> tuple[Message, ...]:
    """Raises InvalidRequest naming the item of ``field`` at fault."""
    said: list[Message] = []
    thought: str | None = None
    for i, item in enumerate(items):
        if thought is not None and item.role != "assistant":
            raise InvalidRequest(f"{field}.{i - 1}: behind reasoning an assistant's message is needed", param=field)
        if item.role is None:
            thought = item.content
        else:
            said.append(Message("system" if item.role == "developer" else item.role, item.content, None, thought))
            thought = None
    if thought is not None:
        raise InvalidRequest(f"{field}.{len(items) - 1}: behind reasoning a message is needed", param=field)
    return tuple(said)


def said_items(turn: Turn) -> list[dict[str, Any]]:
    """What was said in a turn. Their ids are made of the turn's and their place in it, so they stay the same."""
    items = []
    for i, message in enumerate(turn.said):
        if message.reasoning:
            items.append(reasoning_item(f"{turn.id}_{i}", message.reasoning))
        items.append(message_item(f"{turn.id}_{i}", message.role, message.content))
    return items


def items_of(turn: Turn) -> list[dict[str, Any]]:
    """What was said, and the answer."""
    if not turn.answered:
        return said_items(turn)
    return said_items(turn) + output_items(turn.id, turn.answer, turn.reasoning, turn.finish)


def output_items(turn: str, text: str, reasoning: str, finish: FinishReason | None) -> list[dict[str, Any]]:
    """The answer of the turn with the id ``turn``. One that ended while it was thinking has no message."""
    items = [reasoning_item(turn, reasoning)] if reasoning else []
    if has_message(text, reasoning, finish):
        items.append(message_item(turn, "assistant", text, "completed" if finish == "stop" else "incomplete"))
    return items


def has_message(text: str, reasoning: str, finish: FinishReason | None) -> bool:
    return bool(text) or not reasoning or finish == "stop"


def reasoning_item(id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def message_item(id: str, role: str, text: str, status: str = "completed") -> dict[str, Any]:
    part = output_part(text) if role == "assistant" else {"type": "input_text", "text": text}
    return {"id": f"msg_{id}", "type": "message", "status": status, "role": role, "content": [part]}


def output_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def no_query(params: QueryParams, *known: str) -> None:
    """Raises InvalidRequest naming a parameter of the query that is none of the ``known``."""
    for name in params.keys() - set(known):
        raise InvalidRequest(f"{name[:64]!r} is not supported in the query", param=name[:64])


def page(items: list[dict[str, Any]], params: QueryParams) -> dict[str, Any]:
    """A list in OpenAI's shape: of ``items``, the oldest first, what the query asks for. Raises InvalidRequest."""
    no_query(params, "after", "limit", "order")
    limit, order, after = params.get("limit", "20"), params.get("order", "desc"), params.get("after")
    if not _LIMIT.fullmatch(limit):
        raise InvalidRequest("limit: must be from 1 to 100", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc", param="order")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest("after: there is no such item here", param="after")
        items = items[place + 1 :]
    return listed(items[: int(limit)], has_more=len(items) > int(limit))


def listed(items: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
    return {"object": "list", "data": items, **ends, "has_more": has_more}
