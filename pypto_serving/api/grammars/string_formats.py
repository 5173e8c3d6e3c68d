"""Say what llguidance's formats leave open: days that a month does not have, leap seconds, reserved labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = f"(?:{_YEAR}-(?:0[13-9]|1[0-2])-[0-9]{{2}}|{_YEAR}-02-(?:[01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_LABEL = "(?:[^.]{1,2}|[^.]{2}(?:[^.-][^.]*|-(?:[^.-][^.]*)?))"
_HOST_CHARS = 253
_NARROWER: Mapping[str, str] = {
    "date": f"^{_DAY}$",
    "date-time": f"^{_DAY}[Tt]{_TIME}",
    "time": f"^{_TIME}",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
"""Patterns that texts of a format must match as well.

February 29 in leap years only, no year 0, no leap second, no label with `--` in its third place, which is for Punycode.
"""


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose format says all that it should."""
    pattern = _NARROWER.get(str(schema.get("format")))
    if pattern is None:
        return schema
    if schema["format"] == "hostname":
        longest = schema.get("maxLength", _HOST_CHARS)
        schema = {**schema, "maxLength": min(longest, _HOST_CHARS) if isinstance(longest, int) else longest}
    if "pattern" not in schema:
        return {**schema, "pattern": pattern}
    others = schema.get("allOf", [])
    return {**schema, "allOf": [*others, {"pattern": pattern}]} if isinstance(others, list) else schema
