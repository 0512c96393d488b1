"""Bodies of /tokenize and /detokenize, in vLLM's shapes and under the limits of a chat request."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..config import ServerSettings
from ..contract import InvalidRequest, Message, ModelCard
from .fields import FIRST_FAULT, ForModel, Neutral, Text, check_ids, parse_body
from .schemas import ChatMessage, Variables

_NEUTRAL: Neutral = {
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "tools": ([],),
}


class TokenizeRequest(ForModel):
    """Fields of POST /tokenize: `prompt` or `messages`."""

    prompt: Text | None = Field(None, description="Plain text: what looks like a special token is text too.")
    messages: Annotated[list[ChatMessage], FIRST_FAULT] = Field(
        [], min_length=1, description="Go through the chat template."
    )
    add_special_tokens: bool | None = Field(
        None, description="With prompt: a BOS token in front, where the model wants one. Default: true."
    )
    parse_special: bool | None = Field(
        None, description="With prompt: special tokens written in it count as such. Default: false."
    )
    chat_template_kwargs: Variables = Field({}, description="With messages: as in a chat.")
    add_generation_prompt: bool | None = Field(
        None, description="With messages: up to where the answer begins. Default: true."
    )
    return_token_strs: bool = Field(False, description="Also how the vocabulary writes each token.")

    def source(self) -> str | tuple[Message, ...]:
        """What to tokenize. Raises InvalidRequest unless it is one thing, and the other fields belong to it."""
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequest("prompt: send either prompt or messages", param="prompt")
        if not self.messages and self.add_generation_prompt is not None:
            raise InvalidRequest("add_generation_prompt: only with messages", param="add_generation_prompt")
        if self.messages and self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens: with messages the chat template decides", param="add_special_tokens"
            )
        if self.messages and self.parse_special:
            raise InvalidRequest("parse_special: only with prompt", param="parse_special")
        if not self.messages and self.chat_template_kwargs:
            raise InvalidRequest("chat_template_kwargs: only with messages", param="chat_template_kwargs")
        if not self.messages:
            return self.prompt or ""
        return tuple(message.plain() for message in self.messages)


class DetokenizeRequest(ForModel):
    """Fields of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FIRST_FAULT] = Field(
        description="Token ids, at most as many as the context holds."
    )


def parse_tokenize(body: bytes, card: ModelCard, settings: ServerSettings) -> TokenizeRequest:
    """Raises InvalidRequest naming the field, or ModelNotFound."""
    return parse_body(body, TokenizeRequest, _NEUTRAL, {"messages": settings.max_messages}, card)


def parse_detokenize(body: bytes, card: ModelCard) -> list[int]:
    """The token ids, all within the vocabulary. Raises InvalidRequest naming the field, or ModelNotFound."""
    tokens = parse_body(body, DetokenizeRequest, {}, {"tokens": card.max_context}, card).tokens
    check_ids("tokens", tokens, card)
    return tokens
