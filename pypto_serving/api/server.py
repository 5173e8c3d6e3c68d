"""Make the HTTP application: routes, middleware and error handlers around one engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from pypto_serving import __version__
from pypto_serving.api import openapi
from pypto_serving.api.anthropic.answers import Message, MessageError, MessageEvent, TokenCount
from pypto_serving.api.anthropic.messages import count_tokens, create_message
from pypto_serving.api.anthropic.schemas import CountTokensBody, MessagesBody
from pypto_serving.api.batch.answers import Batch, BatchList, DeletedFile, File, FileList
from pypto_serving.api.batch.batches import Batches
from pypto_serving.api.batch.direct import Direct
from pypto_serving.api.batch.endpoints import (
    cancel_batch,
    create_batch,
    create_file,
    delete_file,
    file_content,
    list_batches,
    list_files,
    retrieve_batch,
    retrieve_file,
    stored,
)
from pypto_serving.api.batch.schemas import BatchBody
from pypto_serving.api.decisions.answers import Decision
from pypto_serving.api.decisions.endpoint import create_decision
from pypto_serving.api.decisions.schemas import DecisionBody
from pypto_serving.api.disconnect import nobody_listens
from pypto_serving.api.errors import ApiError, describe
from pypto_serving.api.middleware import SERVER_SEND, ApiKeyGuard, Faults, OriginGuard, RequestScope, Traced
from pypto_serving.api.openai.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Detokenized,
    HealthState,
    Load,
    Model,
    ModelList,
    RenderedRequest,
    ServerInfo,
    Tokenized,
    Version,
)
from pypto_serving.api.openai.body import TRUNCATED_HEADER
from pypto_serving.api.openai.chat import create_chat_completion
from pypto_serving.api.openai.completions import create_completion
from pypto_serving.api.openai.fields import IGNORED_HEADER
from pypto_serving.api.openai.models import list_models, retrieve_model
from pypto_serving.api.openai.render import render_chat_completion, render_completion
from pypto_serving.api.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pypto_serving.api.openai.tokenize import detokenize, tokenize
from pypto_serving.api.openapi import MODEL_PARAMETER, TIER_PARAMETER
from pypto_serving.api.paths import Paths
from pypto_serving.api.reading.reader import BodyReader
from pypto_serving.api.reading.reading import Reading
from pypto_serving.api.responses.answers import DeletedResponse, ItemList, ResponseObject
from pypto_serving.api.responses.endpoints import (
    cancel_response,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from pypto_serving.api.responses.events import ResponseEvent
from pypto_serving.api.responses.schemas import ResponsesBody
from pypto_serving.api.responses.store import ResponseStore
from pypto_serving.api.service import Service
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.status import PROBES, health, load, metrics, ready, server_info, show_version
from pypto_serving.api.web.dashboard import show_stats
from pypto_serving.api.web.pages import ASSETS, PAGES, is_page, show_page
from pypto_serving.engine.client import EngineClient
from pypto_serving.errors import PyptoError, QueueFullError, RequestError
from pypto_serving.setup.kv_shares import MemoryPlan
from pypto_serving.types.tier import TIERS
from pypto_serving.util import one_of

Handler = Callable[[Request], Awaitable[Response]]
Responses = dict[int | str, dict[str, Any]]


class Application(FastAPI):
    """Pass the server's own `send` to handlers, in their scope. Describe answers for /openapi.json."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            needs_key = bool(self.state.service.keys)
            self.openapi_schema = openapi.complete(super().openapi(), needs_key)
        return self.openapi_schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)


