"""Bodies of /v1/conversations and of POST /chat."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from ..config import ServerSettings
from ..contract import Message, ModelCard
from .fields import Neutral, ShortText, Strict, Text, parse_fields
from .items import InputItems, Metadata
from .sampling import Call, SamplingFields, call_of, common

_NEUTRAL: Neutral = {"include": ([],)}


class ConversationRequest(Strict):
    """Fields of POST /v1/conversations."""

    items: InputItems = Field([], description="Messages to begin with.")
    metadata: Metadata = Field({}, description="Up to 16 labels of your own.")


class MetadataRequest(Strict):
    """Fields of POST /v1/conversations/{id}."""

    metadata: Metadata = Field(description="These take the place of those before.")


class ItemsRequest(Strict):
    """Fields of POST /v1/conversations/{id}/items."""

    items: InputItems = Field(min_length=1, description="Messages to put at the end.")


class SimpleChatRequest(Strict):
    """Fields of POST /chat."""

    prompt: Text = Field(description="What the user says.")
    user_id: ShortText | None = Field(None, description="Whose conversation it is.")
    session_id: ShortText | None = Field(None, description="Which one of theirs. Default: a new one.")
    stream: bool = False


def parse_conversation(body: bytes, settings: ServerSettings) -> ConversationRequest:
    """Raises InvalidRequest naming the field, as all of these do."""
    return parse_fields(body or b"{}", ConversationRequest, {}, {"items": settings.max_messages})


def parse_metadata(body: bytes) -> MetadataRequest:
    return parse_fields(body, MetadataRequest, {}, {})


def parse_items(body: bytes, settings: ServerSettings) -> ItemsRequest:
    return parse_fields(body, ItemsRequest, _NEUTRAL, {"items": settings.max_messages})


def simple_call(prompt: str, stream: bool, user: str, card: ModelCard, settings: ServerSettings) -> Call:
    """A user's words as a chat under the server's defaults."""
    fields = SamplingFields.model_validate({"model": card.id, "stream": stream, "user": user})
    request = replace(common(fields, settings.default_max_tokens, card), messages=(Message("user", prompt),))
    return call_of(fields, (request,), settings, asked_length=False)


def parse_simple_chat(body: bytes) -> SimpleChatRequest:
    return parse_fields(body, SimpleChatRequest, {}, {})
