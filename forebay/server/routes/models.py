"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import JSONResponse, Response

from ...contract import ModelCard
from ..errors import ModelNotFound


def _fields(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "forebay",
        "max_model_len": card.max_context,  # where vLLM's clients look for it
    }


async def list_models(request: Request) -> Response:
    """The models that this server answers with."""
    return JSONResponse({"object": "list", "data": [_fields(request.app.state.backend.card)]})


async def get_model(request: Request) -> Response:
    """One model by its id."""
    card: ModelCard = request.app.state.backend.card
    asked = request.path_params["model_id"]
    if asked != card.id:
        raise ModelNotFound(f"the model {asked[:128]!r} does not exist; this server has {card.id!r}", param="model")
    return JSONResponse(_fields(card))
