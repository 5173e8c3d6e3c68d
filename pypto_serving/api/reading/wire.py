"""Messages between the API process and its readers. Imports little, since a reader may have to start again soon."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from pypto_serving.errors import RequestError
from pypto_serving.types.guide import Grammar

if TYPE_CHECKING:
    from pypto_serving.api.http.errors import ApiError

HEAD = struct.Struct("<BQd")
"""What comes before a task: its kind, its bytes, and the CPU time to read it, in seconds."""
SIZE_BYTES = 8
"""Bytes of the size before each answer."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The error that a request is answered with."""

    status: int
    message: str
    code: str | None
    param: str | None

    @classmethod
    def of(cls, error: ApiError) -> Refusal:
        return cls(error.status, error.message, error.code, error.param)


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """A task made a reader fail in a way that nobody foresaw."""

    traceback: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The process that read a task ended with `code` before it answered; it is negative for a signal."""

    code: int


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """The machine has no process or file left to read a task with."""

    reason: str


Failure = Refusal | Fault | Ended | Busy


class RefusedError(RequestError):
    """A reader refused a task."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message, param=refusal.param, code=refusal.code)
        self.status = refusal.status
        self.refusal = refusal


class GrammarStart(msgspec.Struct, frozen=True):
    """What a reader of grammars needs to start: the inherited file descriptor of its channel."""

    channel: int


class Compiles(msgspec.Struct, frozen=True, tag="compiles"):
    """A grammar compiles, in so much CPU time: `grammar` in the syntax that workers read, or None as it is."""

    grammar: Grammar | None
    compile_s: float


GRAMMAR_ANSWERS: msgspec.msgpack.Decoder[Compiles | Failure] = msgspec.msgpack.Decoder(Compiles | Failure)
