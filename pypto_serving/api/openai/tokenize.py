"""Serve POST /tokenize and /detokenize, and the render endpoints, which answer with requests for the engine."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving.api.common.body import (
    Answered,
    Generating,
    IgnoredFields,
    ReadBody,
    answer_read,
    check_num_answered,
    parse_json,
)
from pypto_serving.api.common.described import Answer
from pypto_serving.api.common.respond import answer_json
from pypto_serving.api.generation.request import ChatRequest, GenerationRequest, encode_chat
from pypto_serving.api.openai.answers import Detokenized, Tokenized
from pypto_serving.api.openai.bodies import encoder_kwargs, read_history, read_tools
from pypto_serving.api.openai.schemas import DetokenizeBody, TokenizeBody
from pypto_serving.api.prompting.prompts import Prompter
from pypto_serving.api.prompting.template import find_template
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.text.files import load_special_tokens, read_optional_json
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ModelError, RequestError
from pypto_serving.threads import in_slow_thread
from pypto_serving.types.sampling import SamplingParams


async def tokenize(request: Request) -> Response:
    """Answer with the token ids of a text, or of a chat's prompt."""
    return await answer_read(request, "tokenize")


async def detokenize(request: Request) -> Response:
    """Answer with the text of token ids."""
    return await answer_read(request, "detokenize")


async def tokenizer_info(request: Request) -> Response:
    """Answer with what the checkpoint says of its tokenizer, and the chat template; for lm-eval."""
    serving: ServingConfig = request.app.state.service.serving
    _tokenizer(request.app.state.service.prompter)
    return answer_json(await in_slow_thread(_describe_tokenizer, serving))


def _describe_tokenizer(serving: ServingConfig) -> dict[str, Any]:
    folder = Path(serving.tokenizer_dir)
    described = read_optional_json(folder / "tokenizer_config.json") | load_special_tokens(folder)
    described.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    try:
        described["chat_template"], _ = find_template(folder, serving.chat_template)
    except ModelError:
        described["chat_template"] = None
    return described


def read_tokenize(prompter: Prompter, serving: ServingConfig, raw: bytes | bytearray) -> Answered:
    """Encode a text, or the prompt of a chat; both may be longer than the context."""
    body = parse_json(raw, TokenizeBody)
    serving.resolve_model(body.model)
    tokenizer, known, left_out = _tokenizer(prompter), frozenset[str](), list[str]()
    if body.prompt is not None and body.messages is None:
        prompter.check_length(len(body.prompt), "prompt")
        ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    elif body.messages is not None and body.prompt is None:
        known = prompter.chat_encoder.request_fields
        history, left_out_parts = read_history(body.messages)
        tools, left_out_tools = read_tools(body.tools, body.tool_choice, None)
        left_out = [*left_out_tools, *left_out_parts]
        chat = ChatRequest(
            messages=history,
            kwargs=encoder_kwargs(body, known, serving.trust_request_chat_template),
            params=SamplingParams(),
            tools=tools,
            add_special_tokens=bool(body.add_special_tokens),
        )
        ids, _ = encode_chat(prompter, chat)
    else:
        raise RequestError("send either prompt or messages", param="prompt")
    check_num_answered(len(ids), "messages" if body.prompt is None else "prompt")
    texts = [tokenizer.raw.id_to_token(i) or "" for i in ids] if body.return_token_strs else None
    answer = Tokenized(len(ids), prompter.config.limits.max_model_len, ids, texts)
    return _answered(answer, body.unknown_fields(known) + left_out)


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


def _answered(answer: Answer, ignored: list[str]) -> Answered:
    return Answered(IgnoredFields.of(ignored), msgspec.json.encode(answer))


IDS_AT_ONCE = 1 << 14
"""Token ids that a thread encodes before other threads may run."""
MAX_RENDERED_BYTES = 32 << 20


async def render_completion(request: Request) -> Response:
    """Answer with one engine request for each prompt."""
    body, requests = await _render(request, "completions", "cmpl", "prompt")
    return Response(b"[" + b",".join(requests) + b"]", 200, body.headers(), "application/json")


async def render_chat_completion(request: Request) -> Response:
    """Answer with the engine request of a chat."""
    body, [content] = await _render(request, "chat", "chatcmpl", "messages")
    return Response(content, 200, body.headers(), "application/json")


async def _render(request: Request, endpoint: Generating, prefix: str, field: str) -> tuple[ReadBody, list[bytes]]:
    body: ReadBody = await request.app.state.reading.read(request, endpoint)
    wanted = body.generation(f"{prefix}-{uuid.uuid4().hex}")
    check_num_answered(sum(len(prompt.token_ids) for prompt in wanted.prompts), field)
    return body, await in_slow_thread(_write_all, body, wanted, field)


def _write_all(body: ReadBody, wanted: GenerationRequest, field: str) -> list[bytes]:
    """Write all prompts, each with the parameters. Raises RequestError above MAX_RENDERED_BYTES in all."""
    written, num_bytes = [], 0
    for number in range(len(wanted.prompts)):
        written.append(_write(body, wanted, number))
        num_bytes += len(written[-1])
        if num_bytes > MAX_RENDERED_BYTES:
            problem = f"the answer would have more than {MAX_RENDERED_BYTES} bytes"
            raise RequestError(f"{problem}; send fewer prompts, or a short grammar", param=field)
    return written


def _write(body: ReadBody, wanted: GenerationRequest, number: int) -> bytes:
    """Write the RenderedRequest of a prompt, with the id of its first choice."""
    prompt = wanted.prompts[number]
    ids = prompt.token_ids
    pieces = (msgspec.json.encode([*ids[at : at + IDS_AT_ONCE]])[1:-1] for at in range(0, len(ids), IDS_AT_ONCE))
    return msgspec.json.encode(
        {
            "request_id": f"{wanted.id}-{number * wanted.params.n}",
            "token_ids": msgspec.Raw(b"[" + b",".join(pieces) + b"]"),
            "sampling_params": _named(wanted.params) | {"max_tokens": prompt.max_tokens},
            "model": body.model,
            "stream": body.stream,
            "cache_salt": wanted.cache_salt or None,
            "priority": wanted.priority,
        }
    )


def _named(value: msgspec.Struct) -> dict[str, Any]:
    """Convert a struct, and structs in it, to dicts."""
    fields = msgspec.structs.asdict(value).items()
    return {name: _named(each) if isinstance(each, msgspec.Struct) else each for name, each in fields}
