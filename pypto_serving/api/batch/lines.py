"""Read the requests of a file, and write their answers: one JSON object a line, in the form of OpenAI's batches."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from pypto_serving.util import brief, one_of

MAX_ID_CHARS = 512
_BEGINNING = b'{"id":"batch_req_'
MAX_PROBLEMS = 100
"""Reading stops after this many invalid lines, all of which the refusal lists."""
BLANKS = 2
"""A file may have this many times as many lines as requests, so some may be blank."""


class BatchRequest(msgspec.Struct):
    """One line of a file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"

    @property
    def key(self) -> bytes:
        """Return the request's key, unique in its file."""
        return key_of(self.custom_id)


class DirectAnswer(NamedTuple):
    """The answer to a request. `request_id` is the request's id in the log."""

    status: int
    request_id: str
    body: bytes


class Problem(NamedTuple):
    """Why a line, counted from 1, is not a valid request."""

    line: int
    message: str


class Found(NamedTuple):
    """The number of requests in a file, and its problems."""

    num_requests: int
    problems: list[Problem]


class Limits(NamedTuple):
    """Limits of a file; `urls` are the allowed endpoints."""

    max_requests: int
    max_line_bytes: int
    urls: Collection[str]


class _Body(msgspec.Struct):
    stream: bool | None = None


_REQUEST, _BODY = msgspec.json.Decoder(BatchRequest), msgspec.json.Decoder(_Body)


def key_of(custom_id: str) -> bytes:
    """Hash the `custom_id` of a request, which is unique in its file."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def check(path: Path, limits: Limits) -> Found:
    """Check all requests of a file, up to MAX_PROBLEMS problems. Raises OSError."""
    seen: set[bytes] = set()
    problems: list[Problem] = []
    for number, line in _lines(path, limits.max_line_bytes):
        if line and (problem := _problem(line, seen, limits)):
            problems.append(Problem(number, problem))
        if number > BLANKS * limits.max_requests:
            problems.append(Problem(number, f"the file has more than {number - 1} lines; leave blank ones out"))
            break
        if len(problems) == MAX_PROBLEMS or len(seen) > limits.max_requests or len(line) > limits.max_line_bytes:
            break
    if not seen and not problems:
        problems.append(Problem(1, "the file has no requests"))
    return Found(len(seen), problems)


def read(path: Path, limits: Limits) -> Iterator[BatchRequest]:
    """Iterate over the requests of a file in which `check` found no problems."""
    for _, line in _lines(path, limits.max_line_bytes):
        if line:
            yield _REQUEST.decode(line)


def write(request: BatchRequest, answer: DirectAnswer) -> bytes:
    """Write the line of an answer."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": response, "error": None}
    return msgspec.json.encode(line) + b"\n"


def require_beginning(cut: bytes) -> None:
    """Raise ValueError unless `cut` may be the beginning of a line of `write`."""
    if not cut.startswith(_BEGINNING[: len(cut)]):
        raise ValueError(f"{cut[:100]!r} is not the beginning of an answer")


def _lines(path: Path, limit: int) -> Iterator[tuple[int, bytes]]:
    """Iterate over the lines of a file with their numbers, without white space at the ends; cut lines over `limit`."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(limit + 2):
            number += 1
            yield number, line.strip()


def _problem(line: bytes, seen: set[bytes], limits: Limits) -> str:
    """Return the problem of a line, or "" if it is valid; add its request to `seen`."""
    if len(line) > limits.max_line_bytes:
        return f"the line has more than {limits.max_line_bytes} bytes; send less"
    try:
        request = _REQUEST.decode(line)
        body = _BODY.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"this is not a request: {error}; send custom_id, url and body as a JSON object"
    before = len(seen)
    seen.add(request.key)
    if len(seen) > limits.max_requests:
        return f"the file has more than {limits.max_requests} requests; split it"
    if len(seen) == before:
        return f"custom_id is {request.custom_id[:MAX_ID_CHARS]!r} like that of an earlier line; give each its own"
    if not 0 < len(request.custom_id) <= MAX_ID_CHARS:
        return f"custom_id has {len(request.custom_id)} characters, but must have between 1 and {MAX_ID_CHARS}"
    if request.method != "POST":
        return f"method is {brief(request.method)}, but must be 'POST'"
    if request.url not in limits.urls:
        return f"url is {brief(request.url)}, but must be {one_of(sorted(limits.urls))}"
    return "stream is not available in batches; leave it out" if body.stream else ""
