"""Patterns of config.json, which come from strangers: those that could take long to match are refused. Torch-free."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable
from typing import Any

from pypto_serving.errors import ModelError
from pypto_serving.util import brief

_parser: Any = importlib.import_module("re._parser")  # what `re` itself parses with; it has no public one
_LONGEST = 48
"""Characters of a module's name: model.layers.47.mlp.experts.127.gate_proj has 41."""
_MOST_WAYS = 10**6
_CALL = 256
"""Ways that take as long as any call of `match`."""
_MANY = (_LONGEST, 1)
"""More repeats than any pattern may have."""


def pattern(text: str, key: str, shown: str) -> re.Pattern[str]:
    """Compile the pattern in the entry `shown` of `key`. Raises ModelError for one that is not valid."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"{key} has {brief(shown)}, which is no pattern: {error}") from None


def require_quick(key: str, patterns: Iterable[re.Pattern[str]]) -> None:
    """Raise ModelError unless all patterns together could match a name in at most _MOST_WAYS ways.

    `re` tries all of them in a name that does not match, and holds the interpreter's lock meanwhile: no thread could
    end it, and a process of its own would cost every start.
    """
    ways = 0
    for each in patterns:
        ways += _CALL + _ways(each.pattern)
        if ways > _MOST_WAYS:
            raise ModelError(
                f"{key} has {brief(each.pattern)}, and its patterns could take long to match; "
                "give few patterns, with up to 4 repeats such as `.*`, and without repeats of groups"
            )


def _ways(text: str) -> int:
    try:
        repeats, choices = _of_sequence(_parser.parse(text))
    except RecursionError:
        return _MOST_WAYS + 1
    return min(math.comb(_LONGEST + repeats, repeats), _MOST_WAYS + 1) * choices


def _of_sequence(items: Iterable[Any]) -> tuple[int, int]:
    """Return the repeats of characters in a match, and the choices beside where those end."""
    repeats, choices = 0, 1
    for operation, value in items:
        more, times = _of_item(str(operation), value)
        repeats, choices = min(repeats + more, _LONGEST), min(choices * times, _MOST_WAYS + 1)
    return repeats, choices


def _of_item(operation: str, value: Any) -> tuple[int, int]:
    match operation:
        case "MAX_REPEAT" | "MIN_REPEAT":
            _, most, body = value
            repeats, choices = _of_sequence(body)
            if most == 1:
                return repeats, choices + 1
            return (1, 1) if (repeats, choices) == (0, 1) else _MANY
        case "BRANCH":
            return _of_branches(value[1])
        case "SUBPATTERN":
            return _of_sequence(value[-1])
        case "ASSERT" | "ASSERT_NOT":
            return _of_sequence(value[1])
        case "GROUPREF_EXISTS":
            return _of_branches([part for part in value[1:] if part is not None])
        case "ATOMIC_GROUP" | "POSSESSIVE_REPEAT":  # tried once at each place, as fnmatch does it
            body = value if operation == "ATOMIC_GROUP" else value[-1]
            return (0, 1) if _of_sequence(body) in ((0, 1), (1, 1)) else _MANY
    return 0, 1


def _of_branches(branches: Iterable[Any]) -> tuple[int, int]:
    found = [_of_sequence(branch) for branch in branches]
    return max(repeats for repeats, _ in found), min(sum(choices for _, choices in found), _MOST_WAYS + 1)
