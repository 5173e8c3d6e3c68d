"""Names: one class has a name in the package, so that a search finds one place."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.layers.modules import FILES, PACKAGE


def test_class_names_are_unique() -> None:
    places = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
