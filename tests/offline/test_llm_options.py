"""The stub that names the options of `LLM` for editors, and the public names."""

from __future__ import annotations

import ast
from pathlib import Path

import pypto_serving
from pypto_serving.setup.option_table import SERVER_OPTIONS, TABLE
from pypto_serving.setup.rules import Kind, Rule

STUB = Path(pypto_serving.__file__).with_name("offline") / "llm_options.pyi"
HEAD = '''"""The options of `LLM` and `AsyncLLM`, as editors show them; a test compares them with the option table."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, TypedDict

class LLMOptions(TypedDict, total=False):
'''


TYPES: dict[Kind, str] = {
    "switch": "bool",
    "flag": "bool",
    "whole": "int",
    "whole or text": "int | str",
    "number": "float",
    "memory": "int | float | str",
    "object": "Mapping[str, Any] | str",
    "path": "str | PathLike[str]",
    "text": "str",
    "texts": "str",
}


def annotation(rule: Rule) -> str:
    """Return the type that a rule accepts."""
    if rule.kind == "choice":
        return f"Literal[{', '.join(repr(name) for name in rule.names)}]".replace("'", '"')
    return TYPES[rule.kind]


def test_the_stub_names_all_options() -> None:
    rows = [row for row in TABLE if row.name not in {"model", *SERVER_OPTIONS}]
    expected = HEAD + "".join(f"    {row.name}: {annotation(row.rule)} | None\n" for row in rows)
    assert ast.unparse(ast.parse(STUB.read_text())) == ast.unparse(ast.parse(expected)), f"write {STUB}:\n{expected}"


def test_the_package_lists_its_public_names() -> None:
    assert dir(pypto_serving) == sorted(pypto_serving.__all__)
    assert all(hasattr(pypto_serving, name) for name in dir(pypto_serving))
