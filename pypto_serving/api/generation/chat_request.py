"""Make the prompt and the parameters of a conversation, whichever endpoint it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.chat.tools import ToolUse
from pypto_serving.api.generation.request import (
    FittedPrompt,
    check_prompt_logprobs,
    fit_num_logprobs,
    fit_params,
    fit_prompt,
)
from pypto_serving.api.grammars.chat_guide import with_chat_guide
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to answer.

    - `messages`, `kwargs`: what ChatEncoder.encode takes, but for the tools; the client's field is `messages_field`
    - `max_tokens`: the client's own, from its field `max_tokens_field`; None leaves the choice to `default_max_tokens`
    - `thinking_budget`: most tokens of reasoning
    - `hides_reasoning`: no part of the answer is reasoning
    - `stream`: log-probabilities need not fit one answer
    """

    messages: Sequence[Mapping[str, Any]]
    kwargs: Mapping[str, Any]
    params: SamplingParams
    tools: ToolUse
    messages_field: str = "messages"
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    default_max_tokens: int | None = None
    add_special_tokens: bool = False
    thinking_budget: int | None = None
    hides_reasoning: bool = False
    stream: bool = False


class EncodedRequest(NamedTuple):
    """The prompt of a conversation, and how to parse its outputs; None means plain text."""

    token_ids: list[int]
    form: OutputFormat | None


class FittedChat(NamedTuple):
    """What to generate for a conversation."""

    prompt: FittedPrompt
    params: SamplingParams
    form: OutputFormat | None


def encode_chat(prompter: Prompter, chat: ChatRequest) -> EncodedRequest:
    """Render and encode a conversation. Raises RequestError that names the field at fault."""
    prompter.check_length(sum(len(message["content"]) for message in chat.messages), chat.messages_field)
    tools = chat.tools.described()
    encoded = prompter.chat_encoder.encode(chat.messages, {**chat.kwargs, **({"tools": tools} if tools else {})})
    ids = prompter.encode_chat(encoded, chat.messages_field, chat.add_special_tokens)
    form = encoded.new_parser
    if form is not None:
        calls = form.calls if form.calls is None or chat.tools.parallel else replace(form.calls, one=True)
        form = replace(form, calls=calls, hides_reasoning=chat.hides_reasoning)
    return EncodedRequest(ids, form)


def fit_chat(prompter: Prompter, chat: ChatRequest) -> FittedChat:
    """Make the prompt, fit it to the context, and add the guide of the output. Raises RequestError."""
    ids, form = encode_chat(prompter, chat)
    params = chat.params
    prompt = fit_prompt(
        ids,
        chat.max_tokens,
        prompter.config,
        default_max_tokens=chat.default_max_tokens,
        max_tokens_field=chat.max_tokens_field,
        prompt_field=chat.messages_field,
        truncate_to=params.truncate_prompt_tokens,
    )
    check_prompt_logprobs([prompt], params)
    if not chat.stream:
        (prompt,) = fit_num_logprobs([prompt], params, chat.max_tokens)
    guided = with_chat_guide(params, prompter, form, chat.tools, chat.thinking_budget)
    return FittedChat(prompt, fit_params(guided, prompter, form), form)
