"""When a request must have ended: by the field `timeout` of its body, or by a header."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request

from pypto_serving.api.generation.request import MAX_TIMEOUT_S, GenerationRequest
from pypto_serving.errors import RequestError
from pypto_serving.util import brief

TIMEOUT_HEADER = "x-request-timeout"


def with_deadline(request: Request, wanted: GenerationRequest) -> GenerationRequest:
    """Return what is `wanted` with the earlier deadline of body and header, counted from the request's first line.

    Raises RequestError for a header that is no time.
    """
    given = request.headers.get(TIMEOUT_HEADER)
    limits = [] if given is None else [_seconds(given)]
    if wanted.timeout_s is not None:
        limits.append(wanted.timeout_s)
    return replace(wanted, deadline_s=request.state.arrival_s + min(limits)) if limits else wanted


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        message = f"{TIMEOUT_HEADER} is {brief(text)}, but must be a number of seconds above 0, at most {MAX_TIMEOUT_S}"
        raise RequestError(message, param=TIMEOUT_HEADER)
    return seconds
