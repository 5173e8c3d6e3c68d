"""Turning chat messages into a prompt, and which way a model family does it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from pypto_serving.api.chat.output import NewParser
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ModelError, RequestError
from pypto_serving.util import LazyRegistry

logger = logging.getLogger("pypto_serving.api")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as a prompt, text or token ids, and what reads each output of it: None for plain text."""

    prompt: str | list[int]
    new_parser: NewParser | None = None


class ChatEncoder(Protocol):
    """A family's way to write a conversation down. Stateless after loading."""

    @property
    def request_fields(self) -> frozenset[str]:
        """Fields of a request, besides its messages, that `encode` takes in `kwargs`.

        Raises RequestError where the model cannot chat, whatever the request asks for.
        """

    def encode(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> EncodedChat:
        """The prompt; raises RequestError for what the family cannot express.

        Each message has `role` and `content` (a string) and whatever else the client sent. `kwargs` holds
        `add_generation_prompt`, the client's chat_template_kwargs, and those of `request_fields` that it sent.
        """


ENCODERS = LazyRegistry(
    "chat encoder",
    {"jinja": "pypto_serving.api.chat.template:load", "deepseek_v4": "pypto_serving.api.chat.deepseek_v4:load"},
)
"""Loaders: (ServingConfig, Tokenizer) -> ChatEncoder; raise ModelError where the checkpoint lacks what they need."""

ORIGINS = LazyRegistry(
    "chat encoder",
    {"jinja": "pypto_serving.api.chat.template:origin", "deepseek_v4": "pypto_serving.api.chat.deepseek_v4:origin"},
)
"""What ENCODERS would load, for people: ServingConfig -> (name, reason); raise as those, and read small files only."""

ENCODER_OF_ARCHITECTURE = {"DeepseekV4ForCausalLM": "deepseek_v4"}
"""Architectures whose checkpoints write chats by other means than a Jinja template."""


class UnavailableEncoder:
    """Stands in where a model cannot chat, and tells each request why."""

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
    """The encoder of a checkpoint, or one that explains to each request why there is none."""
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


def describe_chat(serving: ServingConfig) -> tuple[str, str]:
    """What writes a checkpoint's chats, or "off", with the reason; raises as `load_encoder`, but reads no tokenizer."""
    if not serving.model_dir or not (Path(serving.model_dir) / "tokenizer.json").is_file():
        return "off", "this model has no tokenizer.json"
    try:
        found: tuple[str, str] = ORIGINS.load(_family(serving))(serving)
    except ModelError as error:
        if serving.chat_template is not None:
            raise
        return "off", str(error)
    return found


def _family(serving: ServingConfig) -> str:
    return ENCODER_OF_ARCHITECTURE.get(serving.architecture, "jinja")
