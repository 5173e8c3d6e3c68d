"""Turn text and chats into token ids that the model knows."""

from __future__ import annotations

from pypto_serving.api.chat import EncodedChat
from pypto_serving.api.service import Service
from pypto_serving.errors import ContextLengthError, RequestError
from pypto_serving.util import brief

MAX_CHARS_PER_TOKEN = 256
"""Longer texts are refused before they are encoded."""


async def encode_text(service: Service, text: str, where: str, add_special_tokens: bool) -> list[int]:
    """Encode one text; `where` names its field in errors, such as `prompt[2]`.

    Raises RequestError if the text is empty, cannot fit the context, or the model has no tokenizer.
    """
    if service.tokenizer is None:
        raise RequestError(f"this model has no tokenizer.json: {where} must be a list of token ids", param="prompt")
    limit = service.engine.config.max_model_len
    if len(text) > limit * MAX_CHARS_PER_TOKEN:
        raise ContextLengthError(
            limit,
            f"However, {where} has {len(text)} characters, which cannot fit; shorten it",
            param=field_of(where),
        )
    ids = await service.tokenizer.encode_async(text, add_special_tokens)
    if not ids:
        raise RequestError(f"{where} is empty; send at least one token", param=field_of(where))
    return check_token_ids(service, ids, where)


async def encode_chat(service: Service, chat: EncodedChat, add_special_tokens: bool) -> list[int]:
    """Encode the prompt of a chat. Raises RequestError like `encode_text` and `check_token_ids`."""
    if isinstance(chat.prompt, str):
        return await encode_text(service, chat.prompt, "messages", add_special_tokens)
    return check_token_ids(service, chat.prompt, "messages")


def check_token_ids(service: Service, ids: list[int], where: str) -> list[int]:
    """Return `ids`, which are not empty. Raises RequestError if one is outside the vocabulary."""
    vocab_size = service.engine.config.vocab_size
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        message = f"{where}: token id {brief(bad)} is not between 0 and {vocab_size - 1}"
        raise RequestError(message, param=field_of(where))
    return ids


def field_of(where: str) -> str:
    """Return the field of a place: `prompt` of `prompt[2]`."""
    return where.partition("[")[0]
