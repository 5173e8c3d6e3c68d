"""Known: what became of grammars."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from pypto_serving.api.reading.wire import Compiles, Refusal, RefusedError
from pypto_serving.types.guide import Grammar

REMEMBERED = 1024
"""Grammars that are known as refused, and as many that are known to compile."""
KEPT_CHARS = 1 << 24
"""Characters of grammars that were translated."""


class Known:
    """Remembers what became of grammars, by their hash. The least recently used are forgotten."""

    def __init__(self) -> None:
        self._compiling: OrderedDict[bytes, Compiles] = OrderedDict()
        self._refused: OrderedDict[bytes, Refusal] = OrderedDict()
        self._num_chars = 0

    def find(self, key: bytes) -> Compiles | None:
        """Return what a grammar compiles as, if that is known. Raises RefusedError if it is known not to compile."""
        if key in self._refused:
            self._refused.move_to_end(key)
            raise RefusedError(self._refused[key])
        if key in self._compiling:
            self._compiling.move_to_end(key)
            return self._compiling[key]
        return None

    def compiles(self, key: bytes, answer: Compiles) -> None:
        """Remember that a grammar compiles, and as what."""
        if key not in self._compiling:
            self._compiling[key] = answer
            self._num_chars += _num_chars(answer)
        while len(self._compiling) > REMEMBERED or self._num_chars > KEPT_CHARS:
            self._num_chars -= _num_chars(self._compiling.popitem(last=False)[1])

    def is_refused(self, key: bytes, refusal: Refusal) -> None:
        """Remember that a grammar does not compile, and why."""
        self._refused[key] = refusal
        if len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)


def key_of(grammar: Grammar) -> bytes:
    """Return the hash of a grammar."""
    return hashlib.blake2b(f"{grammar.syntax}\n{grammar.text}".encode(), digest_size=16).digest()


def _num_chars(answer: Compiles) -> int:
    return 0 if answer.grammar is None else len(answer.grammar.text)
