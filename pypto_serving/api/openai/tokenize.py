"""Serve POST /tokenize and /detokenize, and what else is answered by whoever reads the body."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.chat.tools import read_tool_use
from pypto_serving.api.common.answers import Answer
from pypto_serving.api.common.body import (
    Answered,
    IgnoredFields,
    answer_read,
    check_num_answered,
    parse_json,
)
from pypto_serving.api.generation.chat_request import ChatRequest, encode_chat
from pypto_serving.api.openai.answers import Detokenized, Tokenized
from pypto_serving.api.openai.chat_body import encoder_kwargs, read_history
from pypto_serving.api.openai.schemas import ChatMessage, DetokenizeBody, TokenizeBody
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import RequestError
from pypto_serving.types.sampling import SamplingParams


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text, or of the prompt that a chat has."""
    return await answer_read(request, "tokenize")


async def detokenize(request: Request) -> Response:
    """Answer with the text of token ids."""
    return await answer_read(request, "detokenize")


def read_tokenize(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> Answered:
    """Encode a text, or the prompt of a chat; both may be longer than the context."""
    body = parse_json(raw, TokenizeBody)
    serving.resolve_model(body.model)
    tokenizer, known = _tokenizer(prompter), frozenset[str]()
    if body.prompt is not None and body.messages is None:
        prompter.check_length(len(body.prompt), "prompt")
        ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    elif body.messages is not None and body.prompt is None:
        known = prompter.chat_encoder.request_fields
        ids = _encode_chat(prompter, serving, body, body.messages)
    else:
        raise RequestError("send either prompt or messages", param="prompt")
    check_num_answered(len(ids), "messages" if body.prompt is None else "prompt")
    texts = [tokenizer.raw.id_to_token(i) or "" for i in ids] if body.return_token_strs else None
    answer = Tokenized(len(ids), prompter.config.limits.max_model_len, ids, texts)
    return _answered(answer, body.unknown_fields(known))


def read_detokenize(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> Answered:
    """Decode token ids, special tokens included."""
    body = parse_json(raw, DetokenizeBody)
    serving.resolve_model(body.model)
    tokenizer = _tokenizer(prompter)
    ids = prompter.check_token_ids(body.tokens, "tokens") if body.tokens else []
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return _answered(Detokenized(text), body.unknown_fields())


def _tokenizer(prompter: Prompter) -> Tokenizer:
    if prompter.tokenizer is None:
        raise RequestError("this model has no tokenizer.json", code="tokenizer_unavailable")
    return prompter.tokenizer


def _encode_chat(
    prompter: Prompter, serving: ServingConfig, body: TokenizeBody, messages: Sequence[ChatMessage]
) -> list[int]:
    fields = prompter.chat_encoder.request_fields
    chat = ChatRequest(
        messages=read_history(messages),
        kwargs=encoder_kwargs(body, fields, serving.trust_request_chat_template),
        params=SamplingParams(),
        tools=read_tool_use(body.tools, body.tool_choice, None),
        add_special_tokens=bool(body.add_special_tokens),
    )
    return encode_chat(prompter, chat).token_ids


def _answered(answer: Answer, ignored: list[str]) -> Answered:
    return Answered(IgnoredFields.of(ignored), msgspec.json.encode(answer))
