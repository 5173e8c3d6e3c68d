"""Describe the body of POST /v1/responses. Unknown fields are kept, to be named in the answer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pypto_serving.api.common.body import FieldRules, StreamBody
from pypto_serving.api.common.described import ABOVE_0_TO_1, number, whole
from pypto_serving.types.sampling import MAX_LOGPROBS

MAX_ID_CHARS = 128


class ResponsesBody(StreamBody):
    """The body of POST /v1/responses."""

    rules: ClassVar[FieldRules] = FieldRules(
        {
            "background": (False,),
            "background_options": (),
            "context_management": ([],),
            "conversation": (),
            "image": (),
            "max_tool_calls": (),
            "moderation": (),
            "multi_agent": (),
            "prompt": (),
            "truncation": ("disabled",),
        },
        frozenset(
            {
                "prompt_cache_key",
                "prompt_cache_options",
                "prompt_cache_retention",
                "access_programs",
                "client_metadata",
                "safety_identifier",
                "service_tier",
                "stream_options",
                "user",
            }
        ),
    )
    """Nothing runs in the background, so a disconnect frees a request. No item is ever cut from the input."""

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=MAX_ID_CHARS)
    store: bool | None = None
    max_output_tokens: Annotated[int | None, whole(1)] = None
    temperature: Annotated[float | None, number(0, 100)] = None
    top_p: Annotated[float | None, ABOVE_0_TO_1] = None
    top_logprobs: Annotated[int | None, whole(0, MAX_LOGPROBS)] = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, fail_fast=True, max_length=16
    )
    metadata: dict[str, str] | None = None
