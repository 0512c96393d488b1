"""The body of a chat request."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self

import pydantic
from pydantic import BeforeValidator, Field

from ..config import ServerSettings
from ..contract import InvalidRequest, Message, ModelCard
from .fields import FIRST_FAULT, Neutral, ShortText, Strict, Text, drop_neutral, parse_body
from .sampling import MAX_LOGPROBS, Call, SamplingFields, call_of, common
from .sampling import NEUTRAL as NEUTRAL_IN_ALL

NEUTRAL: Neutral = {
    **NEUTRAL_IN_ALL,
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "separate_reasoning": (True,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
#: The same for the fields of a message: what answers carry and clients send back.
NEUTRAL_IN_MESSAGE: Neutral = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "refusal": (),
    "tool_calls": ([],),
}


def _join_parts(content: object) -> object:
    """A list of text parts becomes one string, a line each (as in vLLM)."""
    if not isinstance(content, list):
        return content
    if not content:
        raise ValueError("an empty list; at least one part is needed")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"part {i} is not of type 'text'; other content is not supported yet")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"part {i} must be {{'type': 'text', 'text': <string>}}")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text,
        BeforeValidator(_join_parts, json_schema_input_type=str | list[dict[Literal["type", "text"], str]]),
    ] = Field(description="A string, or a list of {type: text, text} parts.")
    name: Annotated[Text | None, Field(max_length=256)] = None
    reasoning_content: Text | None = Field(None, description="Of an assistant: what came before its content.")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _neutral(cls, fields: object) -> object:
        return drop_neutral(fields, NEUTRAL_IN_MESSAGE) if isinstance(fields, dict) else fields

    @pydantic.model_validator(mode="after")
    def _only_assistants_reason(self) -> Self:
        if self.reasoning_content is not None and self.role != "assistant":
            raise ValueError("reasoning_content: only of an assistant")
        return self

    def plain(self) -> Message:
        role = "system" if self.role == "developer" else self.role
        return Message(role, self.content, self.name, self.reasoning_content)


def _variables(entries: object) -> object:
    """Names and values of a sane size; which there are, the model's template says."""
    if isinstance(entries, dict):
        if len(entries) > 16:
            raise ValueError(f"{len(entries)} entries; at most 16 are taken")
        for name, value in entries.items():
            if not isinstance(value, bool) and not (isinstance(value, str) and len(value) <= 64):
                raise ValueError(f"{name[:64]!r} must be true, false or a short string")
    return entries


#: Variables of the chat template.
Variables = Annotated[
    dict[Text, bool | Text], BeforeValidator(_variables, json_schema_input_type=dict[str, bool | str])
]


class ChatCompletionRequest(SamplingFields):
    """Fields of POST /v1/chat/completions. null means the default everywhere but in model and messages."""

    messages: Annotated[list[ChatMessage], FIRST_FAULT] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The newer name of max_tokens.")
    logprobs: bool = Field(False, description="Log probabilities of the answer's tokens, as the model has them.")
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="With logprobs: so many of the likeliest as well.")
    session_id: ShortText | None = Field(
        None, description="The conversation that the server keeps; then messages are the new ones only."
    )
    chat_template_kwargs: Variables = Field(
        {}, description="Switches that the model's template knows, such as enable_thinking."
    )


def parse_chat(body: bytes, card: ModelCard, settings: ServerSettings) -> Call:
    """Raises InvalidRequest naming the field, or ModelNotFound."""
    parsed = parse_body(body, ChatCompletionRequest, NEUTRAL, {"messages": settings.max_messages}, card)
    asked = parsed.max_tokens if parsed.max_completion_tokens is None else parsed.max_completion_tokens
    if parsed.max_tokens not in (None, asked):
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", param="max_completion_tokens")
    if parsed.top_logprobs and not parsed.logprobs:
        raise InvalidRequest("top_logprobs: only with logprobs true", param="top_logprobs")
    request = replace(
        common(parsed, settings.default_max_tokens if asked is None else asked, card),
        messages=tuple(message.plain() for message in parsed.messages),
        logprobs=parsed.top_logprobs if parsed.logprobs else None,
        variables=parsed.chat_template_kwargs,
    )
    call = call_of(parsed, (request,), settings, asked_length=asked is not None)
    return replace(call, session=parsed.session_id)
