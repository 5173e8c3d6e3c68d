"""Keep responses in bounded memory, each for the API key that asked for it."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256
from typing import NamedTuple

from pypto_serving.errors import RequestError

MAX_RESPONSES, MAX_BYTES = 4096, 256 << 20
MAX_RESPONSE_BYTES = 4 << 20
"""A response with a longer conversation is not kept, and a longer body continues none: the event loop reads both."""


class UnknownResponseError(RequestError):
    """No response has this id, for this key."""

    status = 404
    code = "response_not_found"


class Kept(NamedTuple):
    """A response and its conversation as JSON: the object, the items that it answers, and those with its output.

    It holds the whole conversation: links to earlier responses would break when one is deleted or makes room.
    """

    response: bytes
    inputs: bytes
    history: bytes

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self))


class ResponseStore:
    """Own the responses of one server; the one that was used longest ago goes first. Used in the event loop only."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[bytes, str], Kept] = OrderedDict()

    def add(self, key: bytes | None, response_id: str, kept: Kept) -> None:
        """Keep a response, and drop others until all fit."""
        if kept.num_bytes > min(MAX_RESPONSE_BYTES, self._most_bytes):
            return
        self._kept[_place(key, response_id)] = kept
        self.num_bytes += kept.num_bytes
        while len(self._kept) > self._most or self.num_bytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def get(self, key: bytes | None, response_id: str, param: str | None = None) -> Kept:
        """Return a response. Raises UnknownResponseError, about the field `param`."""
        place = _place(key, response_id)
        if place not in self._kept:
            message = f"there is no response {response_id[:128]!r}: it was not stored, was deleted, or had to make room"
            raise UnknownResponseError(message, param=param)
        self._kept.move_to_end(place)
        return self._kept[place]

    def delete(self, key: bytes | None, response_id: str) -> None:
        """Forget a response. Raises UnknownResponseError."""
        self.num_bytes -= self.get(key, response_id).num_bytes
        del self._kept[_place(key, response_id)]


def _place(key: bytes | None, response_id: str) -> tuple[bytes, str]:
    return sha256(key or b"").digest(), response_id
