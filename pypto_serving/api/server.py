"""Make the HTTP application: routes, middleware and error handlers around one engine."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pypto_serving import __version__
from pypto_serving.api.disconnect import nobody_listens
from pypto_serving.api.errors import describe
from pypto_serving.api.middleware import SERVER_SEND, ApiKeyGuard, OriginGuard, RequestScope
from pypto_serving.api.openai.chat import create_chat_completion
from pypto_serving.api.openai.completions import create_completion
from pypto_serving.api.openai.fields import IGNORED_HEADER
from pypto_serving.api.openai.models import list_models, retrieve_model
from pypto_serving.api.openai.reader import BodyReader
from pypto_serving.api.openai.schemas import ChatBody, CompletionBody
from pypto_serving.api.reading.reading import Reading
from pypto_serving.api.service import Service
from pypto_serving.api.settings import ServingConfig
from pypto_serving.engine.client import EngineClient
from pypto_serving.engine.metrics import CONTENT_TYPE
from pypto_serving.errors import PyptoError, RequestError
from pypto_serving.types.tier import TIERS


class Application(FastAPI):
    """Pass the server's own `send` to handlers, in their scope."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)


def create_app(engine: EngineClient, serving: ServingConfig) -> FastAPI:
    """Make the application; start nothing. `app.state.service` and `app.state.reading` are for all handlers."""
    app = Application(title="pypto-serving", version=__version__)
    service = Service(engine, serving)
    app.state.service = service
    app.state.reading = Reading(BodyReader(service.prompter, serving))
    _add_routes(app)
    for kind in (PyptoError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    if serving.api_key is not None:
        app.add_middleware(ApiKeyGuard, api_key=serving.api_key.strip())
    else:
        app.add_middleware(OriginGuard, allowed=serving.allowed_origins)
    if serving.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=serving.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", IGNORED_HEADER),
        )
    app.add_middleware(RequestScope, count=service.metrics.count_response, log_requests=serving.log_requests)
    return app


def _add_routes(app: FastAPI) -> None:
    for path, handler, schema in (
        ("/v1/completions", create_completion, CompletionBody),
        ("/v1/chat/completions", create_chat_completion, ChatBody),
    ):
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=_documented(schema), response_model=None)
    for path, reader in (
        ("/v1/models", list_models),
        ("/v1/models/{model_id:path}", retrieve_model),
        ("/health", health),
        ("/version", show_version),
        ("/metrics", metrics),
    ):
        app.add_api_route(path, reader, methods=["GET"], response_model=None)
    app.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"], response_model=None)
    app.add_api_route("/health", health, methods=["HEAD"], response_model=None, include_in_schema=False)


async def health(request: Request) -> Response:
    """Answer 200 while the engine makes progress and admits requests, else 503; the body gives the reason."""
    service: Service = request.app.state.service
    state = service.health()
    body = {"status": state.status, "detail": state.detail, "last_step_age_s": round(state.age_s, 3)}
    return Response(msgspec.json.encode(body), 200 if state.ok else 503, media_type="application/json")


async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached blocks of all tiers, or of the tiers in the query, such as `?tier=device&tier=host`."""
    service: Service = request.app.state.service
    names = request.query_params.getlist("tier")
    for name in names:
        if name not in TIERS:
            raise RequestError(f"the tier is {name[:200]!r}, but must be one of {', '.join(TIERS)}", param="tier")
    service.engine.clear_cache([tier for tier in TIERS if not names or tier in names])
    return Response()


async def show_version(request: Request) -> Response:
    """Answer with the version of this server."""
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")


async def metrics(request: Request) -> Response:
    """Answer with the metrics in Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _documented(schema: type[BaseModel]) -> dict[str, Any]:
    """Describe the request body for /openapi.json; the handler parses it itself."""
    content = {"application/json": {"schema": schema.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def _answer_error(request: Request, error: Exception) -> Response:
    return describe(error).response()


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return nobody_listens()
