"""Sets of modules as quantisers name them in config.json. Torch-free."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pypto_serving.model.fields import Fields
from pypto_serving.model.formats.patterns import pattern

CLASS = "Linear"
"""The class of all modules that can be quantised."""


@dataclass(frozen=True, slots=True)
class Modules:
    """A set of modules: those in `names`, those with a run of components in `parts`, and matches of `patterns`."""

    names: frozenset[str] = frozenset()
    parts: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    def __contains__(self, module: str) -> bool:
        if module in self.names or any(pattern.match(module) for pattern in self.patterns):
            return True
        return bool(self.parts) and not self.parts.isdisjoint(_runs(module))


EVERY = Modules(patterns=(re.compile(""),))


def by_part(entries: Iterable[str]) -> Modules:
    """Return the modules that have an entry, such as `mlp.gate`, among their components."""
    return Modules(parts=frozenset(entry.strip(".") for entry in entries))


def by_name_or_pattern(entries: Sequence[str], key: str) -> Modules:
    """Return the modules that entries of compressed-tensors match: names, patterns after `re:`, or the class."""
    patterns = [pattern(entry[3:], key, entry) for entry in entries if entry.startswith("re:")]
    names = frozenset(entry for entry in entries if not entry.startswith("re:"))
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
