"""The stub that names the options of `LLM` for editors, and the public names."""

from __future__ import annotations

import ast
from pathlib import Path

import pypto_serving
from pypto_serving.setup import rules
from pypto_serving.setup.option_table import SERVER_OPTIONS, TABLE
from pypto_serving.setup.rules import OptionRule

STUB = Path(pypto_serving.__file__).with_name("offline") / "llm_options.pyi"
HEAD = '''"""The options of `LLM` and `AsyncLLM`, as editors show them; a test compares them with the option table."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, Literal, TypedDict

class LLMOptions(TypedDict, total=False):
'''


def annotation(rule: OptionRule) -> str:
    """Return the type that a rule accepts."""
    match rule:
        case rules.SwitchRule():
            return "bool"
        case rules.ChoiceRule():
            return f"Literal[{', '.join(repr(name) for name in rule.names)}]".replace("'", '"')
        case rules.WholeOrAutoRule() | rules.SizeRule():
            return "int | str"
        case rules.WholeRule():
            return "int"
        case rules.NumberRule():
            return "float"
        case rules.MemoryRule():
            return "int | float | str"
        case rules.DraftsRule() | rules.ObjectRule():
            return "Mapping[str, Any] | str"
    return "str | PathLike[str]" if type(rule) is rules.TextRule else "str"


def test_the_stub_names_all_options() -> None:
    rows = [row for row in TABLE if row.name not in {"model", *SERVER_OPTIONS}]
    expected = HEAD + "".join(f"    {row.name}: {annotation(row.rule)} | None\n" for row in rows)
    assert ast.unparse(ast.parse(STUB.read_text())) == ast.unparse(ast.parse(expected)), f"write {STUB}:\n{expected}"


def test_the_package_lists_its_public_names() -> None:
    assert dir(pypto_serving) == sorted(pypto_serving.__all__)
    assert all(hasattr(pypto_serving, name) for name in dir(pypto_serving))
