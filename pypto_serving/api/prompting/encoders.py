"""Load the encoder that turns chats of a checkpoint into prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pypto_serving.api.chat import ChatEncoder, ChatOrigin, Message
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.text.files import has_tokenizer
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ModelError, RequestError
from pypto_serving.util import LazyRegistry

logger = logging.getLogger("pypto_serving.api")

ENCODERS = LazyRegistry(
    "chat encoder",
    {"jinja": "pypto_serving.api.prompting.template:load", "deepseek_v4": "pypto_serving.api.chat.deepseek_v4:load"},
)
"""Loaders (ServingConfig, Tokenizer) -> ChatEncoder. Raise ModelError if the checkpoint lacks a file or token."""

ORIGINS = LazyRegistry(
    "chat encoder",
    {
        "jinja": "pypto_serving.api.prompting.template:origin",
        "deepseek_v4": "pypto_serving.api.chat.deepseek_v4:origin",
    },
)
"""Descriptions of what ENCODERS load: ServingConfig -> ChatOrigin. Raise like loaders; read small files only."""

ENCODER_OF_ARCHITECTURE = {"DeepseekV4ForCausalLM": "deepseek_v4"}
"""Architectures with an encoder of their own; all others use a Jinja template."""


class UnavailableEncoder:
    """Refuse every chat with the reason why the model cannot chat."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @property
    def request_fields(self) -> NoReturn:
        self._refuse()

    def encode(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RequestError(
            f"chat is off: {self._reason}; use /v1/completions", param="messages", code="chat_unavailable"
        )


def load_encoder(serving: ServingConfig, tokenizer: Tokenizer | None) -> ChatEncoder:
    """Load the encoder of a checkpoint, or one that refuses every chat. Raises ModelError if a given template fails."""
    if tokenizer is None:
        return UnavailableEncoder("this model has no tokenizer.json, so the server cannot chat with it")
    try:
        encoder: ChatEncoder = ENCODERS.load(_family(serving))(serving, tokenizer)
    except ModelError as error:
        if serving.chat_template is not None:
            raise
        logger.warning("chat is off: %s", error)
        return UnavailableEncoder(str(error))
    return encoder


def describe_chat(serving: ServingConfig) -> ChatOrigin:
    """Name what encodes and parses chats, with the reasons. Raises like `load_encoder`, but reads no tokenizer."""
    if not has_tokenizer(serving.model_dir):
        return _off("this model has no tokenizer.json")
    try:
        found: ChatOrigin = ORIGINS.load(_family(serving))(serving)
    except ModelError as error:
        if serving.chat_template is not None:
            raise
        return _off(str(error))
    return found


def _off(reason: str) -> ChatOrigin:
    return ChatOrigin(*[("off", reason)] * 3)


def _family(serving: ServingConfig) -> str:
    return ENCODER_OF_ARCHITECTURE.get(serving.architecture, "jinja")
