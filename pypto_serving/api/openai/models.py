"""Serve GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.service import Service


async def list_models(request: Request) -> Response:
    """List every name of the served model."""
    service: Service = request.app.state.service
    entries = [describe_model(service, name) for name in service.serving.served_model_names]
    return _json({"object": "list", "data": entries})


async def retrieve_model(request: Request) -> Response:
    """Describe the model under one of its names. Raises UnknownModelError for any other name."""
    service: Service = request.app.state.service
    return _json(describe_model(service, service.serving.resolve_model(request.path_params["model_id"])))


def describe_model(service: Service, name: str) -> dict[str, Any]:
    """Make OpenAI's object, with context length, vocabulary and sampling defaults added."""
    config = service.engine.config
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "pypto-serving",
        "root": service.serving.model_dir,
        "max_model_len": config.limits.max_model_len,
        "vocab_size": config.model.vocab_size,
        "default_sampling": service.serving.default_sampling.effective(),
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
