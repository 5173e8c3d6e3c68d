"""Turn text and chats into token ids that the model knows; load the encoder of a checkpoint's chats."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pypto_serving.api.chat.formats import ChatEncoder, ChatOrigin, EncodedChat, Message
from pypto_serving.api.prompting.template import RESERVED
from pypto_serving.api.settings import ServingConfig
from pypto_serving.api.text.files import has_tokenizer
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.errors import ConfigError, ContextLengthError, ModelError, RequestError
from pypto_serving.types.config import EngineConfig
from pypto_serving.util import brief

logger = logging.getLogger("pypto_serving.api")

ENCODERS = {"jinja": "pypto_serving.api.prompting.template", "deepseek_v4": "pypto_serving.api.chat.deepseek_v4"}
"""Modules with `load`: (ServingConfig, Tokenizer) -> ChatEncoder; and `origin`: ServingConfig -> ChatOrigin.

Both raise ModelError if the checkpoint lacks a file or token; `origin` reads small files only.
"""
ENCODER_OF_ARCHITECTURE = {"DeepseekV4ForCausalLM": "deepseek_v4"}
"""Architectures with an encoder of their own; all others use a Jinja template."""


class UnavailableEncoder:
    """Refuse every chat with the reason why the model cannot chat."""

    abilities: tuple[str, ...] = ()

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
        encoder: ChatEncoder = _module(serving).load(serving, tokenizer)
    except ModelError as error:
        if serving.chat_template is not None:
            raise
        logger.warning("chat is off: %s", error)
        return UnavailableEncoder(str(error))
    return encoder


def describe_chat(serving: ServingConfig) -> ChatOrigin:
    """Name what encodes and parses chats, with the reasons. Raises like `load_encoder`, but reads no tokenizer."""
    if not has_tokenizer(serving.tokenizer_dir):
        return _off("this model has no tokenizer.json")
    try:
        found: ChatOrigin = _module(serving).origin(serving)
    except ModelError as error:
        if serving.chat_template is not None:
            raise
        return _off(str(error))
    return found


def _off(reason: str) -> ChatOrigin:
    return ChatOrigin(*[("off", reason)] * 3)


def _module(serving: ServingConfig) -> Any:
    return importlib.import_module(ENCODERS[ENCODER_OF_ARCHITECTURE.get(serving.architecture, "jinja")])


logger = logging.getLogger("pypto_serving.api")

MAX_CHARS_PER_TOKEN = 256
"""Longer texts are refused before they are rendered or encoded."""


_THINKING = {"enable_thinking", "thinking", "reasoning_effort"}


class Prompter:
    """Make prompts for one model. Does not change after loading, so any thread may use it.

    `tokenizer` is None for a model without one. `eos_token_ids` end its outputs. Errors name the field at fault by its
    place, such as `prompt[2]`.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        chat_encoder: ChatEncoder,
        eos_token_ids: tuple[int, ...] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._template_kwargs = template_kwargs or {}
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.chat_encoder = chat_encoder

    @classmethod
    def load(cls, config: EngineConfig, serving: ServingConfig) -> Prompter:
        """Load tokenizer and chat encoder. Raises ModelError if one of them is damaged."""
        tokenizer = _load_tokenizer(serving.tokenizer_dir)
        eos_token_ids = _eos_token_ids(serving.eos_token_ids, tokenizer, config.model.vocab_size)
        if reserved := sorted(RESERVED & serving.default_chat_template_kwargs.keys()):
            raise ConfigError(f"default-chat-template-kwargs must not set {', '.join(reserved)}; leave it out")
        encoder = load_encoder(serving, tokenizer)
        return cls(config, tokenizer, encoder, eos_token_ids, serving.default_chat_template_kwargs)

    def render(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> EncodedChat:
        """Make the prompt of a chat; what `kwargs` leaves out is the server's default. Raises RequestError.

        All names that turn thinking on or off are one, so that a request's word counts.
        """
        left = self._template_kwargs.keys() - (_THINKING if _THINKING & kwargs.keys() else set())
        return self.chat_encoder.encode(messages, {name: self._template_kwargs[name] for name in left} | {**kwargs})

    def encode_text(self, text: str, where: str, add_special_tokens: bool) -> list[int]:
        """Encode one text. Raises RequestError if it is empty, cannot fit, or the model has no tokenizer."""
        if self.tokenizer is None:
            raise RequestError(f"this model has no tokenizer.json: {where} must be a list of token ids", param="prompt")
        self.check_length(len(text), where)
        ids = self.tokenizer.encode(text, add_special_tokens)
        if not ids:
            raise RequestError(f"{where} is empty; send at least one token", param=field_of(where))
        return self.check_token_ids(ids, where)

    def encode_chat(self, chat: EncodedChat, where: str, add_special_tokens: bool) -> list[int]:
        """Encode the prompt of a chat. Raises RequestError like `encode_text` and `check_token_ids`."""
        if isinstance(chat.prompt, str):
            return self.encode_text(chat.prompt, where, add_special_tokens)
        return self.check_token_ids(chat.prompt, where)

    def check_length(self, num_chars: int, where: str) -> None:
        """Raise ContextLengthError if a text of `num_chars` characters has too many tokens whatever they are."""
        limit = self.config.limits.max_model_len
        if num_chars > limit * MAX_CHARS_PER_TOKEN:
            most = f"more than {MAX_CHARS_PER_TOKEN} for each of these tokens"
            problem = f"However, {where} has {num_chars} characters, {most}; shorten it"
            least = -(-num_chars // MAX_CHARS_PER_TOKEN)
            raise ContextLengthError(limit, problem, param=field_of(where), num_tokens=least)

    def check_token_ids(self, ids: list[int], where: str) -> list[int]:
        """Return `ids`, which are not empty. Raises RequestError if one is outside the vocabulary."""
        vocab_size = self.config.model.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            message = f"{where}: token id {brief(bad)} is not between 0 and {vocab_size - 1}"
            raise RequestError(message, param=field_of(where))
        return ids


def field_of(where: str) -> str:
    """Return the field of a place: `prompt` of `prompt[2]`."""
    return where.partition("[")[0]


def _eos_token_ids(declared: Iterable[int], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Join the ids that the checkpoint declares and the tokenizer's eos_token; drop ids outside the vocabulary."""
    ids = set(declared)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(i for i in ids if 0 <= i < vocab_size))


def _load_tokenizer(model_dir: str) -> Tokenizer | None:
    """Load the tokenizer, None for a model that has none. Raises ModelError if it is damaged."""
    if has_tokenizer(model_dir):
        return Tokenizer.load(model_dir)
    if model_dir:
        logger.warning("only prompts of token ids can be served: %s has no tokenizer.json", model_dir)
    return None
