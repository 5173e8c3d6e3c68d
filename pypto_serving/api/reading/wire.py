"""What the body of a request says, and the messages between the API process and its readers."""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from pypto_serving.api.chat.formats import OutputFormat
from pypto_serving.api.errors import ApiError
from pypto_serving.api.generation.request import FittedPrompt
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.sampling import SamplingParams

Endpoint = Literal["completions", "chat"]
ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat")
HEAD = struct.Struct("<BQd")
"""What comes before a body: its index in ENDPOINTS, its bytes, and the CPU time to read it, in seconds."""
SIZE_BYTES = 8
"""Bytes of the size before each answer."""


class ReadBody(msgspec.Struct, frozen=True, tag="read", kw_only=True):
    """A body after parsing, rendering and encoding. `ignored` are the names of unknown fields.

    `new_parser` makes the parser of one choice's text; None means plain text.
    """

    model: str
    stream: bool
    include_usage: bool
    ping_s: float | None
    ignored: list[str]
    prompts: list[FittedPrompt]
    params: SamplingParams
    new_parser: OutputFormat | None = None
    priority: int
    cache_salt: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The error that a body is answered with."""

    status: int
    message: str
    code: str | None
    param: str | None

    @classmethod
    def of(cls, error: ApiError) -> Refusal:
        return cls(error.status, error.message, error.code, error.param)


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """A body made a reader fail in a way that nobody foresaw."""

    traceback: str


class RefusedError(RequestError):
    """A reader refused the body."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message, param=refusal.param, code=refusal.code)
        self.status = refusal.status


class ReaderStart(msgspec.Struct, frozen=True):
    """What a reader needs to start. `channel` is the inherited file descriptor to the API process."""

    config: EngineConfig
    serving: ServingConfig
    channel: int


ANSWERS: msgspec.msgpack.Decoder[ReadBody | Refusal | Fault] = msgspec.msgpack.Decoder(ReadBody | Refusal | Fault)
