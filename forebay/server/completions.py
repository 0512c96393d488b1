"""The body of a text completion: OpenAI's older shape, for prompts that are no chat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo

from ..config import ServerSettings
from ..contract import InvalidRequest, ModelCard
from .fields import Neutral, check_ids, parse_body, whole_characters
from .sampling import MAX_LOGPROBS, Call, SamplingFields, call_of, common
from .sampling import NEUTRAL as NEUTRAL_IN_ALL

NEUTRAL: Neutral = {**NEUTRAL_IN_ALL, "suffix": ("",)}
#: OpenAI's default here is not that of chats.
DEFAULT_MAX_TOKENS = 16

_Given = str | list[str] | list[int] | list[list[int]]


@dataclass(frozen=True, slots=True)
class _Limits:
    prompts: int
    tokens: int


def _prompts(given: object, info: ValidationInfo) -> object:
    """Always a list of prompts, of a length that may be looked at one by one."""
    limits = info.context
    if not isinstance(limits, _Limits):
        raise TypeError("validated without limits")
    if not isinstance(given, list):
        return [_prompt(0, given, limits)]
    if not given:
        raise ValueError("an empty list; at least one prompt is needed")
    if isinstance(given[0], int):  # one prompt, as token ids
        given = [given]
    if len(given) > limits.prompts:
        raise ValueError(f"{len(given)} prompts; at most {limits.prompts} are taken")
    return [_prompt(i, prompt, limits) for i, prompt in enumerate(given)]


def _prompt(i: int, prompt: object, limits: _Limits) -> object:
    # All is said here: pydantic's own words about a union name both of its halves.
    if isinstance(prompt, str):
        return whole_characters(prompt)
    if not isinstance(prompt, list):
        raise ValueError(f"prompt {i} is neither a string nor a list of token ids")  # noqa: TRY004
    if not 0 < len(prompt) <= limits.tokens:
        raise ValueError(f"prompt {i} has {len(prompt)} tokens; from 1 to {limits.tokens} are taken")
    if not all(type(token) is int and token >= 0 for token in prompt):
        raise ValueError(f"prompt {i} has something that is not a token id")
    return prompt


class CompletionRequest(SamplingFields):
    """Fields of POST /v1/completions. null means the default everywhere but in model and prompt."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ] = Field(description="A text, token ids, or a list of either. Special tokens in text are plain text.")
    parse_special: bool = Field(False, description="Special tokens written in the text count as such.")
    echo: bool = Field(False, description="The prompt before each answer.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Log probabilities of the answer's tokens and of the likeliest."
    )


def parse_completion(body: bytes, card: ModelCard, settings: ServerSettings) -> Call:
    """Raises InvalidRequest naming the field, or ModelNotFound."""
    limits = _Limits(settings.max_choices, card.max_context)
    parsed = parse_body(body, CompletionRequest, NEUTRAL, {}, card, context=limits)
    if parsed.echo and parsed.logprobs is not None:
        raise InvalidRequest("logprobs: not together with echo; those of a prompt are not supported", param="logprobs")
    for ids in parsed.prompt:
        if isinstance(ids, list):
            check_ids("prompt", ids, card)
    asked = parsed.max_tokens
    request = replace(
        common(parsed, DEFAULT_MAX_TOKENS if asked is None else asked, card),
        parse_special=parsed.parse_special,
        logprobs=parsed.logprobs,
    )
    requests = tuple(
        replace(request, prompt=tuple(prompt) if isinstance(prompt, list) else prompt) for prompt in parsed.prompt
    )
    return replace(call_of(parsed, requests, settings, asked_length=asked is not None), echo=parsed.echo)
