"""Describe the body that a batch is made with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pypto_serving.api.common.fields import FieldRules
from pypto_serving.api.common.schemas import Body

MAX_METADATA, MAX_METADATA_CHARS = 16, 512
RULES = FieldRules({}, frozenset({"output_expires_after"}))


class BatchBody(Body):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
