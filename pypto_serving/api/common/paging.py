"""Read which part of a list a query asks for. Raises RequestError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pypto_serving.errors import RequestError
from pypto_serving.util import brief


def read_page(query: Mapping[str, str], ids: Sequence[str], default: int, most: int) -> slice:
    """Return the places of the page that begins behind the id `after` and has `limit` entries, of `most` allowed."""
    limit, after = query.get("limit", str(default)), query.get("after")
    if not limit.isascii() or not limit.isdigit() or len(limit) > len(str(most)) or not 1 <= int(limit) <= most:
        raise RequestError(f"limit is {brief(limit)}, but must be between 1 and {most}", param="limit")
    if after is not None and after not in ids:
        raise RequestError(f"after is {brief(after)}, but there is no such id", param="after")
    start = 0 if after is None else ids.index(after) + 1
    return slice(start, start + int(limit))
