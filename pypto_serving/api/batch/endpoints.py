"""Serve /v1/files and /v1/batches, in the form of OpenAI's API."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pypto_serving.api.batch.batches import Batches
from pypto_serving.api.batch.multipart import read_form
from pypto_serving.api.batch.schemas import MAX_METADATA_CHARS, Batch, BatchBody, BatchList, DeletedFile, File, FileList
from pypto_serving.api.batch.store import KeyStore
from pypto_serving.api.common.body import page_of, parse_json, read_body, require_json, telling_when_parsed
from pypto_serving.api.common.respond import answer_json
from pypto_serving.api.http.keys import client_of
from pypto_serving.api.service import Service
from pypto_serving.errors import RequestError
from pypto_serving.threads import in_slow_thread
from pypto_serving.util import brief

logger = logging.getLogger("pypto_serving.api")

MAX_PAGE, MAX_LIMIT = 100, 10_000
"""Default and largest number of entries per page."""
Handler = Callable[[Request], Awaitable[Response]]


def stored(handler: Handler) -> Handler:
    """Wrap a handler so that it answers 507 if the folder cannot be read or written."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except OSError as error:
            logger.warning("the folder of batches cannot be used: %s", error)
            message = f"the server cannot store files or read them: {error.strerror}"
            raise RequestError(message, code="storage_failed", status=507) from error

    return handle


async def create_file(request: Request) -> Response:
    """Store a file of requests."""
    with telling_when_parsed(request):
        form = read_form(request.headers.get("content-type", ""), await _body(request))
        purpose = form.fields.get("purpose", "batch")
        if purpose != "batch":
            raise RequestError(f"purpose is {brief(purpose)}, but must be 'batch'", param="purpose")
        new_file = _store(request).new_file
        return answer_json(await in_slow_thread(new_file, form.filename, purpose, int(time.time()), form.data))


async def list_files(request: Request) -> Response:
    """List files, the newest first."""
    return answer_json(FileList(**_page(request, await in_slow_thread(_store(request).files))))


async def retrieve_file(request: Request) -> Response:
    """Describe a file."""
    return answer_json(_store(request).file(request.path_params["file_id"]))


async def file_content(request: Request) -> Response:
    """Answer with the current bytes of a file; a running batch may append more."""
    store = _store(request)
    file = store.file(request.path_params["file_id"])
    headers = {"content-length": str(file.bytes)}
    return StreamingResponse(store.read(file), headers=headers, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """Delete a file that no batch needs."""
    store, file_id = _store(request), request.path_params["file_id"]
    if _batches(request).needs(store, file_id):
        raise RequestError("a batch that has not ended needs this file; cancel it first", param="file_id")
    store.delete(file_id)
    return answer_json(DeletedFile(file_id))


async def create_batch(request: Request) -> Response:
    """Begin to answer the requests of a file."""
    require_json(request)
    with telling_when_parsed(request):
        body = parse_json(await _body(request), BatchBody)
    service: Service = request.app.state.service
    service.warn_ignored(body.unknown_fields())
    if any(len(part) > MAX_METADATA_CHARS for entry in (body.metadata or {}).items() for part in entry):
        raise RequestError(f"metadata has more than {MAX_METADATA_CHARS} characters in one place", param="metadata")
    return answer_json(_batches(request).create(_store(request), body))


async def list_batches(request: Request) -> Response:
    """List batches, the newest first."""
    page = _page(request, await in_slow_thread(_store(request).batches))
    return answer_json(BatchList(**{**page, "data": list(map(_batches(request).shown, page["data"]))}))


async def retrieve_batch(request: Request) -> Response:
    """Describe a batch and its progress."""
    return answer_json(_batches(request).shown(_store(request).batch(request.path_params["batch_id"])))


async def cancel_batch(request: Request) -> Response:
    """End a batch, but keep its answers so far."""
    return answer_json(_batches(request).cancel(_store(request), request.path_params["batch_id"]))


async def _body(request: Request) -> bytearray:
    service: Service = request.app.state.service
    return await read_body(request, service.serving.max_body_bytes)


def _batches(request: Request) -> Batches:
    batches: Batches = request.app.state.batches
    return batches


def _store(request: Request) -> KeyStore:
    return _batches(request).store(client_of(request))


def _page(request: Request, items: Sequence[File | Batch]) -> dict[str, Any]:
    return page_of(request.query_params, items, [item.id for item in items], MAX_PAGE, MAX_LIMIT, MAX_PAGE)
