"""Describe files and batches, in the form in which they are created, sent and stored."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from pydantic import Field

from pypto_serving.api.common.body import Body, FieldRules
from pypto_serving.api.common.described import Answer

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"]
FINAL: tuple[Status, ...] = ("failed", "completed", "cancelled")


class WholeAnswer(Answer, omit_defaults=False):
    """Base of answers that show every field."""


class File(WholeAnswer):
    """A file of requests or answers."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(WholeAnswer):
    data: list[File]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class DeletedFile(WholeAnswer):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(WholeAnswer):
    """Why a line of the input is not a valid request, or why the server gave up the batch."""

    message: str
    line: int | None
    code: Literal["invalid_request", "storage_failed"] = "invalid_request"
    param: None = None


class BatchErrors(WholeAnswer):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(WholeAnswer):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(WholeAnswer):
    """A batch: the requests of a file and their progress. Times are in seconds since the epoch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int | None = None
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: None = None
    errors: BatchErrors | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    object: Literal["batch"] = "batch"


class BatchList(WholeAnswer):
    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


MAX_METADATA, MAX_METADATA_CHARS = 16, 512


class BatchBody(Body):
    """The body of POST /v1/batches."""

    rules: ClassVar[FieldRules] = FieldRules(accepted=frozenset({"output_expires_after"}))

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
