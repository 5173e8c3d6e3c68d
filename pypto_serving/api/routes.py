"""The endpoints: which handler answers what, and how /openapi.json describes it."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pypto_serving.api.anthropic.answers import Message, MessageError, MessageEvent, TokenCount
from pypto_serving.api.anthropic.messages import count_tokens, create_message
from pypto_serving.api.anthropic.messages_body import CountTokensBody, MessagesBody
from pypto_serving.api.batch import endpoints as batch
from pypto_serving.api.batch.schemas import Batch, BatchBody, BatchList, DeletedFile, File, FileList
from pypto_serving.api.decisions.decision_body import DecisionBody
from pypto_serving.api.decisions.endpoint import Decision, create_decision
from pypto_serving.api.openai import answers as openai
from pypto_serving.api.openai.answers import RenderedRequest
from pypto_serving.api.openai.chat import create_chat_completion
from pypto_serving.api.openai.completions import create_completion
from pypto_serving.api.openai.models import list_models, retrieve_model
from pypto_serving.api.openai.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from pypto_serving.api.openai.tokenize import detokenize, render_chat_completion, render_completion, tokenize
from pypto_serving.api.openapi import (
    GENERATING,
    MODEL_PARAMETER,
    PAGE,
    TIER_PARAMETER,
    UPLOAD,
    ApiRoute,
    document,
    event,
    named_event,
    reference,
    responses,
)
from pypto_serving.api.responses.answers import DeletedResponse, ItemList, ResponseEvent, ResponseObject
from pypto_serving.api.responses.endpoints import (
    cancel_response,
    create_response,
    delete_response,
    list_input_items,
    retrieve_response,
)
from pypto_serving.api.responses.response_body import ResponsesBody
from pypto_serving.api.status import (
    HealthState,
    Load,
    ServerInfo,
    Version,
    health,
    load,
    metrics,
    ready,
    reset_prefix_cache,
    server_info,
    show_version,
)
from pypto_serving.api.web.dashboard import show_stats
from pypto_serving.api.web.pages import ASSETS, PAGES, show_page


async def describe_api(request: Request) -> Response:
    """Answer with a description of all endpoints, in OpenAPI's format."""
    state = request.app.state
    if state.description is None:
        state.description = document(request.app.routes, needs_key=bool(state.service.keys))
    return Response(state.description, media_type="application/json")


def _made(answer: Any, **others: Any) -> dict[int, Any]:
    return responses(answer, *GENERATING, **others)


def _stored(answer: Any, *errors: int) -> dict[int, Any]:
    return responses(answer, 400, 404, 507, *errors)


get, post, delete = partial(ApiRoute, "GET"), partial(ApiRoute, "POST"), partial(ApiRoute, "DELETE")
hidden = partial(Route, include_in_schema=False)

_RENDERED = reference(RenderedRequest)
_COMPLETION = _made(openai.Completion, event=event(openai.Completion))
_CHAT = _made(openai.ChatCompletion, event=event(openai.ChatCompletionChunk))
_MESSAGE = _made(Message, event=named_event(MessageEvent), error=MessageError)
_RESPONSE = _made(ResponseObject, event=named_event(ResponseEvent))
_KEPT = responses(ResponseObject, 400, 404)

ROUTES = (
    post("/v1/completions", create_completion, _COMPLETION, CompletionBody),
    post("/v1/chat/completions", create_chat_completion, _CHAT, ChatBody),
    post("/v1/messages", create_message, _MESSAGE, MessagesBody),
    post("/v1/messages/count_tokens", count_tokens, _made(TokenCount, error=MessageError), CountTokensBody),
    post("/v1/responses", create_response, _RESPONSE, ResponsesBody),
    get("/v1/responses/{response_id}", retrieve_response, _KEPT),
    delete("/v1/responses/{response_id}", delete_response, responses(DeletedResponse, 400, 404)),
    post("/v1/responses/{response_id}/cancel", cancel_response, _KEPT),
    get("/v1/responses/{response_id}/input_items", list_input_items, responses(ItemList, 400, 404), parameters=PAGE),
    post("/v1/decisions", create_decision, _made(Decision), DecisionBody),
    post("/v1/completions/render", render_completion, _made({"type": "array", "items": _RENDERED}), CompletionBody),
    post("/v1/chat/completions/render", render_chat_completion, _made(_RENDERED), ChatBody),
    post("/tokenize", tokenize, _made(openai.Tokenized), TokenizeBody),
    post("/detokenize", detokenize, _made(openai.Detokenized), DetokenizeBody),
    get("/v1/models", list_models, responses(openai.ModelList)),
    get("/v1/models/{model_id:path}", retrieve_model, responses(openai.Model, 404), parameters=[MODEL_PARAMETER]),
    get("/health", health, responses(HealthState, busy=HealthState)),
    get("/ready", ready, responses(HealthState, 429, busy=HealthState)),
    get("/load", load, responses(Load)),
    get("/server_info", server_info, responses(ServerInfo)),
    get("/version", show_version, responses(Version)),
    get("/metrics", metrics, responses("text/plain")),
    post("/reset_prefix_cache", reset_prefix_cache, responses("text/plain", 400), parameters=[TIER_PARAMETER]),
    hidden("/health", health, methods=["HEAD"]),
    hidden("/ready", ready, methods=["HEAD"]),
    hidden("/ping", health, methods=["GET", "POST"]),
    hidden("/openapi.json", describe_api),
    hidden("/dashboard/stats", show_stats),
    *(hidden(path, show_page) for path in (*PAGES, ASSETS + "{name}")),
)

BATCH_ROUTES = (
    post("/v1/files", batch.stored(batch.create_file), _stored(File, 413, 415), UPLOAD),
    get("/v1/files", batch.stored(batch.list_files), _stored(FileList), parameters=PAGE),
    get("/v1/files/{file_id}", batch.stored(batch.retrieve_file), _stored(File)),
    get("/v1/files/{file_id}/content", batch.stored(batch.file_content), _stored("application/octet-stream")),
    delete("/v1/files/{file_id}", batch.stored(batch.delete_file), _stored(DeletedFile)),
    post("/v1/batches", batch.stored(batch.create_batch), _stored(Batch, 413, 415), BatchBody),
    get("/v1/batches", batch.stored(batch.list_batches), _stored(BatchList), parameters=PAGE),
    get("/v1/batches/{batch_id}", batch.stored(batch.retrieve_batch), _stored(Batch)),
    post("/v1/batches/{batch_id}/cancel", batch.stored(batch.cancel_batch), _stored(Batch, 413, 415)),
)
