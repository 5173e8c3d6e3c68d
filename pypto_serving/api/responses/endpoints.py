"""Serve /v1/responses."""

from __future__ import annotations

import re
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import BodySource, read_page
from pypto_serving.api.common.respond import respond
from pypto_serving.api.http.keys import sent_key
from pypto_serving.api.responses.answers import ResponseObject
from pypto_serving.api.responses.format import ResponseFormat
from pypto_serving.api.responses.response_body import with_earlier
from pypto_serving.api.responses.schemas import MAX_ID_CHARS
from pypto_serving.api.responses.store import MAX_RESPONSE_BYTES, Kept, ResponseStore
from pypto_serving.errors import RequestError
from pypto_serving.util import brief

MAX_PAGE, PAGE = 100, 20
_FIELD = "previous_response_id"
_GIVEN = re.compile(rb'"previous_response_id"\s*:')


class _Previous(msgspec.Struct):
    previous_response_id: Any = None


async def create_response(request: Request) -> Response:
    """Answer items."""
    reading: BodySource = request.app.state.reading
    store, key = _store(request), _key(request)
    body = await reading.read(request, "responses", lambda raw: with_earlier(raw, _earlier(store, key, raw)))
    repeated = body.repeated
    assert repeated is not None
    wanted = body.generation(f"resp_{uuid.uuid4().hex}")

    def keep(response: ResponseObject) -> None:
        if repeated.store and len(repeated.items) <= MAX_RESPONSE_BYTES:
            output = msgspec.json.encode(response.output)
            history = repeated.items[:-1] + (b"," if output != b"[]" else b"") + output[1:]
            store.add(key, wanted.id, Kept(msgspec.json.encode(response), repeated.items, history))

    form = ResponseFormat(wanted.id, body.model, body.new_parser, repeated.echo, keep)
    return await respond(request, wanted, form, stream=body.stream, headers=body.headers(), ping_s=body.ping_s)


async def retrieve_response(request: Request) -> Response:
    """Answer with a response that is kept."""
    if request.query_params.get("stream") == "true":
        message = "stream is not available for a response that has ended; leave it out"
        raise RequestError(message, param="stream", code="unsupported_field")
    return _json(_kept(request).response)


async def delete_response(request: Request) -> Response:
    """Forget a response."""
    response_id = request.path_params["response_id"]
    _store(request).delete(_key(request), response_id)
    return _json(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))


async def cancel_response(request: Request) -> Response:
    """Refuse, since no response that is kept still runs: clients cancel by closing their connection."""
    _kept(request)
    message = "only a response with background = true can be cancelled; close the connection of one that is running"
    raise RequestError(message, code="not_cancellable")


async def list_input_items(request: Request) -> Response:
    """List the items that a response answers, the newest first, unless asked otherwise."""
    items = [_listed(item) for item in msgspec.json.decode(_kept(request).inputs)]
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order is {brief(order)}, but must be 'asc' or 'desc'", param="order")
    if order == "desc":
        items.reverse()
    places = read_page(query, [item["id"] for item in items], PAGE, MAX_PAGE)
    page = items[places]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    more = places.stop < len(items)
    return _json(msgspec.json.encode({"object": "list", "data": page, "has_more": more, **ends}))


def _earlier(store: ResponseStore, key: bytes | None, raw: bytearray) -> bytes:
    """Return the items of the response that a body continues. Raises RequestError if it is not kept, or `raw` long."""
    if _GIVEN.search(raw) is None:
        return b""
    if len(raw) > MAX_RESPONSE_BYTES:
        message = (
            f"{_FIELD} is only allowed in bodies of at most {MAX_RESPONSE_BYTES >> 20} MiB; send all items instead"
        )
        raise RequestError(message, param=_FIELD)
    try:
        name = msgspec.json.decode(raw, type=_Previous).previous_response_id
    except (msgspec.DecodeError, RecursionError):
        return b""  # the reader says what is wrong
    if not isinstance(name, str) or len(name) > MAX_ID_CHARS:
        return b""  # likewise
    return store.get(key, name, _FIELD).history


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item whose content is a list of parts."""
    if item["type"] != "message" or not isinstance(item.get("content"), str):
        return item
    part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
    if item["role"] == "assistant":
        part = {"type": "output_text", "text": item["content"], "annotations": []}
    return {"status": "completed", **item, "content": [part]}


def _kept(request: Request) -> Kept:
    return _store(request).get(_key(request), request.path_params["response_id"])


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _key(request: Request) -> bytes | None:
    return sent_key(request.scope["headers"])


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
