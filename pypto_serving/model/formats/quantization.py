"""Storage schemes of all matrices of a checkpoint: rules for sets of modules, in quantizers' terms. Torch-free.

Patterns in config.json are untrusted: patterns that could take long to match are refused.
"""

from __future__ import annotations

import fnmatch
import importlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pypto_serving.errors import ModelError
from pypto_serving.model.fields import Fields
from pypto_serving.model.formats.schemes import PLAIN, Scheme
from pypto_serving.model.stored_names import own_module, spelled_for
from pypto_serving.util import brief, one_of

_parser: Any = importlib.import_module("re._parser")  # what `re` itself parses with; it has no public one
_LONGEST = 64
"""Characters of a module's name: language_model.model.layers.47.block_sparse_moe.experts.127.w1 has 62."""
_MOST_WAYS = 3 * 10**6
_CALL = 3 * 256
"""Number of ways whose time equals that of the calls of `match` for a module, which may have three names."""
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
    """Return the number of repeats of characters in a match, and of choices apart from the ends of repeats."""
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


CLASS = "Linear"
"""The class of all modules that can be quantised."""


@dataclass(frozen=True, slots=True)
class Modules:
    """A set of modules: those in `names`, those with a run of components in `parts`, and matches of `patterns`.

    Names and parts are those of `own_module`.
    """

    names: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    def __contains__(self, module: str) -> bool:
        own = own_module(module)
        if own in self.names or any(_matches(pattern, module) for pattern in self.patterns):
            return True
        return bool(self.parts) and not self.parts.isdisjoint(_runs(own))


def _matches(pattern: re.Pattern[str], module: str) -> bool:
    return any(pattern.match(name) for name in spelled_for(pattern.pattern, module))


EVERY = Modules(patterns=(re.compile(""),))


def by_part(entries: Iterable[str]) -> Modules:
    """Return the modules whose names contain an entry, such as `mlp.gate`, as consecutive components."""
    return Modules(parts=frozenset(own_module(entry.strip(".")) for entry in entries))


def by_name_or_pattern(entries: Sequence[str], key: str) -> Modules:
    """Return the modules that entries of compressed-tensors match: names, patterns after `re:`, or the class."""
    patterns = [pattern(entry[3:], key, entry) for entry in entries if entry.startswith("re:")]
    names = frozenset(own_module(entry) for entry in entries if not entry.startswith("re:"))
    return EVERY if CLASS in names else Modules(names, patterns=tuple(patterns))


def by_wildcard(entries: Sequence[str]) -> Modules:
    """Return the modules that entries with `*` match, and all modules inside of them."""
    patterns = [fnmatch.translate(f"{entry}{inside}") for entry in entries for inside in ("", ".*")]
    return Modules(patterns=tuple(map(re.compile, patterns)))


def names_in(fields: Fields, path: str, *keys: str) -> list[str]:
    """Return the list of names in one of `keys`, empty if absent. Raises ModelError for anything else."""
    found = fields.get(*keys)
    is_list = isinstance(found, list) and all(isinstance(name, str) for name in found)
    fields.require(found is None or is_list, f"{path}.{keys[0]}", found, "a list of names")
    return list(found or [])


def _runs(module: str) -> set[str]:
    """Return every run of components: a, b, c, a.b, b.c and a.b.c of a.b.c."""
    words = module.split(".")
    return {".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


SECTION = "quantization_config"
_WAY_OUT = "give the checkpoint that it was made from, or `convert` that"


@dataclass(frozen=True, slots=True)
class SchemeRule:
    """`modules` are stored in one of `schemes`; the files decide which."""

    modules: Modules
    schemes: tuple[Scheme, ...]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Rules for linear layers. The first rule that contains a module applies; other modules are not quantized.

    Raises ModelError for patterns that could take long to match.
    """

    rules: tuple[SchemeRule, ...]

    def __post_init__(self) -> None:
        require_quick(SECTION, (pattern for rule in self.rules for pattern in rule.modules.patterns))

    def schemes(self, module: str) -> tuple[Scheme, ...]:
        """Return the possible schemes of a module, likeliest first."""
        found = next((rule.schemes for rule in self.rules if module in rule.modules), ())
        return (*found, PLAIN)


def require(fields: Fields, key: str, wanted: tuple[Any, ...], path: str = "", why: str = "") -> Any:
    """Return the value of `key`, None if absent. Raises ModelError naming it unless it is one of `wanted`."""
    found = fields.get(key)
    same = any(type(found) is type(value) and found == value for value in wanted)
    shown = one_of(["absent" if value is None else _shown(value) for value in wanted])
    fields.require(same, f"{SECTION}.{path}{key}", found, f"{shown}{why and f': {why}'}; {_WAY_OUT}")
    return found


def refuse(fields: Fields, keys: tuple[str, ...], path: str = "") -> None:
    """Raise ModelError naming the first of `keys` that is present and not empty."""
    for key in keys:
        found = fields.get(key)
        fields.require(not found, f"{SECTION}.{path}{key}", found, f"absent: it is not supported; {_WAY_OUT}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