def create_app(engine: EngineClient, serving: ServingConfig, memory: MemoryPlan | None = None) -> FastAPI:
    """Make the application; start nothing. `app.state.service` and `app.state.reading` are for all handlers.

    The dashboard shows the plan of a replica's `memory`.
    """
    app = Application(title="pypto-serving", version=__version__, docs_url=None, redoc_url=None)
    service = Service(engine, serving)
    app.state.service = service
    app.state.memory = memory
    app.state.responses = ResponseStore()
    app.state.reading = Reading(BodyReader(service.prompter, serving), service.require_admission, service.warn_ignored)
    _add_routes(app)
    _add_responses(app)
    app.add_exception_handler(PyptoError, _answer_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _answer_lost)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.state.batches = None
    if serving.batch_dir is not None:
        width = max(1, engine.config.max_num_seqs // 2)
        app.state.batches = Batches(Path(serving.batch_dir), Direct(app), serving.max_body_bytes, width)
        _add_batches(app)
    app.add_middleware(Faults)
    if service.keys:
        app.add_middleware(ApiKeyGuard, keys=service.keys, is_public=_is_public)
    else:
        app.add_middleware(OriginGuard, allowed=serving.allowed_origins)
    if serving.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=serving.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", IGNORED_HEADER, TRUNCATED_HEADER),
        )
    if service.tracing is not None:
        app.add_middleware(Traced, tracing=service.tracing)
    paths = Paths(route.path_format for route in app.routes)  # type: ignore[attr-defined]
    app.add_middleware(
        RequestScope,
        count=service.metrics.count_response,
        paths=paths,
        access_log=serving.access_log,
    )
    return app


def _add_routes(app: FastAPI) -> None:
    def add(path: str, handler: Handler, answers: Responses, method: str = "GET", **described: Any) -> None:
        app.add_api_route(
            path, handler, methods=[method], responses=answers, openapi_extra=described, response_class=Response
        )

    for path, handler, body, answer, event in (
        ("/v1/completions", create_completion, CompletionBody, Completion, Completion),
        ("/v1/chat/completions", create_chat_completion, ChatBody, ChatCompletion, ChatCompletionChunk),
    ):
        answers = openapi.responses(answer, *openapi.GENERATING, event=openapi.event(event))
        add(path, handler, answers, "POST", requestBody=openapi.body(body))
    answers = openapi.responses(
        Message, *openapi.GENERATING, event=openapi.named_event(MessageEvent), error=MessageError
    )
    add("/v1/messages", create_message, answers, "POST", requestBody=openapi.body(MessagesBody))
    answers = openapi.responses(TokenCount, *openapi.GENERATING, error=MessageError)
    add("/v1/messages/count_tokens", count_tokens, answers, "POST", requestBody=openapi.body(CountTokensBody))
    answers = openapi.responses(Decision, *openapi.GENERATING)
    add("/v1/decisions", create_decision, answers, "POST", requestBody=openapi.body(DecisionBody))
    rendered = openapi.reference(RenderedRequest)
    for path, handler, asked, schema in (
        ("/v1/completions/render", render_completion, CompletionBody, {"type": "array", "items": rendered}),
        ("/v1/chat/completions/render", render_chat_completion, ChatBody, rendered),
        ("/tokenize", tokenize, TokenizeBody, openapi.reference(Tokenized)),
        ("/detokenize", detokenize, DetokenizeBody, openapi.reference(Detokenized)),
    ):
        add(path, handler, openapi.responses(schema, *openapi.GENERATING), "POST", requestBody=openapi.body(asked))
    add("/v1/models", list_models, openapi.responses(ModelList))
    add("/v1/models/{model_id:path}", retrieve_model, openapi.responses(Model, 404), parameters=[MODEL_PARAMETER])
    add("/health", health, openapi.responses(HealthState, busy=HealthState))
    add("/ready", ready, openapi.responses(HealthState, 429, busy=HealthState))
    add("/load", load, openapi.responses(Load))
    add("/server_info", server_info, openapi.responses(ServerInfo))
    add("/version", show_version, openapi.responses(Version))
    add("/metrics", metrics, openapi.responses("text/plain"))
    answers = openapi.responses("text/plain", 400)
    add("/reset_prefix_cache", reset_prefix_cache, answers, "POST", parameters=[TIER_PARAMETER])
    app.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/ready", ready, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/ping", health, methods=["GET", "HEAD", "POST"], include_in_schema=False)
    app.add_api_route("/dashboard/stats", show_stats, methods=["GET"], include_in_schema=False)
    for path in (*PAGES, ASSETS + "{name}"):
        app.add_api_route(path, show_page, methods=["GET", "HEAD"], include_in_schema=False)


