"""Serve /v1/responses. Keep responses in bounded memory, each for the client of its request."""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.chat.tools import refuse
from pypto_serving.api.common.body import MAX_MESSAGES, ReadBody, Repeated, answer_read, page_of
from pypto_serving.api.common.respond import AnswerFormat, answer_json, generate
from pypto_serving.api.generation.request import GenerationRequest
from pypto_serving.api.http.keys import client_of
from pypto_serving.api.responses.answers import DeletedResponse, ResponseObject
from pypto_serving.api.responses.format import ResponseFormat
from pypto_serving.api.responses.history import MAX_RESPONSE_BYTES, is_reference
from pypto_serving.api.responses.response_body import MAX_ID_CHARS, with_earlier
from pypto_serving.errors import RequestError
from pypto_serving.util import brief

MAX_RESPONSES, MAX_BYTES = 4096, 256 << 20
ENTRY_BYTES = 256
"""What the place of an item takes, beside its JSON and its id."""


class Kept(NamedTuple):
    """A response and its conversation as JSON: the object, its input items, and these together with its output items.

    It holds the whole conversation: links to earlier responses would break when one is deleted or makes room.
    `items` are those that later bodies may refer to, by id: its own and those of its output.
    """

    response: bytes
    inputs: bytes
    history: bytes
    items: dict[str, bytes] = {}  # noqa: RUF012

    @property
    def num_bytes(self) -> int:
        own = sum(len(name) + len(item) + ENTRY_BYTES for name, item in self.items.items())
        return len(self.response) + len(self.inputs) + len(self.history) + own


class ResponseStore:
    """Owns the responses of one server; evicts the least recently used first. Used in the event loop only."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._items: dict[tuple[str, str], dict[str, bytes]] = {}

    def add(self, client: str, response_id: str, kept: Kept) -> None:
        """Keep a response, and evict others until all fit."""
        if kept.num_bytes > min(MAX_RESPONSE_BYTES, self._most_bytes):
            return
        self._kept[(client, response_id)] = kept
        for name, item in kept.items.items():
            self._items.setdefault((client, name), {})[response_id] = item
        self.num_bytes += kept.num_bytes
        while len(self._kept) > self._most or self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, place: tuple[str, str]) -> None:
        dropped = self._kept.pop(place)
        self.num_bytes -= dropped.num_bytes
        client, response_id = place
        for name in dropped.items:
            by_response = self._items[client, name]
            del by_response[response_id]
            if not by_response:
                del self._items[client, name]

    def find_item(self, client: str, item_id: str) -> bytes | None:
        """Return an item of the newest response that has one with this id, as JSON; None if no kept one has."""
        by_response = self._items.get((client, item_id))
        return by_response[next(reversed(by_response))] if by_response else None

    def get(self, client: str, response_id: str, param: str | None = None) -> Kept:
        """Return a response. Raises RequestError about the field `param` if there is none."""
        place = (client, response_id)
        if place not in self._kept:
            message = f"there is no response {response_id[:128]!r}: it was not stored, was deleted, or had to make room"
            raise RequestError(message, param=param, code="response_not_found", status=404)
        self._kept.move_to_end(place)
        return self._kept[place]

    def delete(self, client: str, response_id: str) -> None:
        """Forget a response. Raises RequestError if there is none."""
        self.get(client, response_id)
        self._drop((client, response_id))


MAX_PAGE, PAGE = 100, 20
_FIELD = "previous_response_id"
_HAS_ID = re.compile(rb'"id"\s*:|\\u006[49]')
_GIVEN = re.compile(rb'"previous_response_id"\s*:|\\u00(?:5[fF]|[67])')
"""Find a key, or an escape of one of its letters, which ordinary clients do not write."""


class _Referring(msgspec.Struct):
    previous_response_id: Any = None
    input: msgspec.Raw = msgspec.Raw(b"[]")


class _Item(msgspec.Struct):
    type: Any = None
    id: Any = None
    role: Any = None


async def create_response(request: Request) -> Response:
    """Answer a conversation, given as items."""
    store, client = _store(request), client_of(request)

    def new_format(body: ReadBody, wanted: GenerationRequest) -> AnswerFormat:
        assert body.repeated is not None
        return ResponseFormat(body, wanted, partial(_keep, store, client, body.repeated))

    return await generate(request, "responses", "resp_", new_format, partial(_with_kept, store, client))


def _keep(store: ResponseStore, client: str, repeated: Repeated, response: ResponseObject) -> None:
    if repeated.store and len(repeated.items) <= MAX_RESPONSE_BYTES:
        output = msgspec.json.encode(response.output)
        history = repeated.items[:-1] + (b"," if output != b"[]" else b"") + output[1:]
        own = repeated.own | {item.id: msgspec.json.encode(item) for item in response.output}
        store.add(client, response.id, Kept(msgspec.json.encode(response), repeated.items, history, own))


async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that items would have."""
    return await answer_read(request, "input_tokens", partial(_with_kept, _store(request), client_of(request)))


