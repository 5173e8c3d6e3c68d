"""Chat messages, what encodes them and what reads outputs, by model family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pypto_serving.api.chat.formats import OutputFormat

Message = Mapping[str, Any]


class ChatOrigin(NamedTuple):
    """What encodes and parses chats: for each part its name, or "off" or "none", and the reason."""

    template: tuple[str, str]
    tool_calls: tuple[str, str]
    reasoning: tuple[str, str]


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as a prompt, text or token ids. `new_parser` makes the parser of one output; None: plain text."""

    prompt: str | list[int]
    new_parser: OutputFormat | None = None


class ChatEncoder(Protocol):
    """Encode conversations for one model family. Stateless after loading."""

    @property
    def request_fields(self) -> frozenset[str]:
        """Return the request fields besides `messages` that `encode` takes in `kwargs`.

        Raises RequestError if the model cannot chat at all.
        """

    def encode(self, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> EncodedChat:
        """Make the prompt. Raises RequestError if the family cannot express a message.

        Each message has `role`, `content` (a string) and any other fields of the client. `kwargs` holds
        the client's chat_template_kwargs and its values of `request_fields`, and may hold `add_generation_prompt`,
        `continue_final_message`, `tools`, `documents`, `reasoning_effort` and `chat_template`.
        """