def _add_responses(app: FastAPI) -> None:
    created = openapi.responses(ResponseObject, *openapi.GENERATING, event=openapi.named_event(ResponseEvent))
    one = "/v1/responses/{response_id}"
    for method, path, handler, answers, described in (
        ("POST", "/v1/responses", create_response, created, {"requestBody": openapi.body(ResponsesBody)}),
        ("GET", one, retrieve_response, openapi.responses(ResponseObject, 400, 404), {}),
        ("DELETE", one, delete_response, openapi.responses(DeletedResponse, 400, 404), {}),
        ("POST", one + "/cancel", cancel_response, openapi.responses(ResponseObject, 400, 404), {}),
        (
            "GET",
            one + "/input_items",
            list_input_items,
            openapi.responses(ItemList, 400, 404),
            {"parameters": openapi.PAGE},
        ),
    ):
        app.add_api_route(
            path,
            handler,
            methods=[method],
            responses=answers,
            openapi_extra=described | openapi.path_parameters(path, described),
            response_class=Response,
        )


def _add_batches(app: FastAPI) -> None:
    for method, path, handler, answer, described in (
        ("POST", "/v1/files", create_file, File, {"requestBody": openapi.UPLOAD}),
        ("GET", "/v1/files", list_files, FileList, {"parameters": openapi.PAGE}),
        ("GET", "/v1/files/{file_id}", retrieve_file, File, {}),
        ("GET", "/v1/files/{file_id}/content", file_content, "application/octet-stream", {}),
        ("DELETE", "/v1/files/{file_id}", delete_file, DeletedFile, {}),
        ("POST", "/v1/batches", create_batch, Batch, {"requestBody": openapi.body(BatchBody)}),
        ("GET", "/v1/batches", list_batches, BatchList, {"parameters": openapi.PAGE}),
        ("GET", "/v1/batches/{batch_id}", retrieve_batch, Batch, {}),
        ("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, Batch, {}),
    ):
        errors = (400, 404, 413, 415, 507) if method == "POST" else (400, 404, 507)
        app.add_api_route(
            path,
            stored(handler),
            methods=[method],
            responses=openapi.responses(answer, *errors),
            openapi_extra=described | openapi.path_parameters(path, described),
            response_class=Response,
        )


def _is_public(path: str) -> bool:
    """Return whether a request needs no API key."""
    return path in PROBES or is_page(path)


async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached blocks of all tiers, or of the tiers in the query, such as `?tier=device&tier=host`."""
    service: Service = request.app.state.service
    names = request.query_params.getlist("tier")
    for name in names:
        if name not in TIERS:
            raise RequestError(f"the tier is {name[:200]!r}, but must be one of {', '.join(TIERS)}", param="tier")
    service.engine.clear_cache([tier for tier in TIERS if not names or tier in names])
    return Response(media_type="text/plain")


async def _answer_lost(request: Request, error: HTTPException) -> Response:
    """Answer a request to a path, or with a method, that no route has."""
    app, asked = request.app, f"{request.method} {request.url.path}"[:200]
    here = [route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = sorted({name for route in here for name in route.methods})
    if methods:
        message = f"{asked} is not allowed here; use {one_of(methods)}"
        return ApiError(405, message, "method_not_allowed", headers=(("allow", ", ".join(methods)),)).response()
    known = [f"{name} {route.path_format}" for route in app.routes if route.include_in_schema for name in route.methods]
    message = f"{asked} does not exist; there are {', '.join(known)} and GET /openapi.json"
    return ApiError(404, message, "unknown_url").response()


async def _answer_error(request: Request, error: PyptoError) -> Response:
    if isinstance(error, QueueFullError):
        request.app.state.service.metrics.count_rejection(error.limit)
    return describe(error).response()


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return nobody_listens()
