"""The body of a request to /v1/responses, and what the response tells of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..config import ServerSettings
from ..contract import InvalidRequest, Message, ModelCard
from .fields import Neutral, ShortText, Text, parse_body
from .items import Input, Metadata, messages
from .sampling import NEUTRAL as NEUTRAL_IN_ALL
from .sampling import Call, SamplingFields, call_of, common
from .schemas import Variables

NEUTRAL: Neutral = {
    **{name: values for name, values in NEUTRAL_IN_ALL.items() if name not in ("metadata", "store")},
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "image": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({}, {"effort": "none"}),
    "text": ({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}


def _id(conversation: object) -> object:
    """OpenAI takes an id, or an object with one."""
    if isinstance(conversation, dict) and conversation.keys() == {"id"}:
        return conversation["id"]
    return conversation


class ResponseRequest(SamplingFields):
    """Fields of POST /v1/responses. null means the default everywhere but in model and input."""

    input: Input = Field(min_length=1, description="A text, or a list of messages.")
    instructions: Text | None = Field(None, description="A system message for this response only, before all others.")
    conversation: (
        Annotated[ShortText, BeforeValidator(_id, json_schema_input_type=str | dict[Literal["id"], str])] | None
    ) = Field(None, description="The id of a conversation to go on with.")
    previous_response_id: ShortText | None = Field(None, description="The response to go on from.")
    store: bool | None = Field(None, description="Keep it, to be read and gone on from. Default: true, if that can be.")
    truncation: Literal["auto", "disabled"] = Field(
        "auto", description="Where the context ends: leave out the oldest turns, or refuse."
    )
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31, description="Longest answer, thinking included.")
    metadata: Metadata = Field({}, description="Up to 16 labels of your own, given back with the response.")
    chat_template_kwargs: Variables = Field({}, description="As in a chat.")


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request: the call, what it goes on from, whether it is to be kept, and what the response tells of it."""

    call: Call
    conversation: str | None
    previous: str | None
    store: bool
    head: dict[str, Any]


def parse_response(body: bytes, card: ModelCard, settings: ServerSettings, *, keeps: bool) -> Asked:
    """``keeps``: this server can. Raises InvalidRequest naming the field, or ModelNotFound."""
    parsed = parse_body(body, ResponseRequest, NEUTRAL, {"input": settings.max_messages}, card)
    asked = parsed.max_tokens if parsed.max_output_tokens is None else parsed.max_output_tokens
    if parsed.max_tokens not in (None, asked):
        raise InvalidRequest("max_tokens and max_output_tokens differ; send one", param="max_output_tokens")
    if parsed.n > 1:
        raise InvalidRequest("n: a response is one answer", param="n")
    if parsed.conversation is not None and parsed.previous_response_id is not None:
        raise InvalidRequest("conversation and previous_response_id: send one", param="previous_response_id")
    for name in ("conversation", "previous_response_id", "store"):
        if getattr(parsed, name) and not keeps:
            raise InvalidRequest(f"{name}: this server keeps no conversations (--state-url off)", param=name)
    store = keeps if parsed.store is None else parsed.store
    request = replace(
        common(parsed, settings.default_max_tokens if asked is None else asked, card),
        messages=messages(parsed.input, "input"),
        variables=parsed.chat_template_kwargs,
    )
    call = replace(
        call_of(parsed, (request,), settings, asked_length=asked is not None),
        instructions=() if parsed.instructions is None else (Message("system", parsed.instructions),),
        truncate=parsed.truncation == "auto",
    )
    head = {
        "created_at": int(time.time()),
        "model": card.id,
        "instructions": parsed.instructions,
        "conversation": None if parsed.conversation is None else {"id": parsed.conversation},
        "previous_response_id": parsed.previous_response_id,
        "store": store,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_output_tokens": asked,
        "truncation": parsed.truncation,
        "metadata": parsed.metadata,
        "user": parsed.user or None,
        "safety_identifier": parsed.safety_identifier or None,
        "prompt_cache_key": parsed.prompt_cache_key or None,
    }
    return Asked(call, parsed.conversation, parsed.previous_response_id, store, head)
