"""The table of endpoints: path, handler, and description for /openapi.json."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pypto_serving.api import openapi, status
from pypto_serving.api.anthropic.answers import Message, MessageError, MessageEvent, TokenCount
from pypto_serving.api.anthropic.messages import count_tokens, create_message
from pypto_serving.api.anthropic.messages_body import CountTokensBody, MessagesBody
from pypto_serving.api.batch import endpoints as batch
from pypto_serving.api.batch.schemas import Batch, BatchBody, BatchList, DeletedFile, File, FileList
from pypto_serving.api.decisions.decision_body import DecisionBody
from pypto_serving.api.decisions.endpoint import Decision, create_decision
from pypto_serving.api.ollama import endpoints as ollama
from pypto_serving.api.openai import answers as openai
from pypto_serving.api.openai.answers import RenderedRequest
from pypto_serving.api.openai.chat import create_chat_completion
from pypto_serving.api.openai.completions import create_completion
from pypto_serving.api.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pypto_serving.api.openai.tokenize import (
    detokenize,
    render_chat_completion,
    render_completion,
    tokenize,
    tokenizer_info,
)
from pypto_serving.api.openapi import ApiRoute, document, event, named_event, reference, responses
from pypto_serving.api.responses import endpoints as kept
from pypto_serving.api.responses.answers import (
    DeletedResponse,
    ItemList,
    ResponseEvent,
    ResponseInputTokens,
    ResponseObject,
)
from pypto_serving.api.responses.response_body import ResponsesBody
from pypto_serving.api.web.dashboard import show_stats
from pypto_serving.api.web.pages import ASSETS, PAGES, show_page


async def describe_api(request: Request) -> Response:
    """Answer with a description of all endpoints, in OpenAPI's format."""
    state = request.app.state
    if state.description is None:
        state.description = document(request.app.routes, needs_key=bool(state.service.keys))
    return Response(state.description, media_type="application/json")


def _made(answer: Any, **others: Any) -> dict[int, Any]:
    return responses(answer, *openapi.GENERATING, **others)


def _stored(answer: Any, *errors: int) -> dict[int, Any]:
    return responses(answer, 400, 404, 507, *errors)


get, post, delete = partial(ApiRoute, "GET"), partial(ApiRoute, "POST"), partial(ApiRoute, "DELETE")
hidden = partial(Route, include_in_schema=False)

_RENDERED = reference(RenderedRequest)
_COMPLETION = _made(openai.Completion, event=event(openai.Completion))
_CHAT = _made(openai.ChatCompletion, event=event(openai.ChatCompletionChunk))
_MESSAGE = _made(Message, event=named_event(MessageEvent), error=MessageError)
_RESPONSE = _made(ResponseObject, event=named_event(ResponseEvent))
_KEPT, _ITEMS = responses(ResponseObject, 400, 404), responses(ItemList, 400, 404)
_MODEL, _RESET = responses(status.Model, 404), responses("text/plain", 400)

ROUTES = (
    post("/v1/completions", create_completion, _COMPLETION, CompletionBody),
    post("/v1/chat/completions", create_chat_completion, _CHAT, ChatBody),
    post("/v1/messages", create_message, _MESSAGE, MessagesBody),
    post("/v1/messages/count_tokens", count_tokens, _made(TokenCount, error=MessageError), CountTokensBody),
    post("/v1/responses", kept.create_response, _RESPONSE, ResponsesBody),
    post("/v1/responses/input_tokens", kept.count_input_tokens, _made(ResponseInputTokens), ResponsesBody),
    get("/v1/responses/{response_id}", kept.retrieve_response, _KEPT),
    delete("/v1/responses/{response_id}", kept.delete_response, responses(DeletedResponse, 400, 404)),
    post("/v1/responses/{response_id}/cancel", kept.cancel_response, _KEPT),
    get("/v1/responses/{response_id}/input_items", kept.list_input_items, _ITEMS, parameters=openapi.PAGE),
    post("/v1/decisions", create_decision, _made(Decision), DecisionBody),
    post("/v1/completions/render", render_completion, _made({"type": "array", "items": _RENDERED}), CompletionBody),
    post("/v1/chat/completions/render", render_chat_completion, _made(_RENDERED), ChatBody),
    post("/tokenize", tokenize, _made(openai.Tokenized), TokenizeBody),
    post("/detokenize", detokenize, _made(openai.Detokenized), DetokenizeBody),
    get("/tokenizer_info", tokenizer_info, responses({"type": "object"}, 400)),
    get("/v1/models", status.list_models, responses(status.ModelList)),
    get("/v1/models/{model_id:path}", status.retrieve_model, _MODEL, parameters=[openapi.MODEL_PARAMETER]),
    get("/health", status.health, responses(status.HealthState, busy=status.HealthState)),
    get("/ready", status.ready, responses(status.HealthState, 429, busy=status.HealthState)),
    get("/load", status.load, responses(status.Load)),
    get("/server_info", status.server_info, responses(status.ServerInfo)),
    get("/version", status.show_version, responses(status.Version)),
    get("/metrics", status.metrics, responses("text/plain")),
    post("/reset_prefix_cache", status.reset_prefix_cache, _RESET, parameters=[openapi.TIER_PARAMETER]),
    hidden("/invocations", create_chat_completion, methods=["POST"]),
    hidden("/ping", status.health, methods=["GET", "POST"]),
    hidden("/openapi.json", describe_api),
    hidden("/dashboard/stats", show_stats),
    hidden("/api/version", ollama.ollama_version),
    hidden("/api/tags", ollama.ollama_models),
    hidden("/api/ps", ollama.ollama_models),
    hidden("/api/show", ollama.show_ollama_model, methods=["POST"]),
    hidden("/api/pull", ollama.pull_ollama_model, methods=["POST"]),
    hidden("/api/chat", ollama.ollama_chat, methods=["POST"]),
    hidden("/api/generate", ollama.ollama_generate, methods=["POST"]),
    *(hidden(path, show_page) for path in (*PAGES, ASSETS + "{name}")),
)

BATCH_ROUTES = (
    post("/v1/files", batch.stored(batch.create_file), _stored(File, 413, 415), openapi.UPLOAD),
    get("/v1/files", batch.stored(batch.list_files), _stored(FileList), parameters=openapi.PAGE),
    get("/v1/files/{file_id}", batch.stored(batch.retrieve_file), _stored(File)),
    get("/v1/files/{file_id}/content", batch.stored(batch.file_content), _stored("application/octet-stream")),
    delete("/v1/files/{file_id}", batch.stored(batch.delete_file), _stored(DeletedFile)),
    post("/v1/batches", batch.stored(batch.create_batch), _stored(Batch, 413, 415), BatchBody),
    get("/v1/batches", batch.stored(batch.list_batches), _stored(BatchList), parameters=openapi.PAGE),
    get("/v1/batches/{batch_id}", batch.stored(batch.retrieve_batch), _stored(Batch)),
    post("/v1/batches/{batch_id}/cancel", batch.stored(batch.cancel_batch), _stored(Batch, 413, 415)),
)
