"""Errors as HTTP: everything that can go wrong leaves in OpenAI's shape, and nothing else of it leaves."""

from __future__ import annotations

import logging
import math

import msgspec
import pydantic
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..contract import BodyTooLarge, ForebayError, InvalidRequest, MethodNotAllowed, NotFound, TryLater

_log = logging.getLogger("forebay.server")
_HTTP: dict[int, type[ForebayError]] = {404: NotFound, 405: MethodNotAllowed, 413: BodyTooLarge}


class ModelNotFound(NotFound):
    code = "model_not_found"


def from_exception(error: BaseException) -> ForebayError:
    """The ForebayError to show for ``error``. What nobody expected is logged with its traceback and told as
    "internal error" only."""
    if isinstance(error, ForebayError):
        return error
    if isinstance(error, HTTPException):
        return _from_http(error)
    _log.error("unexpected error while answering a request", exc_info=error)
    return ForebayError("internal error")


def _from_http(error: HTTPException) -> ForebayError:
    kind = _HTTP.get(error.status_code, InvalidRequest if error.status_code < 500 else ForebayError)
    mapped = kind(error.detail)
    mapped.status = error.status_code
    return mapped


def from_validation(error: pydantic.ValidationError) -> InvalidRequest:
    """The first fault that pydantic found, with the path of the field: ``messages.0.content``."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message}" if param else message, param=param or None)


def error_body(error: ForebayError) -> bytes:
    """``{"error": {message, type, param, code}}`` as JSON."""
    fields = {"message": _clean(error.message), "type": error.kind, "param": error.param, "code": error.code}
    if error.param is not None:
        fields["param"] = _clean(error.param)
    return msgspec.json.encode({"error": fields})


def _clean(text: str) -> str:
    """Errors quote what a client sent, which may hold lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_response(error: ForebayError) -> Response:
    headers = {"cache-control": "no-cache"}
    if isinstance(error, TryLater):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), status_code=error.status, headers=headers, media_type="application/json")
