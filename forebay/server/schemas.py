"""The body of a chat request: strict types, every size bounded, nothing ignored in silence.

A field that OpenAI or vLLM know and Forebay does not support yet is accepted with the value that changes nothing,
so that clients which send all their defaults work; with any other value it is a 400 that names it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ..config import ServerSettings
from ..contract import ChatRequest, InvalidRequest, Message, ModelCard
from .errors import ModelNotFound, from_validation

#: field -> values that change nothing. null is always one of them.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0, 0.0),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "priority": (0,),
    "prompt_cache_key": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
#: The same for the fields of a message: what answers carry and clients send back.
NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_calls": ([],),
}


def _drop_neutral(fields: dict[str, Any], table: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
    """``fields`` without those that change nothing. Raises ValueError naming the first unsupported one."""
    kept = {}
    for name, value in fields.items():
        if name not in table:
            kept[name] = value
        # 0, 0.0 and False are equal in Python, not on the wire
        elif value is not None and not any(type(value) is type(item) and value == item for item in table[name]):
            raise _Unsupported(name)
    return kept


class _Unsupported(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} is not supported yet")
        self.name = name


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]


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


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text,
        BeforeValidator(_join_parts, json_schema_input_type=str | list[dict[Literal["type", "text"], str]]),
    ] = Field(description="A string, or a list of {type: text, text} parts.")
    name: Annotated[Text | None, Field(max_length=256)] = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _neutral(cls, fields: object) -> object:
        return _drop_neutral(fields, NEUTRAL_IN_MESSAGE) if isinstance(fields, dict) else fields


class StreamOptions(_Strict):
    include_usage: bool | None = None


StopString = Annotated[Text, Field(min_length=1, max_length=256)]


class ChatCompletionRequest(_Strict):
    """Fields of POST /v1/chat/completions. null means the default everywhere but in model and messages."""

    model: str = Field(description="The id that /v1/models lists.")
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="Longest answer, in tokens.")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The newer name of max_tokens.")
    min_tokens: int = Field(0, ge=0, lt=2**31, description="No end of turn and no stop token before so many tokens.")
    # None: as the model recommends (ModelCard.sampling).
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy. Default: the model's own, or 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Default: the model's own, or 1.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1 are off. Default: the model's own, or 0.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[StopString],
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop, json_schema_input_type=str | list[str]),
        Field(max_length=16),
    ] = Field([], description="A string or a list of up to 16; the answer ends before the first that appears.")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=256)
    ignore_eos: bool = Field(False, description="Go on after the end of turn, up to max_tokens.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[Text, Field(max_length=256)] = Field("", description="A label for your own use.")
    n: int = Field(1, ge=1, le=1, description="One answer only.")


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A parsed request: what the backend needs, and how the answer is to be sent.

    ``asked_length`` says whether the client chose max_tokens itself.
    """

    request: ChatRequest
    asked_length: bool
    stream: bool
    include_usage: bool


def parse_chat(body: bytes, card: ModelCard, settings: ServerSettings) -> ChatCall:
    """Raises InvalidRequest naming the field, or ModelNotFound."""
    literals: list[str] = []
    fields = _json_object(body, literals)
    _check_names(fields)
    _check_count(fields.get("messages"), settings.max_messages)
    try:
        fields = _drop_neutral(fields, NEUTRAL)
        parsed = ChatCompletionRequest.model_validate({k: v for k, v in fields.items() if v is not None})
    except _Unsupported as error:
        raise InvalidRequest(str(error), param=error.name) from None
    except pydantic.ValidationError as error:
        raise from_validation(error) from None
    if literals:  # no field took it; should one ever, the number still is no JSON
        raise InvalidRequest(f"{literals[0]} is not a JSON value")
    if parsed.model != card.id:
        raise ModelNotFound(
            f"the model {parsed.model[:128]!r} does not exist; this server has {card.id!r}", param="model"
        )
    return _call_of(parsed, card, settings)


def _json_object(body: bytes, literals: list[str]) -> dict[str, Any]:
    """The body as a dict. NaN and Infinity, which are no JSON, are noted in ``literals`` and read as NaN: the
    field that holds it refuses it by name."""

    def note(literal: str) -> float:
        literals.append(literal)
        return float("nan")

    try:
        fields = json.loads(body.decode(), parse_constant=note)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer of thousands of digits
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def _check_names(fields: dict[str, Any]) -> None:
    known = ChatCompletionRequest.model_fields.keys() | NEUTRAL.keys()
    for name in fields.keys() - known:
        shown = name[:64]
        near = difflib.get_close_matches(shown, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidRequest(f"unknown field {shown!r}{hint}", param=shown)


def _check_count(messages: object, limit: int) -> None:
    # Before validation, which would first look at each of a million messages.
    if isinstance(messages, list) and len(messages) > limit:
        raise InvalidRequest(f"messages: {len(messages)} messages; at most {limit} are taken", param="messages")


def _call_of(parsed: ChatCompletionRequest, card: ModelCard, settings: ServerSettings) -> ChatCall:
    asked = parsed.max_tokens if parsed.max_completion_tokens is None else parsed.max_completion_tokens
    if parsed.max_tokens not in (None, asked):
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", param="max_completion_tokens")
    max_tokens = settings.default_max_tokens if asked is None else asked
    if parsed.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: must not exceed max_tokens ({max_tokens})", param="min_tokens")
    for i, token in enumerate(parsed.stop_token_ids):
        if token >= card.vocab_size:
            param = f"stop_token_ids.{i}"
            raise InvalidRequest(f"{param}: must be less than the vocabulary's size {card.vocab_size}", param=param)
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest("stream_options: only with stream true", param="stream_options")
    request = ChatRequest(
        messages=tuple(
            Message("system" if m.role == "developer" else m.role, m.content, m.name) for m in parsed.messages
        ),
        max_tokens=max_tokens,
        min_tokens=parsed.min_tokens,
        temperature=card.sampling.temperature if parsed.temperature is None else parsed.temperature,
        top_k=card.sampling.top_k if parsed.top_k is None else max(0, parsed.top_k),
        top_p=card.sampling.top_p if parsed.top_p is None else parsed.top_p,
        seed=parsed.seed,
        stop=tuple(parsed.stop),
        stop_token_ids=tuple(parsed.stop_token_ids),
        ignore_eos=parsed.ignore_eos,
    )
    include_usage = parsed.stream_options is not None and bool(parsed.stream_options.include_usage)
    return ChatCall(request, asked is not None, parsed.stream, include_usage)
