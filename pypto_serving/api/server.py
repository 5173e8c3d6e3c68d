"""Make the HTTP application: routes, middleware and error handlers around one engine."""

from __future__ import annotations

import os
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from pypto_serving.api.batch.batches import Batches
from pypto_serving.api.batch.running import Direct
from pypto_serving.api.common.body import IGNORED_HEADER, TRUNCATED_HEADER
from pypto_serving.api.common.respond import nobody_listens
from pypto_serving.api.http.errors import ApiError, describe
from pypto_serving.api.http.keys import Clients
from pypto_serving.api.http.middleware import ApiKeyGuard, FaultHandler, OriginGuard, Paths, RequestScope
from pypto_serving.api.reading.reading import Reading
from pypto_serving.api.responses.endpoints import ResponseStore
from pypto_serving.api.routes import BATCH_ROUTES, ROUTES
from pypto_serving.api.service import Service
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.status import PROBES
from pypto_serving.api.web.pages import is_page
from pypto_serving.engine.client import EngineClient
from pypto_serving.errors import PyptoError, QueueFullError
from pypto_serving.setup.kv_shares import MemoryPlan
from pypto_serving.util import one_of


def create_app(engine: EngineClient, serving: ServingConfig, memory: MemoryPlan | None = None) -> Starlette:
    """Make the application, but start nothing. Handlers use `app.state.service` and `app.state.reading`.

    `memory`: plan of a replica's memory, for the dashboard.
    """
    app = Starlette(routes=list(ROUTES))
    service = Service(engine, serving)
    app.state.service = service
    app.state.memory = memory
    app.state.responses = ResponseStore()
    app.state.description = None
    app.state.reading = Reading(service.prompter, serving, service.require_admission, service.warn_ignored)
    app.add_exception_handler(PyptoError, _answer_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _answer_lost)  # type: ignore[arg-type]
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.state.batches, salt = None, os.urandom(32)
    if serving.batch_dir is not None:
        width = max(1, engine.config.limits.max_num_seqs // 2)
        app.state.batches = Batches(Path(serving.batch_dir), Direct(app), serving.max_body_bytes, width)
        salt = app.state.batches.salt
        app.routes.extend(BATCH_ROUTES)
    app.state.clients = Clients(service.keys, salt)
    app.add_middleware(FaultHandler)
    if service.keys:
        app.add_middleware(ApiKeyGuard, keys=service.keys, is_public=lambda path: path in PROBES or is_page(path))
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
    paths = Paths(route.path for route in (*ROUTES, *BATCH_ROUTES))
    app.add_middleware(
        RequestScope,
        metrics=service.metrics,
        paths=paths,
        access_log=serving.access_log,
        tracing=service.tracing,
    )
    return app


async def _answer_lost(request: Request, error: HTTPException) -> Response:
    """Answer a request whose path or method no route has."""
    app, asked = request.app, f"{request.method} {request.url.path}"[:200]
    here = [route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE]
    allowed = {name for route in here for name in route.methods}
    methods = sorted(allowed | {"HEAD"} if "GET" in allowed else allowed)
    if methods:
        message = f"{asked} is not allowed here; use {one_of(methods)}"
        return ApiError(405, message, "method_not_allowed", headers=(("allow", ", ".join(methods)),)).response(
            request.scope
        )
    if any(route.matches(request.scope)[0] is not Match.NONE for route in BATCH_ROUTES):
        message = f"{asked} is off; give the server the option batch-dir, a folder that keeps files and batches"
        return ApiError(404, message, "unknown_url").response(request.scope)
    known = [f"{name} {route.path_format}" for route in app.routes if route.include_in_schema for name in route.methods]
    message = f"{asked} does not exist; there are {', '.join(known)} and GET /openapi.json"
    return ApiError(404, message, "unknown_url").response(request.scope)


async def _answer_error(request: Request, error: PyptoError) -> Response:
    if isinstance(error, QueueFullError):
        request.app.state.service.metrics.count_rejection(error.limit)
    return describe(error).response(request.scope)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return nobody_listens()
