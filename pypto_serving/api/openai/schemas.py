"""Describe request bodies. Types are strict ("1" is not 1), null means not given, unknown fields are kept."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from pypto_serving.api.chat.tools import EFFORTS, MAX_NAME_CHARS, MAX_TOOLS, MODES, NAME
from pypto_serving.api.common.body import (
    ANY,
    MAX_MESSAGES,
    MAX_SALT_CHARS,
    PARTS,
    Body,
    FieldRules,
    StreamBody,
    by_type,
    keys,
)
from pypto_serving.api.common.body import RESPONSE_FORMAT as FORMAT_KEYS
from pypto_serving.api.common.described import (
    ABOVE_0_TO_1,
    FLAG,
    MAY_TEXT,
    OBJECT,
    TEXT,
    list_of,
    number,
    object_of,
    or_null,
    text,
    typed,
    whole,
)
from pypto_serving.api.generation.request import MAX_TIMEOUT_S, MAY_LACK_CONTENT
from pypto_serving.types import sampling

MAX_DOCUMENTS = 1024
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": sampling.INT32_MAX}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP_CHARS}
_FUNCTION_NAME = {"type": "string", "maxLength": MAX_NAME_CHARS, "pattern": f"^{NAME.pattern}$"}
_PARAMETERS = {"type": ["object", "null"]}
_FUNCTION = object_of({"name": _FUNCTION_NAME}, description=MAY_TEXT, parameters=_PARAMETERS, strict=FLAG)
_TOOL = object_of({"function": _FUNCTION}, type={"const": "function"})
_NAMED = typed("function", {"function": object_of({"name": _FUNCTION_NAME})})
_ALLOWED = object_of({"mode": {"enum": ["auto", "required"]}, "tools": list_of(_NAMED, 1, MAX_TOOLS)})
_STRUCTURE = object_of({"begin": TEXT, "schema": OBJECT, "end": TEXT})
_TAG = {"structures": list_of(_STRUCTURE, 1), "triggers": list_of(TEXT, 1)}

PROMPT = WithJsonSchema(
    {
        "anyOf": [
            TEXT | {"minLength": 1},
            list_of(TEXT | {"minLength": 1}, 1),
            list_of(_TOKEN_ID, 1),
            list_of(list_of(_TOKEN_ID, 1), 1),
        ]
    }
)
STOP = or_null(_STOP_TEXT, list_of(_STOP_TEXT, 0, sampling.MAX_STOPS))
MAX_LOGPROB_IDS = 128
"""Limit of ids whose log-probabilities each token of a stream has."""
TokenId = Annotated[int, WithJsonSchema(_TOKEN_ID)]
BadWord = Annotated[str, WithJsonSchema({"type": "string", "maxLength": sampling.MAX_BAD_WORD_CHARS, "pattern": r"\S"})]
BIASES = or_null(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": sampling.MAX_BIASES,
    }
)
ALLOWED_IDS = or_null(list_of(_TOKEN_ID, 1, sampling.MAX_BIASES))
TRUNCATION = or_null({"const": -1}, {"type": "integer", "minimum": 1, "maximum": sampling.INT32_MAX})
CONTENT = or_null(TEXT, list_of(typed("text", {"text": TEXT})))
_ARGUMENTS = {"type": ["string", "object", "null"]}
_CALLED = object_of({"name": TEXT | {"minLength": 1}}, arguments=_ARGUMENTS)
_CALL = object_of({"function": _CALLED}, type={"const": "function"})
TOOLS = or_null(list_of(_TOOL, 0, MAX_TOOLS))
TOOL_CHOICE = or_null({"enum": list(MODES)}, _NAMED, typed("allowed_tools", {"allowed_tools": _ALLOWED}))
EFFORT = or_null({"enum": list(EFFORTS)})
RESPONSE_FORMAT = or_null(
    typed("text"),
    typed("json_object") | {"properties": {"type": {"const": "json_object"}, "schema": OBJECT}},
    typed("json_schema", {"json_schema": object_of({"schema": OBJECT})}),
    typed("json_schema", {"schema": OBJECT}),
    typed("structural_tag") | {"anyOf": [{"required": ["format"]}, {"properties": _TAG, "required": list(_TAG)}]},
)
JSON = or_null(OBJECT, TEXT)
STRUCTURED = or_null(OBJECT)


def complete_message(schema: dict[str, Any]) -> None:
    """Add message fields that pydantic does not check, and the rule that only some roles may omit `content`."""
    texts: dict[str, Any] = dict.fromkeys(("reasoning", "reasoning_content"), MAY_TEXT)
    schema["properties"] |= texts | {"tool_calls": {"anyOf": [list_of(_CALL), {"type": "null"}]}}
    schema["anyOf"] = [
        {"properties": {"role": {"enum": sorted(MAY_LACK_CONTENT)}}},
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]


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
"""Fields without effect; for `spaces_between_special_tokens`, the served tokenizers never put spaces there."""
_NAMED_EVERYWHERE: dict[str, tuple[Any, ...]] = {"store": (False,)}

_INNER_EVERYWHERE = {"response_format": FORMAT_KEYS}
_NAMED_FUNCTION = keys("type", function=keys("name"))
_INNER_OF_CHATS = {
    "messages": keys(ANY, content=PARTS, tool_calls=keys("id type index", function=keys("name arguments"))),
    "tools": by_type("function", function=keys("type function")),
    "tool_choice": by_type(
        function=_NAMED_FUNCTION, allowed_tools=keys("type", allowed_tools=keys("mode", tools=_NAMED_FUNCTION))
    ),
}
"""Templates get whole messages and functions, so all of their keys may have an effect."""

TIERS = ("auto", "default", "flex", "scale", "priority", "fast")
"""OpenAI's values of `service_tier`."""


