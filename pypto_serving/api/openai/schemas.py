"""Describe request bodies: types are strict ("1" is not 1), null means not given, unknown fields are kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from pypto_serving.api.chat.tools import MAX_NAME_CHARS, MAX_TOOLS, MODES
from pypto_serving.types.sampling import INT32_MAX, MAX_BAD_WORDS, MAX_BIASES, MAX_STOP_IDS

MAX_MESSAGES = 16_384
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
_STOP_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
_TOOLS_SCHEMA = {
    "anyOf": [
        {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "maxLength": MAX_NAME_CHARS},
                            "description": {"type": "string"},
                            "parameters": {"type": "object"},
                            "strict": {"type": "boolean"},
                        },
                        "required": ["name"],
                    },
                },
                "required": ["function"],
            },
        },
        {"type": "null"},
    ]
}
_TOOL_CHOICE_SCHEMA = {"anyOf": [{"enum": list(MODES)}, {"type": "object"}, {"type": "null"}]}
MAX_DOCUMENTS = 1024
_OBJECT_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_JSON_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}
_CHOICE_SCHEMA = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
MAX_PING_S = 3600


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @property
    def extra(self) -> dict[str, Any]:
        """Return the fields that the schema lacks."""
        return self.__pydantic_extra__ or {}


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body):
    """The fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    sse_ping_interval: int | None = Field(None, ge=-1, le=MAX_PING_S)
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[Any, WithJsonSchema(_STOP_SCHEMA)] = None
    stop_token_ids: list[int] | None = Field(None, fail_fast=True, max_length=MAX_STOP_IDS)
    ignore_eos: bool | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    allowed_token_ids: list[int] | None = Field(None, fail_fast=True, max_length=MAX_BIASES)
    bad_words: list[str] | None = Field(None, fail_fast=True, max_length=MAX_BAD_WORDS)
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Annotated[Any, WithJsonSchema(_OBJECT_SCHEMA)] = None
    structured_outputs: Annotated[Any, WithJsonSchema(_OBJECT_SCHEMA)] = None
    guided_json: Annotated[Any, WithJsonSchema(_JSON_SCHEMA)] = None
    guided_regex: str | None = None
    guided_choice: Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)] = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: Annotated[Any, WithJsonSchema(_JSON_SCHEMA)] = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def ping_s(self) -> float | None:
        """Return after how many silent seconds a stream sends a comment; None for never."""
        return self.sse_ping_interval if self.sse_ping_interval and self.sse_ping_interval > 0 else None


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ChatMessage(_Body):
    role: str
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)] = None


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(fail_fast=True, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = Field(None, fail_fast=True, max_length=MAX_DOCUMENTS)
    tools: Annotated[Any, WithJsonSchema(_TOOLS_SCHEMA)] = None
    tool_choice: Annotated[Any, WithJsonSchema(_TOOL_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=INT32_MAX)
