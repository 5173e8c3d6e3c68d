"""Messages between the API process and its readers."""

from __future__ import annotations

import struct

import msgspec

from pypto_serving.api.errors import ApiError
from pypto_serving.api.openai.body import Endpoint, ReadBody
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.config import EngineConfig

ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat")
HEAD = struct.Struct("<BQd")
"""What comes before a body: its index in ENDPOINTS, its bytes, and the CPU time to read it, in seconds."""
SIZE_BYTES = 8
"""Bytes of the size before each answer."""


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
