"""Reading a request's body within its limit, and telling OpenAPI what is in it."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from pydantic import BaseModel

from ..contract import BodyTooLarge

SCHEMA_REF = "#/components/schemas/{model}"


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    """A route's ``requestBody``: FastAPI cannot see the schema, because the handler parses the body itself."""
    content = {"application/json": {"schema": {"$ref": SCHEMA_REF.format(model=schema.__name__)}}}
    return {"required": True, "content": content}


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as it is known to be longer than ``limit`` bytes."""
    error = BodyTooLarge(f"the body is longer than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise error
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise error
    return bytes(body)
