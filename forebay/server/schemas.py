"""The body of a chat request: strict types, every size bounded, nothing ignored in silence.

A field that OpenAI or vLLM know and Forebay does not support yet is accepted with the value that changes nothing,
so that clients which send all their defaults work; with any other value it is a 400 that names it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

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
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_key": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
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


#: Entries of logit_bias, and what a token id looks like as the key of a JSON object.
MAX_BIASES = 300
_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _biases(entries: object) -> object:
    """``{"<token id>": bias}`` with the ids as integers. Its errors name the whole field: a key may be anything."""
    if not isinstance(entries, dict):
        return entries
    if len(entries) > MAX_BIASES:
        raise ValueError(f"{len(entries)} entries; at most {MAX_BIASES} are taken")
    for id, bias in entries.items():
        if not _ID.fullmatch(id):
            raise ValueError(f"{id[:16]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {id} must be a number from -100 to 100")
    return {int(id): float(bias) for id, bias in entries.items()}


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

    def plain(self) -> Message:
        return Message("system" if self.role == "developer" else self.role, self.content, self.name)


class StreamOptions(_Strict):
    include_usage: bool | None = None


ShortText = Annotated[Text, Field(min_length=1, max_length=256)]


class ForModel(_Strict):
    """What every request has."""

    model: str = Field(description="The id that /v1/models lists.")


class ChatCompletionRequest(ForModel):
    """Fields of POST /v1/chat/completions. null means the default everywhere but in model and messages."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="Longest answer, in tokens.")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The newer name of max_tokens.")
    min_tokens: int = Field(0, ge=0, lt=2**31, description="No end of turn and no stop token before so many tokens.")
    # None: as the model recommends (ModelCard.sampling).
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy. Default: the model's own, or 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Default: the model's own, or 1.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 and -1 are off. Default: the model's own, or 0.")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens less likely than this times the likeliest. 0: off.")
    repetition_penalty: float = Field(1.0, gt=0, le=2, description="On tokens of prompt and answer, as vLLM. 1 is off.")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="Per time that the token is in the answer.")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="Once the token is in the answer.")
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases, json_schema_input_type=dict[str, float])] = Field(
        {}, description="Up to 300 of {token id: from -100 to 100}, added to the tokens' logits."
    )
    bad_words: list[ShortText] = Field([], max_length=128, description="Not generated, nor with a space before.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[ShortText],
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop, json_schema_input_type=str | list[str]),
        Field(max_length=16),
    ] = Field([], description="A string or a list of up to 16; the answer ends before the first that appears.")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=256)
    ignore_eos: bool = Field(False, description="Go on after the end of turn, up to max_tokens.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Annotated[Text, Field(max_length=256)] = Field("", description="A label for your own use.")
    n: int = Field(1, ge=1, le=1, description="One answer only.")


_Request = TypeVar("_Request", bound=ForModel)


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
    parsed = parse_body(body, ChatCompletionRequest, NEUTRAL, {"messages": settings.max_messages}, card)
    return _call_of(parsed, card, settings)


def parse_body(
    body: bytes,
    kind: type[_Request],
    neutral: Mapping[str, tuple[object, ...]],
    most: Mapping[str, int],
    card: ModelCard,
) -> _Request:
    """``body`` as a ``kind``; ``most`` maps a list's name to its longest length. Raises as ``parse_chat``."""
    literals: list[str] = []
    fields = _json_object(body, literals)
    _check_names(fields, kind.model_fields.keys() | neutral.keys())
    for name, limit in most.items():
        _check_count(name, fields.get(name), limit)
    try:
        fields = _drop_neutral(fields, neutral)
        parsed = kind.model_validate({k: v for k, v in fields.items() if v is not None})
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
    return parsed


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


def _check_names(fields: dict[str, Any], known: Set[str]) -> None:
    for name in fields.keys() - known:
        shown = name[:64]
        near = difflib.get_close_matches(shown, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidRequest(f"unknown field {shown!r}{hint}", param=shown)


def _check_count(name: str, items: object, limit: int) -> None:
    # Before validation, which would first look at each of a million messages.
    if isinstance(items, list) and len(items) > limit:
        raise InvalidRequest(f"{name}: {len(items)} {name}; at most {limit} are taken", param=name)


def check_ids(name: str, ids: list[int], card: ModelCard) -> None:
    """Raises InvalidRequest naming the first of the field ``name`` that is outside the vocabulary."""
    for i, token in enumerate(ids):
        if token >= card.vocab_size:
            param = f"{name}.{i}"
            raise InvalidRequest(f"{param}: must be less than the vocabulary's size {card.vocab_size}", param=param)


def _call_of(parsed: ChatCompletionRequest, card: ModelCard, settings: ServerSettings) -> ChatCall:
    asked = parsed.max_tokens if parsed.max_completion_tokens is None else parsed.max_completion_tokens
    if parsed.max_tokens not in (None, asked):
        raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", param="max_completion_tokens")
    max_tokens = settings.default_max_tokens if asked is None else asked
    if parsed.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: must not exceed max_tokens ({max_tokens})", param="min_tokens")
    check_ids("stop_token_ids", parsed.stop_token_ids, card)
    if (highest := max(parsed.logit_bias, default=0)) >= card.vocab_size:
        raise InvalidRequest(
            f"logit_bias: token {highest} must be less than the vocabulary's size {card.vocab_size}", param="logit_bias"
        )
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest("stream_options: only with stream true", param="stream_options")
    request = ChatRequest(
        messages=tuple(message.plain() for message in parsed.messages),
        max_tokens=max_tokens,
        min_tokens=parsed.min_tokens,
        temperature=card.sampling.temperature if parsed.temperature is None else parsed.temperature,
        top_k=card.sampling.top_k if parsed.top_k is None else max(0, parsed.top_k),
        top_p=card.sampling.top_p if parsed.top_p is None else parsed.top_p,
        seed=parsed.seed,
        stop=tuple(parsed.stop),
        stop_token_ids=tuple(parsed.stop_token_ids),
        ignore_eos=parsed.ignore_eos,
        min_p=parsed.min_p,
        repetition_penalty=parsed.repetition_penalty,
        frequency_penalty=parsed.frequency_penalty,
        presence_penalty=parsed.presence_penalty,
        logit_bias=parsed.logit_bias,
        bad_words=tuple(parsed.bad_words),
    )
    include_usage = parsed.stream_options is not None and bool(parsed.stream_options.include_usage)
    return ChatCall(request, asked is not None, parsed.stream, include_usage)
