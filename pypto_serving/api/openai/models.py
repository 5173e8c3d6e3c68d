"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.service import Service


async def list_models(request: Request) -> Response:
    """Every name this server answers to."""
    service: Service = request.app.state.service
    entries = [describe_model(service, name) for name in service.serving.served_model_names]
    return _json({"object": "list", "data": entries})


async def retrieve_model(request: Request) -> Response:
    """One of the names; raises UnknownModelError for another one."""
    service: Service = request.app.state.service
    return _json(describe_model(service, service.resolve_model(request.path_params["model_id"])))


def describe_model(service: Service, name: str) -> dict[str, Any]:
    """OpenAI's fields, and what a client must know to use the model well."""
    config = service.engine.config
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "pypto-serving",
        "root": service.serving.model_dir,
        "max_model_len": config.max_model_len,
        "vocab_size": config.vocab_size,
        "default_sampling": service.serving.default_sampling.effective(),
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
