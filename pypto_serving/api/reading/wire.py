"""Messages between the API process and the reader. Imports little, since the reader has to start quickly."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.guide import Grammar

if TYPE_CHECKING:
    from pypto_serving.api.http.errors import ApiError

JobKind = Literal[
    "completions", "chat", "messages", "decisions", "responses", "count_tokens", "tokenize", "detokenize", "grammar"
]
KINDS: tuple[JobKind, ...] = get_args(JobKind)
READY = b"r"
"""What a copy says first on its socket."""
JOB = struct.Struct("<BQd")
"""What comes before a job on the socket of a copy: its kind, its bytes, and the CPU seconds that it may take."""
ANSWER = struct.Struct("<Qd?")
"""What comes before an answer: its bytes, the CPU time that the job took, and whether the copy ends with it."""


class ReaderStart(msgspec.Struct, frozen=True):
    """What the reader needs to start. `control` is the inherited file descriptor on which jobs come."""

    config: EngineConfig
    serving: ServingConfig
    control: int


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The error that a request is answered with."""

    status: int
    message: str
    code: str | None
    param: str | None

    @classmethod
    def of(cls, error: ApiError) -> Refusal:
        return cls(error.status, error.message, error.code, error.param)


class ReaderFault(msgspec.Struct, frozen=True, tag="fault"):
    """A job made its copy fail in a way that nobody foresaw."""

    traceback: str


class Compiles(msgspec.Struct, frozen=True, tag="compiles"):
    """A grammar compiles: `grammar` in the syntax that workers read, or None as it is."""

    grammar: Grammar | None


class RefusedError(RequestError):
    """The reader refused a job."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message, param=refusal.param, code=refusal.code)
        self.status = refusal.status
