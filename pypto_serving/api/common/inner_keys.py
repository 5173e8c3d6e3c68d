"""Name the keys of objects inside a body that have no effect, since nobody here knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel

Keys: TypeAlias = Mapping[str, "Known | None"]
Known: TypeAlias = Keys | Callable[[Mapping[str, Any]], Keys | None]
"""The keys of an object, or what finds them by the object; below a key with None, and below ANY, all are known."""
ANY = "*"


def keys(names: str, **inner: Known | None) -> Keys:
    """List keys, separated by spaces; `inner` are those with objects, or lists of objects, whose keys are known."""
    return dict.fromkeys(names.split()) | inner


def by_type(default: str = "", **kinds: Keys) -> Known:
    """Choose the keys of an object by its `type`; of another type all keys are known."""
    return lambda value: kinds.get(str(value.get("type", default)))


def unknown_keys(value: Any, known: Known | None, where: str) -> Iterator[str]:
    """Yield the paths of unknown keys of the object, or of the objects in a list, at `where`.

    Of keys that several objects of a list have, the first is named.
    """
    if isinstance(value, list):
        seen = set()
        for i, entry in enumerate(value):
            place = f"{where}[{i}]"
            for path in unknown_keys(entry, known, place):
                if (below := path[len(place) :]) not in seen:
                    seen.add(below)
                    yield path
    elif isinstance(value, Mapping | BaseModel):
        entries = dict(value)
        found = known(entries) if callable(known) else known
        if found is None:
            return
        for key, inner in entries.items():
            if key in found:
                yield from unknown_keys(inner, found[key], f"{where}.{key}")
            elif ANY not in found:
                yield f"{where}.{key}"


_TOLD = "type cache_control"
"""What any part of a text may have: prefixes are cached without being asked."""
PARTS = by_type(
    text=keys(f"{_TOLD} text"),
    refusal=keys(f"{_TOLD} refusal"),
    input_text=keys(f"{_TOLD} text"),
    output_text=keys(f"{_TOLD} text annotations logprobs"),
)
_SCHEMA = keys("type name description schema strict", json_schema=keys("name description schema strict"))
RESPONSE_FORMAT = by_type(text=keys("type"), json_object=_SCHEMA, json_schema=_SCHEMA)
