"""Describe answers for /openapi.json. Other files encode them; a test checks that both agree."""

from __future__ import annotations

from typing import Any, Literal

from pypto_serving.api.common.described import Answer, TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]


class TokensByTier(Answer):
    device: int
    host: int
    disk: int
    remote: int


class PromptTokensDetails(Answer):
    cached_tokens: int
    cached_tokens_by_tier: TokensByTier
    truncated_tokens: int | None = None


class CompletionTokensDetails(Answer):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Answer):
    """The answer of POST /v1/completions; with `stream`, one event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    service_tier: Literal["default"] | None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None


class ChatLogprobs(Answer):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Answer):
    """A delta of a tool call. The first one has id, type and name; the others have more of the arguments."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatAnswer(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(Answer):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatCompletion(Answer):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default"] | None
    system_fingerprint: None
    kv_transfer_params: None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Answer):
    """One event of POST /v1/chat/completions with `stream`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class RenderedRequest(Answer):
    """A prompt with its parameters, in the form for the engine; `max_tokens` fits the context."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    cache_salt: str | None
    priority: int
