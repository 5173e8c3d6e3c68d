"""Describe the body that a batch is made with."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from pypto_serving.api.common.body import Body, FieldRules

MAX_METADATA, MAX_METADATA_CHARS = 16, 512


class BatchBody(Body):
    """The body of POST /v1/batches."""

    rules: ClassVar[FieldRules] = FieldRules(accepted=frozenset({"output_expires_after"}))

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
