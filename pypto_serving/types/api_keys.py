"""API keys: a key, the name of its holder, and the holder's limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)] | None


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the holder of a name may use in a minute, and how many requests may be unfinished; None is no limit."""

    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    max_concurrent: Limit = None


class ApiKey(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key. All keys of one name have one holder, who has the same limits under each."""

    key: Annotated[str, msgspec.Meta(min_length=1)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "unnamed"

    @property
    def limits(self) -> KeyLimits:
        """Return the limits alone."""
        return KeyLimits(**{name: getattr(self, name) for name in KeyLimits.__struct_fields__})


def read_api_keys(texts: Iterable[str]) -> list[ApiKey]:
    """Read texts that are keys, or JSON objects with the fields of ApiKey. Raises ValueError, without any key."""
    try:
        keys = [msgspec.json.decode(text, type=ApiKey) if text.startswith("{") else ApiKey(key=text) for text in texts]
    except msgspec.DecodeError as error:
        raise ValueError(f"has an object of a key in which something is wrong: {error}") from None
    limits: dict[str, KeyLimits] = {}
    for key in keys:
        if limits.setdefault(key.name, key.limits) != key.limits:
            raise ValueError(f"has different limits for the name {key.name!r}, but must have the same for all its keys")
    return keys
