"""Log lines of all processes, on stderr: text for people, or a JSON object on each line. Standard library only.

A line about a request has its id: from the task that writes the line (`REQUEST_ID`) or, in a process that works for
many requests at once, from `of_request`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Literal

LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request that the current task serves."""
_OWN = "own_fields"


def configure(process: str, level: str, form: LogFormat) -> None:
    """Write the lines of this process from `level` on, in which it is named `process`; warnings of Python too."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process) if form == "json" else TextLines(process))
    earlier = [each for each in logging.root.handlers if isinstance(each.formatter, TextLines | JsonLines)]
    for each in earlier:  # of the process that this one is a copy of
        logging.root.removeHandler(each)
    if earlier or not logging.root.handlers:  # else the program around this one has its own
        logging.root.addHandler(handler)
        logging.root.setLevel(level.upper())
    logging.captureWarnings(True)


def of_request(request_id: str, **fields: Any) -> Mapping[str, Any]:
    """Return the argument `extra` for a line about a request; `fields` appear only in JSON."""
    return {"request_id": request_id, _OWN: fields}


def with_fields(**fields: Any) -> Mapping[str, Any]:
    """Return the argument `extra` for a line whose JSON has additional `fields`."""
    return {_OWN: fields}


def writes_json() -> bool:
    """Return whether this process's lines are JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.root.handlers)


def _request_id(record: logging.LogRecord) -> str:
    found: str = getattr(record, "request_id", "") or REQUEST_ID.get()
    return found


class TextLines(logging.Formatter):
    """Time, level, process, in brackets the id of a request, and the message."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}%(of)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id(record)
        record.of = f" [{request_id}]" if request_id else ""
        return super().format(record)


class JsonLines(logging.Formatter):
    """One JSON object on each line: time (UTC), level, process, message, id of the request, trace of the error.

    Single lines have additional fields.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
        }
        if request_id := _request_id(record):
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(getattr(record, _OWN, {}) | line, default=str)
