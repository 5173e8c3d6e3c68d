"""The error tree. Each class has an HTTP status, a code for clients and a process exit code."""

from __future__ import annotations

from collections.abc import Mapping

EXIT_OK = 0
EXIT_CRASH = 1
EXIT_USAGE = 2
EXIT_MODEL = 3
EXIT_ENGINE = 4


class PyptoError(Exception):
    """Base of all errors that we raise; `str(error)` is one line for the user."""

    status: int = 500
    code: str = "internal_error"
    exit_code: int = EXIT_CRASH


class ConfigError(PyptoError):
    """An option or configuration value that cannot work."""

    code = "invalid_configuration"
    exit_code = EXIT_USAGE


class ModelError(PyptoError):
    """A checkpoint that is missing, damaged or not supported."""

    code = "invalid_model"
    exit_code = EXIT_MODEL


FINAL_ERRORS: Mapping[int, type[PyptoError]] = {EXIT_USAGE: ConfigError, EXIT_MODEL: ModelError}
"""By exit code: errors of a process that would also end its successor."""


class RequestError(PyptoError):
    """A request that cannot be served as sent. `param` names the offending field."""

    status = 400
    code = "invalid_request_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code
        self.status = status or self.status


class ContextLengthError(RequestError):
    """Prompt and output do not fit the context window. The message begins as OpenAI's, which clients look for.

    `num_tokens` are those of the prompt, or fewer.
    """

    code = "context_length_exceeded"

    def __init__(self, max_model_len: int, problem: str, *, param: str, num_tokens: int) -> None:
        super().__init__(f"This model's maximum context length is {max_model_len} tokens. {problem}", param=param)
        self.max_model_len = max_model_len
        self.num_tokens = num_tokens


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class QueueFullError(RequestError):
    """The waiting queue is full; try again in `retry_after_s` seconds. `limit` is one of `REJECTIONS` of metrics."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, retry_after_s: int, limit: str = "max_num_queued_reqs") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limit = limit


class RequestFailedError(RequestError):
    """The engine gave up on an admitted request."""

    status = 500
    code = "request_failed"


class UnavailableError(RequestError):
    """The engine cannot take requests now: loading, draining, or without a worker."""

    status = 503
    code = "unavailable"


class EngineDeadError(PyptoError):
    """The engine gave up because its worker or core kept failing, or because no other host joined."""

    status = 503
    code = "engine_dead"

    def __init__(self, message: str, exit_code: int = EXIT_ENGINE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


SHUTTING_DOWN = "the server is shutting down and takes no new requests; send it elsewhere"
