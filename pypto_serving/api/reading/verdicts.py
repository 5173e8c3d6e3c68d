"""Verdicts: what became of grammars."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from pypto_serving.api.reading.wire import Compiles, Refusal
from pypto_serving.types.guide import Grammar

MAX_VERDICTS = 2048
"""Grammars whose verdict is remembered."""
MAX_CHARS = 1 << 24
"""Characters of grammars that were translated."""


class Verdicts:
    """Remembers what became of grammars, by their content. The least recently used are forgotten."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, Compiles | Refusal] = OrderedDict()
        self._num_chars = 0

    def __len__(self) -> int:
        return len(self._found)

    def find(self, grammar: Grammar) -> Compiles | Refusal | None:
        """Return what became of a grammar, or None if that is not known."""
        key = _key_of(grammar)
        if key in self._found:
            self._found.move_to_end(key)
        return self._found.get(key)

    def add(self, grammar: Grammar, verdict: Compiles | Refusal) -> None:
        """Remember what became of a grammar."""
        key = _key_of(grammar)
        self._num_chars += _num_chars(verdict) - _num_chars(self._found.get(key))
        self._found[key] = verdict
        while len(self._found) > MAX_VERDICTS or self._num_chars > MAX_CHARS:
            self._num_chars -= _num_chars(self._found.popitem(last=False)[1])


def _key_of(grammar: Grammar) -> bytes:
    return hashlib.blake2b(f"{grammar.syntax}\n{grammar.text}".encode(), digest_size=16).digest()


def _num_chars(verdict: Compiles | Refusal | None) -> int:
    return len(verdict.grammar.text) if isinstance(verdict, Compiles) and verdict.grammar is not None else 0
