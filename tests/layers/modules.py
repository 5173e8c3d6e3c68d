"""The modules of the package and what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pypto_serving"
FILES = sorted(PACKAGE.rglob("*.py"))


def layer_of(module: str) -> str:
    """The folder or file under the package that `module` belongs to; the package itself is its own layer."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(source: str) -> tuple[str, ...]:
    """Full names of all imported modules and, for `from a import b`, of `a.b`."""
    return tuple(_imports_of(source))


def _imports_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import {node.module} by its full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