async def retrieve_response(request: Request) -> Response:
    """Answer with a kept response."""
    if request.query_params.get("stream") == "true":
        refuse("stream", "is not available for a response that has ended; leave it out", "unsupported_field")
    return answer_json(msgspec.Raw(_kept(request).response))


async def delete_response(request: Request) -> Response:
    """Forget a response."""
    response_id = request.path_params["response_id"]
    _store(request).delete(client_of(request), response_id)
    return answer_json(DeletedResponse(response_id, "response", True))


async def cancel_response(request: Request) -> Response:
    """Refuse, since kept responses have ended; clients cancel by closing their connection."""
    _kept(request)
    message = "only a response with background = true can be cancelled; close the connection of one that is running"
    raise RequestError(message, code="not_cancellable")


async def list_input_items(request: Request) -> Response:
    """List the input items of a response, newest first by default."""
    items = [_listed(item) for item in msgspec.json.decode(_kept(request).inputs)]
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        refuse("order", f"is {brief(order)}, but must be 'asc' or 'desc'")
    if order == "desc":
        items.reverse()
    page = page_of(query, items, [item["id"] for item in items], PAGE, MAX_PAGE, MAX_PAGE)
    return answer_json({"object": "list", **page})


def _with_kept(store: ResponseStore, client: str, raw: bytearray) -> bytearray:
    """Put before a body what it refers to: the response that it continues, and kept items.

    Raises RequestError if the response is lost, or too much is meant. The reader refuses references to other items, and
    says what is wrong with a body that cannot be decoded here.
    """
    if len(raw) > MAX_RESPONSE_BYTES:
        if _GIVEN.search(raw):
            refuse(
                _FIELD, f"is only allowed in bodies of at most {MAX_RESPONSE_BYTES >> 20} MiB; send all items instead"
            )
        return with_earlier(raw, b"", None)
    name, items = _references(raw) if _GIVEN.search(raw) or _HAS_ID.search(raw) else (None, [])
    earlier = b""
    if isinstance(name, str) and len(name) <= MAX_ID_CHARS:
        earlier = store.get(client, name, _FIELD).history
    return with_earlier(raw, earlier, _referred(store, client, items) if len(items) <= MAX_MESSAGES else {})


def _references(raw: bytearray) -> tuple[Any, list[_Item]]:
    """Return the id of the response that a body continues, and the items of its input; None and [] if it has none."""
    name, items = None, list[_Item]()
    with suppress(msgspec.DecodeError, RecursionError):
        given = msgspec.json.decode(raw, type=_Referring)
        name = given.previous_response_id
        items = msgspec.json.decode(given.input, type=list[_Item])
    return name, items


def _referred(store: ResponseStore, client: str, items: list[_Item]) -> dict[str, msgspec.Raw]:
    """Return the kept items that others refer to, by id."""
    found, num_bytes = dict[str, msgspec.Raw](), 0
    for item in items:
        if isinstance(item.id, str) and is_reference(item.type, item.role):
            kept = store.find_item(client, item.id)
            if kept is not None:
                num_bytes += len(kept)
                found[item.id] = msgspec.Raw(kept)
    if num_bytes > MAX_RESPONSE_BYTES:
        refuse("input", f"refers to items of more than {MAX_RESPONSE_BYTES >> 20} MiB; refer to fewer")
    return found


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item whose content is a list of parts."""
    if item["type"] != "message" or not isinstance(item.get("content"), str):
        return item
    part: dict[str, Any] = {"type": "input_text", "text": item["content"]}
    if item["role"] == "assistant":
        part = {"type": "output_text", "text": item["content"], "annotations": []}
    return {"status": "completed", **item, "content": [part]}


def _kept(request: Request) -> Kept:
    return _store(request).get(client_of(request), request.path_params["response_id"])


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store
