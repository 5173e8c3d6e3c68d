"""Describe request bodies: types are strict ("1" is not 1), null means not given, unknown fields are kept."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from pypto_serving.api.common.body import MAX_MESSAGES, MAX_SALT_CHARS, Body, FieldRules, StreamBody
from pypto_serving.api.common.described import ABOVE_0_TO_1, number, text, whole
from pypto_serving.api.generation.request import MAX_TIMEOUT_S
from pypto_serving.api.openai import described
from pypto_serving.api.openai.described import MAX_DOCUMENTS
from pypto_serving.types.sampling import (
    HIGHEST_REPETITION,
    INT32_MAX,
    LOWEST_REPETITION,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_IDS,
)

_NEUTRAL_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "json_schema": (),
    "regex": ("",),
    "ebnf": ("",),
    "grammar": ("",),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "kv_transfer_params": ({},),
    "lora_path": (),
    "mm_processor_kwargs": ({},),
    "store": (False,),
}
_ACCEPTED_EVERYWHERE = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "session_id",
        "spaces_between_special_tokens",
    }
)
"""`spaces_between_special_tokens`: the tokenizers of the served families put none there."""


class PromptBody(Body):
    """Fields that may change a prompt, whatever it is made of."""

    model: str | None = None
    response_format: Annotated[Any, described.RESPONSE_FORMAT] = None
    add_special_tokens: bool | None = None


class StreamOptions(Body):
    rules: ClassVar[FieldRules] = FieldRules(accepted=frozenset({"include_obfuscation"}))

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(PromptBody, StreamBody):
    """The fields that completions and chat completions share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int | None, whole(1, MAX_N)] = None
    temperature: Annotated[float | None, number(0, 100)] = None
    top_p: Annotated[float | None, ABOVE_0_TO_1] = None
    top_k: Annotated[int | None, whole(-1)] = None
    min_p: Annotated[float | None, number(0, 1)] = None
    max_tokens: Annotated[int | None, whole(0)] = None
    min_tokens: Annotated[int | None, whole(0)] = None
    stop: Annotated[Any, described.STOP] = None
    stop_token_ids: Annotated[list[int] | None, described.STOP_IDS] = Field(
        None, fail_fast=True, max_length=MAX_STOP_IDS
    )
    ignore_eos: bool | None = None
    seed: Annotated[int | None, whole(-(2**63), 2**64 - 1)] = None
    frequency_penalty: Annotated[float | None, number(-2, 2)] = None
    presence_penalty: Annotated[float | None, number(-2, 2)] = None
    repetition_penalty: Annotated[float | None, number(LOWEST_REPETITION, HIGHEST_REPETITION)] = None
    logit_bias: Annotated[dict[str, float] | None, described.BIASES] = Field(None, max_length=MAX_BIASES)
    allowed_token_ids: Annotated[list[int] | None, described.ALLOWED_IDS] = Field(
        None, fail_fast=True, max_length=MAX_BIASES
    )
    bad_words: Annotated[list[str] | None, described.BAD_WORDS] = Field(None, fail_fast=True, max_length=MAX_BAD_WORDS)
    prompt_logprobs: Annotated[int | None, whole(0, MAX_LOGPROBS)] = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, described.TRUNCATION] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: Annotated[Any, described.STRUCTURED] = None
    guided_json: Annotated[Any, described.JSON] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, fail_fast=True)
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: Annotated[Any, described.JSON] = None
    request_id: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    priority: Annotated[int | None, whole(-INT32_MAX)] = None
    cache_salt: Annotated[str | None, text(1, MAX_SALT_CHARS)] = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})
    rules: ClassVar[FieldRules] = FieldRules(
        {**_NEUTRAL_EVERYWHERE, "suffix": ("",), "prompt_embeds": ()}, _ACCEPTED_EVERYWHERE
    )

    prompt: Annotated[Any, described.PROMPT] = None
    logprobs: Annotated[int | None, whole(0, MAX_LOGPROBS)] = None
    echo: bool | None = None
    best_of: Annotated[int | None, whole(1, MAX_N)] = None


class ChatMessage(Body):
    model_config = ConfigDict(json_schema_extra=described.complete_message)

    role: str
    content: Annotated[Any, described.CONTENT] = None


class ChatPromptBody(PromptBody):
    """The fields besides the messages that make the prompt of a chat."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = Field(None, fail_fast=True, max_length=MAX_DOCUMENTS)
    tools: Annotated[Any, described.TOOLS] = None
    tool_choice: Annotated[Any, described.TOOL_CHOICE] = None
    reasoning_effort: Annotated[Any, described.EFFORT] = None


class ChatBody(GenerationBody, ChatPromptBody):
    """The body of POST /v1/chat/completions."""

    rules: ClassVar[FieldRules] = FieldRules(
        {
            **_NEUTRAL_EVERYWHERE,
            "best_of": (1,),
            "echo": (False,),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "verbosity": ("medium",),
            "modalities": (["text"],),
            "audio": (),
            "moderation": (),
            "prediction": (),
            "web_search_options": (),
        },
        _ACCEPTED_EVERYWHERE,
    )

    messages: list[ChatMessage] = Field(fail_fast=True, max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})
    max_tokens: Annotated[int | None, whole(1)] = None
    max_completion_tokens: Annotated[int | None, whole(1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, whole(0, MAX_LOGPROBS)] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=INT32_MAX)


class TokenizeBody(ChatPromptBody):
    """The body of POST /tokenize: a text, or a chat."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})
    rules: ClassVar[FieldRules] = FieldRules({"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)})

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(
        None, fail_fast=True, max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1}
    )
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=INT32_MAX)]] = Field(fail_fast=True)
