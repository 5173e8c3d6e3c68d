"""Describe the body of POST /v1/decisions. Unknown fields are kept, to be named in the answer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from pypto_serving.api.common.described import text
from pypto_serving.api.common.fields import FieldRules
from pypto_serving.api.common.schemas import MAX_SALT_CHARS, Body
from pypto_serving.api.decisions import described

RULES = FieldRules({"stream": (False,)}, frozenset({"prompt_cache_options", "safety_identifier"}))
"""Prefixes are cached without being asked, so `prompt_cache_options` changes nothing."""


class DecisionBody(Body):
    """The body of POST /v1/decisions. `prompt_cache_key` parts the prefix cache, as a cache salt does."""

    model: str | None = None
    input: Annotated[Any, described.INPUT]
    questions: Annotated[list[Any], described.QUESTIONS] = Field(fail_fast=True, max_length=described.MAX_QUESTIONS)
    prompt_cache_key: Annotated[str | None, text(0, MAX_SALT_CHARS)] = Field(None, max_length=MAX_SALT_CHARS)
