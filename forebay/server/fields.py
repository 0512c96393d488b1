"""Request bodies: strict types, every size bounded, nothing ignored in silence.

A field that OpenAI or vLLM know and Forebay does not support yet is accepted with the value that changes nothing,
so that clients which send all their defaults work; with any other value it is a 400 that names it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Set
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from ..contract import InvalidRequest, ModelCard
from .errors import ModelNotFound, from_validation

#: field -> values that change nothing. null is always one of them.
Neutral = Mapping[str, tuple[object, ...]]


def drop_neutral(fields: dict[str, Any], table: Neutral) -> dict[str, Any]:
    """``fields`` without those that change nothing. Raises ValueError naming the first unsupported one."""
    found = (
        table.keys() & fields.keys()
    )  # a body may have a million fields: only those that are in the table are looked at
    if not found:
        return fields
    for name in [name for name in fields if name in found]:
        value = fields[name]
        # 0, 0.0 and False are equal in Python, not on the wire
        if value is not None and not any(type(value) is type(item) and value == item for item in table[name]):
            raise _Unsupported(name)
    return {name: value for name, value in fields.items() if name not in found}


class _Unsupported(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(f"{name!r} is not supported yet")
        self.name = name


def whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(whole_characters)]


#: For lists: the first item at fault is enough, too.
FIRST_FAULT = FailFast()


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, fields: object) -> object:
        """Of unknown fields only the first: pydantic would make an error of each of a million."""
        if not isinstance(fields, dict):
            return fields
        unknown = next((name for name in fields if name not in cls.model_fields), None)
        if unknown is None:
            return fields
        return {name: fields[name] for name in (*cls.model_fields, unknown) if name in fields}


ShortText = Annotated[Text, Field(min_length=1, max_length=256)]


class ForModel(Strict):
    """What every request has."""

    model: str = Field(description="The id that /v1/models lists.")


_Body = TypeVar("_Body", bound=Strict)
_Request = TypeVar("_Request", bound=ForModel)


def parse_fields(
    body: bytes, kind: type[_Body], neutral: Neutral, most: Mapping[str, int], context: object = None
) -> _Body:
    """``body`` as a ``kind``; ``most`` maps a list's name to its longest length. ``context`` is for
    validators. Raises InvalidRequest naming the field."""
    literals: list[str] = []
    fields = _json_object(body, literals)
    _check_names(fields, kind.model_fields.keys() | neutral.keys())
    for name, limit in most.items():
        _check_count(name, fields.get(name), limit)
    try:
        fields = drop_neutral(fields, neutral)
        parsed = kind.model_validate({k: v for k, v in fields.items() if v is not None}, context=context)
    except _Unsupported as error:
        raise InvalidRequest(str(error), param=error.name) from None
    except pydantic.ValidationError as error:
        raise from_validation(error) from None
    if literals:  # no field took it; should one ever, the number still is no JSON
        raise InvalidRequest(f"{literals[0]} is not a JSON value")
    return parsed


def parse_body(
    body: bytes,
    kind: type[_Request],
    neutral: Neutral,
    most: Mapping[str, int],
    card: ModelCard,
    context: object = None,
) -> _Request:
    """The same for a request that names a model. Raises ModelNotFound as well."""
    parsed = parse_fields(body, kind, neutral, most, context)
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
