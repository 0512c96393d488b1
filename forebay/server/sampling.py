"""The fields that chats and text completions share: how an answer is drawn, how much of it, and how it is sent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import pydantic
from pydantic import BeforeValidator, Field

from ..config import ServerSettings
from ..contract import GenRequest, InvalidRequest, Message, ModelCard
from .fields import FIRST_FAULT, ForModel, Neutral, ShortText, Strict, Text, check_ids, drop_neutral

NEUTRAL: Neutral = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "metadata": ({},),
    "priority": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
NEUTRAL_IN_OPTIONS: Neutral = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
#: As many as OpenAI gives of the likeliest tokens.
MAX_LOGPROBS = 20


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


class StreamOptions(Strict):
    include_usage: bool | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _neutral(cls, fields: object) -> object:
        return drop_neutral(fields, NEUTRAL_IN_OPTIONS) if isinstance(fields, dict) else fields


Label = Annotated[Text, Field(max_length=256, description="A label for your own use.")]


class SamplingFields(ForModel):
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
    bad_words: Annotated[list[ShortText], FIRST_FAULT] = Field(
        [], max_length=128, description="Not generated, nor with a space before."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="Longest answer, in tokens.")
    min_tokens: int = Field(0, ge=0, lt=2**31, description="No end of turn and no stop token before so many tokens.")
    stop: Annotated[
        list[ShortText],
        FIRST_FAULT,
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop, json_schema_input_type=str | list[str]),
        Field(max_length=16),
    ] = Field([], description="A string or a list of up to 16; the answer ends before the first that appears.")
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], FIRST_FAULT] = Field([], max_length=256)
    ignore_eos: bool = Field(False, description="Go on after the end of turn, up to max_tokens.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Labels of the client's own. They change no answer, so they are taken and not used.
    user: Label = ""
    prompt_cache_key: Label = ""
    safety_identifier: Label = ""
    n: int = Field(1, ge=1, lt=2**31, description="Answers to each prompt; they share its computation.")


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request: what the backend needs, one for each prompt, and how the answer is to be sent.

    ``n`` choices are drawn for each. ``asked_length`` says whether the client chose max_tokens itself.
    ``instructions`` come first in the prompt and are not part of a conversation. ``truncate``: turns of one may be left
    out.
    """

    requests: tuple[GenRequest, ...]
    n: int
    asked_length: bool
    stream: bool
    include_usage: bool
    echo: bool = False
    session: str | None = None
    user: str = ""
    instructions: tuple[Message, ...] = ()
    truncate: bool = True


def common(parsed: SamplingFields, max_tokens: int, card: ModelCard) -> GenRequest:
    """The request without a prompt. Raises InvalidRequest naming the field."""
    if parsed.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens: must not exceed max_tokens ({max_tokens})", param="min_tokens")
    check_ids("stop_token_ids", parsed.stop_token_ids, card)
    if (highest := max(parsed.logit_bias, default=0)) >= card.vocab_size:
        raise InvalidRequest(
            f"logit_bias: token {highest} must be less than the vocabulary's size {card.vocab_size}", param="logit_bias"
        )
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest("stream_options: only with stream true", param="stream_options")
    return GenRequest(
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


def call_of(
    parsed: SamplingFields, requests: tuple[GenRequest, ...], settings: ServerSettings, *, asked_length: bool
) -> Call:
    """Raises InvalidRequest if these are more answers than one request may ask for."""
    if parsed.n * len(requests) > settings.max_choices:
        times = f"{len(requests)} prompts x n {parsed.n}" if len(requests) > 1 else f"{parsed.n}"
        raise InvalidRequest(f"n: {times}; at most {settings.max_choices} answers to one request", param="n")
    include_usage = parsed.stream_options is not None and bool(parsed.stream_options.include_usage)
    return Call(requests, parsed.n, asked_length, parsed.stream, include_usage, user=parsed.user)
