"""Describe the bodies of messages. Unknown fields are kept, to be named in the answer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from pypto_serving.api.anthropic import described
from pypto_serving.api.common.described import ABOVE_0_TO_1, number, whole
from pypto_serving.api.common.fields import FieldRules
from pypto_serving.api.common.schemas import MAX_MESSAGES, Body
from pypto_serving.types.sampling import MAX_STOPS

RULES = FieldRules(
    {"container": (), "mcp_servers": ([],)},
    frozenset(
        {
            "cache_control",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    ),
)
"""Prefixes are cached without being asked, so `cache_control` changes nothing."""


class CountTokensBody(Body):
    """The body of POST /v1/messages/count_tokens: a conversation."""

    model: str | None = None
    messages: Annotated[list[Any], described.MESSAGES] = Field(fail_fast=True, max_length=MAX_MESSAGES)
    system: Annotated[Any, described.SYSTEM] = None
    tools: Annotated[Any, described.TOOLS] = None
    tool_choice: Annotated[Any, described.TOOL_CHOICE] = None
    thinking: Annotated[Any, described.THINKING] = None
    output_config: Annotated[Any, described.OUTPUT_CONFIG] = None
    thread: Annotated[Any, described.NOTHING] = None


class MessagesBody(CountTokensBody):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, described.MAX_TOKENS]
    stream: bool | None = None
    stop_sequences: Annotated[list[str] | None, described.STOPS] = Field(None, fail_fast=True, max_length=MAX_STOPS)
    temperature: Annotated[float | None, number(0, 100)] = None
    top_p: Annotated[float | None, ABOVE_0_TO_1] = None
    top_k: Annotated[int | None, whole(-1)] = None
