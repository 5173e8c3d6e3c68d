"""Let all references of a schema lead to its definitions, so that a part of it can stand without the rest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from pypto_serving.api.grammars.json_schema import SchemaError
from pypto_serving.util import brief

MAX_COPIED = 1 << 18
"""Values of all parts that references lead to."""
DEFINITIONS = ("$defs", "definitions")
_DATA = {"const", "enum", "default", "examples"}
"""Keywords whose values are no schemas."""


def with_definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema in which what other references lead to is a definition, too. Raises SchemaError."""
    return _ReferenceCopier(schema).whole()


class _ReferenceCopier:
    """Copies a schema, and each part that references lead to, once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        defined = root.get("$defs")
        self._taken = set(defined) if isinstance(defined, Mapping) else set()
        self._names: dict[int, str] = {}
        self._todo: list[Mapping[str, Any]] = []
        self._left = MAX_COPIED

    def whole(self) -> Mapping[str, Any]:
        """Return the schema with the definitions that it needs, or as it was."""
        copied, made = self._copy(self._root), {}
        while self._todo:
            part = self._todo.pop()
            known = {key: value for key, value in part.items() if part is not self._root or key not in DEFINITIONS}
            made[self._names[id(part)]] = self._copy(known)
        if not made:
            return self._root
        defined = copied.get("$defs")
        return {**copied, "$defs": {**(defined if isinstance(defined, Mapping) else {}), **made}}

    def _copy(self, node: Any) -> Any:
        self._left -= bool(self._names)
        if self._left < 0:
            raise SchemaError(f"its references lead to more than {MAX_COPIED} values; refer to fewer or smaller ones")
        if isinstance(node, list):
            return [self._copy(each) for each in node]
        if not isinstance(node, Mapping):
            return node
        made = {key: value if key in _DATA else self._copy(value) for key, value in node.items()}
        if isinstance(node.get("$ref"), str):
            made["$ref"] = self._refer(node["$ref"])
        return made

    def _refer(self, reference: str) -> str:
        parts = reference.split("/")
        if parts[0] != "#" or (len(parts) == 3 and parts[1] in DEFINITIONS):
            return reference
        target: Any = self._root
        for part in parts[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            raise SchemaError(f"$ref is {brief(reference)}, which is not in this schema")
        if id(target) not in self._names:
            names = (f"part{i}" for i in itertools.count(len(self._names)))
            self._names[id(target)] = next(name for name in names if name not in self._taken)
            self._taken.add(self._names[id(target)])
            self._todo.append(target)
        return f"#/$defs/{self._names[id(target)]}"
