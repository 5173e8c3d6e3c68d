"""Read the multipart form of an uploaded file (RFC 7578)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

from pypto_serving.errors import RequestError

MAX_PARTS, MAX_HEAD_BYTES, MAX_FIELD_BYTES = 16, 4096, 4096
_PARAMETER = re.compile(r""";\s*([^\s;="]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))""", re.DOTALL)


class UploadForm(NamedTuple):
    """An uploaded file, and the other fields. `data` is a view of the body."""

    filename: str
    data: memoryview
    fields: dict[str, str]


def read_form(content_type: str, body: bytes | bytearray) -> UploadForm:
    """Return the form in a body, without a copy of the body, which may be long. Raises RequestError."""
    boundary = _parameters(content_type).get("boundary")
    if not content_type.lower().startswith("multipart/form-data") or not boundary:
        raise RequestError("send the file as multipart/form-data with a boundary", param="file")
    filename, data, fields = "", None, {}
    for start, stop in _parts(body, b"\r\n--" + boundary.encode("latin-1", "replace")):
        end = body.find(b"\r\n\r\n", start, min(start + MAX_HEAD_BYTES, stop))
        if end < 0:
            raise RequestError(f"the headers of a part do not end within {MAX_HEAD_BYTES} bytes", param="file")
        name, own = _names(bytes(body[start:end]))
        content = memoryview(body)[end + 4 : stop]
        if name == "file":
            filename, data = own or "file", content
        elif len(content) <= MAX_FIELD_BYTES:
            fields[name] = str(content, errors="replace")
    if data is None:
        raise RequestError("file is missing; send a file of requests", param="file", code="missing_field")
    return UploadForm(filename[:255], data, fields)


def _parts(body: bytes | bytearray, delimiter: bytes) -> Iterator[tuple[int, int]]:
    """Iterate over the [start, end) of the parts between delimiters; the first delimiter may lack its line break."""
    first = -2 if body.startswith(delimiter[2:]) else body.find(delimiter)
    start = first if first == -1 else first + len(delimiter)
    for _ in range(MAX_PARTS):
        if start < 0 or body.startswith(b"--", start):
            break
        stop = body.find(delimiter, start)
        if stop < 0:
            start = stop
            break
        yield start, stop
        start = stop + len(delimiter)
    if start < 0 or not body.startswith(b"--", start):
        raise RequestError(f"the form does not end, or has more than {MAX_PARTS} parts", param="file")


def _names(head: bytes) -> tuple[str, str]:
    """Return the name of a part, and the name of its file."""
    for line in head.split(b"\r\n"):
        name, _, value = line.decode(errors="replace").partition(":")
        if name.strip().lower() == "content-disposition":
            found = _parameters(value)
            extended = unquote(found.get("filename*", "").rpartition("'")[2])
            return found.get("name", ""), extended or found.get("filename", "")
    return "", ""


def _parameters(header: str) -> dict[str, str]:
    """Return the parameters of a header, by their names in lower case."""
    found = {}
    for name, quoted, plain in _PARAMETER.findall(header[:MAX_HEAD_BYTES]):
        found[name.lower()] = re.sub(r'\\(["\\])', r"\1", quoted) or plain
    return found
