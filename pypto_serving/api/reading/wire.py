"""Messages between the API process and the reader. Imports little, so that the reader starts quickly."""

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
    "completions",
    "chat",
    "messages",
    "decisions",
    "responses",
    "ollama_chat",
    "ollama_generate",
    "count_tokens",
    "input_tokens",
    "tokenize",
    "detokenize",
    "grammar",
]
KINDS: tuple[JobKind, ...] = get_args(JobKind)
READY = b"r"
"""First byte of a copy on its socket."""
JOB = struct.Struct("<BQd")
"""Header of a job on the socket of a copy: kind, number of bytes, limit of CPU seconds."""
ANSWER = struct.Struct("<Qd?")
"""Header of an answer: number of bytes, CPU seconds of the job, whether the copy ends now."""


class ReaderStart(msgspec.Struct, frozen=True):
    """Start parameters of the reader. `control`: inherited file descriptor on which jobs arrive."""

    config: EngineConfig
    serving: ServingConfig
    control: int


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The error with which a request is answered."""

    status: int
    message: str
    code: str | None
    param: str | None

    @classmethod
    def of(cls, error: ApiError) -> Refusal:
        return cls(error.status, error.message, error.code, error.param)


class ReaderFault(msgspec.Struct, frozen=True, tag="fault"):
    """A job failed with an unexpected error."""

    traceback: str


class Compiles(msgspec.Struct, frozen=True, tag="compiles"):
    """A grammar compiles. `grammar`: its translation to a syntax that workers read, or None if not needed."""

    grammar: Grammar | None


class RefusedError(RequestError):
    """The reader refused a job."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message, param=refusal.param, code=refusal.code, status=refusal.status)
