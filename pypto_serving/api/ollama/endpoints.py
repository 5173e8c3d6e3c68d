"""Serve Ollama's /api/version, /api/tags, /api/ps, /api/show, /api/pull, /api/chat and /api/generate."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import ReadBody, read_body, require_json
from pypto_serving.api.common.respond import AnswerFormat, answer_json, generate
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.api.ollama.line_format import LineFormat, written_time
from pypto_serving.api.ollama.ollama_body import without_tag
from pypto_serving.api.service import Service
from pypto_serving.errors import RequestError

VERSION = "0.20.0"
"""The version of Ollama whose API this is. Clients ask for a lowest one."""
MAX_NAME_BYTES = 64 << 10
"""Largest body that only names a model."""


class _Named(msgspec.Struct):
    model: str | None = None
    name: str | None = None


class _Worded(_Named):
    prompt: Any = None
    messages: Any = None
    images: Any = None


async def ollama_version(request: Request) -> Response:
    """Answer with the version of Ollama whose API this is."""
    return answer_json({"version": VERSION})


async def ollama_models(request: Request) -> Response:
    """List every name of the served model."""
    service: Service = request.app.state.service
    made, details = written_time(service.created), _details(service)
    listed = [
        {"name": name, "model": name, "modified_at": made, "size": 0, "digest": _digest(name), "details": details}
        for name in service.serving.served_model_names
    ]
    return answer_json({"models": listed})


async def show_ollama_model(request: Request) -> Response:
    """Describe a model: its context length, and what it can do."""
    service: Service = request.app.state.service
    await _named(request)
    family = _details(service)["family"]
    shown = {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(service),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": service.engine.config.limits.max_model_len,
        },
        "capabilities": ["completion", *service.prompter.chat_encoder.abilities],
        "modified_at": written_time(service.created),
    }
    return answer_json(shown)


async def pull_ollama_model(request: Request) -> Response:
    """Say that a served model is there; agents pull the one that they are told to use."""
    await _named(request)
    return Response(b'{"status":"success"}\n', media_type=LineFormat.media_type)


async def ollama_chat(request: Request) -> Response:
    """Answer a conversation, in lines of JSON unless asked otherwise."""
    return await _generate(request, "ollama_chat")


async def ollama_generate(request: Request) -> Response:
    """Continue a prompt, in lines of JSON unless asked otherwise."""
    return await _generate(request, "ollama_generate")


async def _generate(request: Request, endpoint: Literal["ollama_chat", "ollama_generate"]) -> Response:
    def new_format(body: ReadBody, wanted: GenerationRequest) -> AnswerFormat:
        return LineFormat(body.model, endpoint == "ollama_chat", body.new_parser)

    try:
        return await generate(request, endpoint, "ollama-", new_format, _require_words)
    except _NoWordsError as error:
        name = request.app.state.service.serving.resolve_model(without_tag(error.model))
        return answer_json(LineFormat(name, endpoint == "ollama_chat").loaded())


class _NoWordsError(Exception):
    """A body that only asks to load or unload the model, which is loaded as long as the server runs."""

    def __init__(self, model: str | None) -> None:
        self.model = model


def _require_words(raw: bytearray) -> bytearray:
    """Return the body of a chat or prompt. Raises _NoWordsError if it has no words."""
    if len(raw) > MAX_NAME_BYTES:
        return raw
    try:
        asked = msgspec.json.decode(raw, type=_Worded)
    except (msgspec.DecodeError, RecursionError):
        return raw  # the reader says what is wrong
    if asked.prompt or asked.messages or asked.images:
        return raw
    raise _NoWordsError(asked.model)


async def _named(request: Request) -> str:
    """Return the name of the model in a body. Raises UnknownModelError."""
    service: Service = request.app.state.service
    require_json(request)
    try:
        named = msgspec.json.decode(await read_body(request, MAX_NAME_BYTES), type=_Named)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the request body is no JSON with a model: {error}", code="invalid_json") from None
    return service.serving.resolve_model(without_tag(named.model or named.name))


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _details(service: Service) -> dict[str, Any]:
    family = service.serving.architecture or "transformer"
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": service.engine.config.model.dtype,
    }
