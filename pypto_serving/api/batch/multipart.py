"""Read the form that a file is uploaded with (RFC 7578)."""

from __future__ import annotations

from email.message import Message
from typing import NamedTuple

from pypto_serving.errors import RequestError

MAX_PARTS, MAX_FIELD_BYTES = 16, 4096


class Form(NamedTuple):
    """An uploaded file, and the other fields."""

    filename: str
    data: bytes
    fields: dict[str, str]


def read_form(content_type: str, body: bytes) -> Form:
    """Return the form in a body. Raises RequestError."""
    boundary = _header(content_type).get_param("boundary")
    if not content_type.lower().startswith("multipart/form-data") or not isinstance(boundary, str):
        raise RequestError("send the file as multipart/form-data with a boundary", param="file")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), MAX_PARTS)[1:]
    filename, data, fields = "", None, {}
    for part in parts:
        if part.startswith(b"--"):
            break
        head, _, content = part.partition(b"\r\n\r\n")
        name, own = _names(head)
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
            header = _header(value.strip())
            return str(header.get_param("name", "")), str(header.get_param("filename", ""))
    return "", ""


def _header(value: str) -> Message:
    message = Message()
    message["content-type"] = value.replace("\r", " ").replace("\n", " ")
    return message