class PromptBody(Body):
    """Fields that affect any kind of prompt."""

    model: str | None = None
    response_format: Annotated[Any, RESPONSE_FORMAT] = None
    add_special_tokens: bool | None = None


class StreamOptions(Body):
    rules: ClassVar[FieldRules] = FieldRules(accepted=frozenset({"include_obfuscation"}))

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(PromptBody, StreamBody):
    """The fields that completions and chat completions share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int | None, whole(1, sampling.MAX_N)] = None
    temperature: Annotated[float | None, number(0, 100)] = None
    top_p: Annotated[float | None, ABOVE_0_TO_1] = None
    top_k: Annotated[int | None, whole(-1)] = None
    min_p: Annotated[float | None, number(0, 1)] = None
    max_tokens: Annotated[int | None, whole(0)] = None
    min_tokens: Annotated[int | None, whole(0)] = None
    stop: Annotated[Any, STOP] = None
    stop_token_ids: list[TokenId] | None = Field(None, fail_fast=True, max_length=sampling.MAX_STOP_IDS)
    ignore_eos: bool | None = None
    seed: Annotated[int | None, whole(-(2**63), 2**64 - 1)] = None
    frequency_penalty: Annotated[float | None, number(-2, 2)] = None
    presence_penalty: Annotated[float | None, number(-2, 2)] = None
    repetition_penalty: Annotated[float | None, number(sampling.LOWEST_REPETITION, sampling.HIGHEST_REPETITION)] = None
    logit_bias: Annotated[dict[str, float] | None, BIASES] = Field(None, max_length=sampling.MAX_BIASES)
    allowed_token_ids: Annotated[list[int] | None, ALLOWED_IDS] = Field(
        None, fail_fast=True, max_length=sampling.MAX_BIASES
    )
    bad_words: list[BadWord] | None = Field(None, fail_fast=True, max_length=sampling.MAX_BAD_WORDS)
    logprob_token_ids: list[TokenId] | None = Field(None, fail_fast=True, max_length=MAX_LOGPROB_IDS)
    prompt_logprobs: Annotated[int | None, whole(0, sampling.MAX_LOGPROBS)] = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, TRUNCATION] = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: Annotated[Any, STRUCTURED] = None
    guided_json: Annotated[Any, JSON] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, fail_fast=True)
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: Annotated[Any, JSON] = None
    request_id: str | None = None
    service_tier: str | None = None
    priority: Annotated[int | None, whole(-sampling.INT32_MAX)] = None
    cache_salt: Annotated[str | None, text(1, MAX_SALT_CHARS)] = None
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})
    rules: ClassVar[FieldRules] = FieldRules(
        {**_NEUTRAL_EVERYWHERE, "suffix": ("",), "prompt_embeds": ()},
        _ACCEPTED_EVERYWHERE,
        _NAMED_EVERYWHERE,
        _INNER_EVERYWHERE,
    )

    prompt: Annotated[Any, PROMPT] = None
    logprobs: Annotated[int | None, whole(0, sampling.MAX_LOGPROBS)] = None
    echo: bool | None = None
    best_of: Annotated[int | None, whole(1, sampling.MAX_N)] = None


class ChatMessage(Body):
    model_config = ConfigDict(json_schema_extra=complete_message)

    role: str
    content: Annotated[Any, CONTENT] = None


class ChatPromptBody(PromptBody):
    """The fields of a chat's prompt, besides the messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = Field(None, fail_fast=True, max_length=MAX_DOCUMENTS)
    tools: Annotated[Any, TOOLS] = None
    tool_choice: Annotated[Any, TOOL_CHOICE] = None
    reasoning_effort: Annotated[Any, EFFORT] = None


class ChatBody(GenerationBody, ChatPromptBody):
    """The body of POST /v1/chat/completions."""

    rules: ClassVar[FieldRules] = FieldRules(
        {
            **_NEUTRAL_EVERYWHERE,
            "best_of": (1,),
            "echo": (False,),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "modalities": (["text"],),
            "audio": (),
        },
        _ACCEPTED_EVERYWHERE,
        {
            **_NAMED_EVERYWHERE,
            "moderation": (),
            "prediction": (),
            "verbosity": ("medium",),
            "web_search_options": (),
        },
        {**_INNER_EVERYWHERE, **_INNER_OF_CHATS},
    )

    messages: list[ChatMessage] = Field(fail_fast=True, max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1})
    max_tokens: Annotated[int | None, whole(1)] = None
    max_completion_tokens: Annotated[int | None, whole(1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, whole(0, sampling.MAX_LOGPROBS)] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=sampling.INT32_MAX)


class TokenizeBody(ChatPromptBody):
    """The body of POST /tokenize: a text, or a chat."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})
    rules: ClassVar[FieldRules] = FieldRules(
        {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}, inner=_INNER_OF_CHATS
    )

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(
        None, fail_fast=True, max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1}
    )
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=sampling.INT32_MAX)]] = Field(fail_fast=True)
