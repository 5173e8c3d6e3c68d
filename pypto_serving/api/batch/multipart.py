"""Read the form that a file is uploaded with (RFC 7578)."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from pypto_serving.errors import RequestError

MAX_PARTS, MAX_HEAD_BYTES, MAX_FIELD_BYTES = 16, 4096, 4096
_PARAMETER = re.compile(r""";\s*([^\s;="]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))""", re.DOTALL)


class Form(NamedTuple):
    """An uploaded file, and the other fields."""

    filename: str
    data: bytes
    fields: dict[str, str]


def read_form(content_type: str, body: bytes) -> Form:
    """Return the form in a body. Raises RequestError."""
    boundary = _parameters(content_type).get("boundary")
    if not content_type.lower().startswith("multipart/form-data") or not boundary:
        raise RequestError("send the file as multipart/form-data with a boundary", param="file")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), MAX_PARTS)[1:]
    filename, data, fields = "", None, {}
    for part in parts:
        if part.startswith(b"--"):
            break
        end = part.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            raise RequestError(f"the headers of a part do not end within {MAX_HEAD_BYTES} bytes", param="file")
        name, own = _names(part[:end])
        content = part[end + 4 :]
        if name == "file":
            filename, data = own or "file", content
        elif len(content) <= MAX_FIELD_BYTES:
            fields[name] = content.decode(errors="replace")
    else:
        raise RequestError(f"the form does not end, or has more than {MAX_PARTS} parts", param="file")
    if data is None:
        raise RequestError("file is missing; send a file of requests", param="file", code="missing_field")
    return Form(filename[:255], data, fields)


def _names(head: bytes) -> tuple[str, str]:
    """Return the name of a part, and that of its file."""
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
