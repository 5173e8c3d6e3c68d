"""Say what is wrong with a body that its schema refuses: where, which value, and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from pypto_serving.errors import RequestError
from pypto_serving.util import brief

_ALLOWED: Mapping[str, str] = {
    "string_type": "be a string",
    "bool_type": "be true or false",
    "int_type": "be an integer",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "list_type": "be a list",
    "dict_type": "be an object",
    "model_type": "be an object",
    "greater_than_equal": "be at least {ge}",
    "less_than_equal": "be at most {le}",
    "literal_error": "be {expected}",
    "too_long": "have at most {max_length} entries",
}
"""What a value must do where pydantic finds an error of a kind."""


def explain(error: ValidationError) -> RequestError:
    """Describe the first validation error in one line."""
    first = error.errors(include_url=False)[0]
    kind, words = first["type"], first["msg"]
    if kind == "json_invalid":
        return RequestError(
            f"the request body is not valid JSON: {words.removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:201]
    if not where:
        return RequestError(f"the request body is {brief(first['input'])}, but must be an object", code="invalid_type")
    if kind == "missing":
        return RequestError(f"{where} is missing", param=where, code="missing_field")
    if kind in _ALLOWED:
        allowed = _ALLOWED[kind].format(**first.get("ctx", {}))
        words = f"is {brief(first['input'])}, but must {allowed}"
    return RequestError(f"{where} {words}", param=where, code="invalid_type")
