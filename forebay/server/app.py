"""The FastAPI application: every route in one table, and the layers around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from .. import __version__
from ..admission.gate import Gate
from ..config import Settings
from ..contract import Backend
from ..state.sessions import Sessions
from ..state.store import Store
from .answers import Answers
from .auth import Auth, callers
from .body import SCHEMA_REF, json_body
from .border import Border
from .completions import CompletionRequest
from .conversations import ConversationRequest, ItemsRequest, MetadataRequest, SimpleChatRequest
from .entrance import Entrance
from .errors import error_response, from_exception
from .metrics import Metrics
from .responses import ResponseRequest
from .routes import cache, capacity, conversations, generate, health, models, responses, sessions, tokens
from .running import RunningTurns
from .schemas import ChatCompletionRequest
from .tokens import DetokenizeRequest, TokenizeRequest


def create_app(backend: Backend, settings: Settings, state_url: str | None = None) -> FastAPI:
    """The server around ``backend``, whose life is the application's. Conversations are kept at ``state_url``; without
    one there are none.

    ``app.state.draining``: set it True to refuse new chats and turn /ready red; open ones go on.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if state_url is not None:
                app.state.sessions = Sessions(await stack.enter_async_context(Store(state_url)), settings.state)
            await stack.enter_async_context(backend)
            gate = Gate(settings.admission, settings.max_queue, settings.max_queued_tokens, backend.load)
            backend.watch(gate.pump)
            app.state.gate = gate
            turns = RunningTurns(settings.answers.resume_window)
            answers = Answers(settings.answers.answer_cache, settings.answers.answer_ttl, turns)
            app.state.answers = await stack.enter_async_context(answers)
            app.state.metrics = Metrics(backend.card.id, backend.load, gate, lambda: answers.bytes)
            yield

    # No /docs page: it loads scripts from another host.
    app = FastAPI(title="Forebay", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.backend = backend
    app.state.settings = settings
    app.state.sessions = None
    app.state.draining = False
    app.state.tokenizing = 0

    schemas = _add_routes(app)
    app.openapi = lambda: _openapi(app, schemas)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Entrance)
    if settings.needs_key:
        app.add_middleware(Auth, routes=app.router.routes, known=callers(settings))
    app.add_middleware(Border)  # added last: outermost
    return app


def _add_routes(app: FastAPI) -> list[type[BaseModel]]:
    """Returns the schemas of the bodies."""

    def get(path: str, endpoint: Any) -> None:
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
        # Some load balancers probe with it.
        app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)

    def delete(path: str, endpoint: Any) -> None:
        app.add_api_route(path, endpoint, methods=["DELETE"], response_model=None)

    schemas: list[type[BaseModel]] = []

    def post(path: str, endpoint: Any, schema: type[BaseModel]) -> None:
        schemas.append(schema)
        app.add_api_route(
            path, endpoint, methods=["POST"], response_model=None, openapi_extra={"requestBody": json_body(schema)}
        )

    post("/v1/chat/completions", generate.create_chat_completion, ChatCompletionRequest)
    post("/v1/completions", generate.create_completion, CompletionRequest)
    app.add_api_route("/v1/embeddings", generate.create_embedding, methods=["POST"], response_model=None)
    post("/chat", generate.simple_chat, SimpleChatRequest)
    post("/v1/responses", responses.create_response, ResponseRequest)
    get("/v1/responses/{response_id}", responses.get_response)
    delete("/v1/responses/{response_id}", responses.delete_response)
    get("/v1/responses/{response_id}/input_items", responses.list_input_items)
    post("/v1/conversations", conversations.create_conversation, ConversationRequest)
    get("/v1/conversations/{conversation_id}", conversations.get_conversation)
    post("/v1/conversations/{conversation_id}", conversations.update_conversation, MetadataRequest)
    delete("/v1/conversations/{conversation_id}", conversations.delete_conversation)
    get("/v1/conversations/{conversation_id}/items", conversations.list_items)
    post("/v1/conversations/{conversation_id}/items", conversations.create_items, ItemsRequest)
    get("/v1/conversations/{conversation_id}/items/{item_id}", conversations.get_item)
    delete("/v1/conversations/{conversation_id}/items/{item_id}", conversations.delete_item)
    delete("/v1/sessions/{session_id:path}", sessions.delete_session)
    post("/tokenize", tokens.tokenize, TokenizeRequest)
    post("/detokenize", tokens.detokenize, DetokenizeRequest)
    get("/v1/models", models.list_models)
    get("/v1/models/{model_id:path}", models.get_model)
    get("/v1/capacity", capacity.capacity)
    delete("/v1/cache", cache.purge)
    get("/health", health.health)
    get("/ready", health.ready)
    get("/metrics", health.metrics)
    return schemas


async def _http_error(_request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, wrong method."""
    response = error_response(from_exception(error))
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


def _openapi(app: FastAPI, kinds: list[type[BaseModel]]) -> dict[str, Any]:
    """FastAPI's document with the request schemas, which it cannot see: the handlers parse the bodies themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for kind in kinds:
            schema = kind.model_json_schema(ref_template=SCHEMA_REF)
            schemas.update({**schema.pop("$defs", {}), kind.__name__: schema})
        app.openapi_schema = document
    return app.openapi_schema
