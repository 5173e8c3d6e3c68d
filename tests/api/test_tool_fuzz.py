"""Whatever a client sends as tools and history is read, or refused by place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.api.chat.parsers.families import FAMILIES
from pypto_serving.api.chat.tools import ToolUse, read_tool_use
from pypto_serving.api.grammars.structured import json_options
from pypto_serving.api.grammars.tool_grammar import forced_calls, strict_calls
from pypto_serving.api.prompting.template import TemplateEncoder
from pypto_serving.errors import RequestError
from pypto_serving.guidance import checked
from tests.api.templates import HERMES, with_tools

WORDS = [
    "type", "function", "name", "arguments", "parameters", "properties", "required", "enum", "const", "anyOf",
    "$ref", "$defs", "A", "#/$defs/A", "string", "integer", "object", "allowed_tools", "mode", "auto", "tools",
    "strict", "items", "additionalProperties", "pattern", "maxLength", "now", "id", "description", "null",
]  # fmt: skip
JSON = st.recursive(
    st.one_of(st.sampled_from(WORDS), st.none(), st.booleans(), st.integers(-5, 2**60), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    ),
    max_leaves=25,
)
SCHEMA_FIELDS = {"required": JSON, "type": st.one_of(st.just("object"), JSON), "$defs": JSON, "items": JSON}
PROPERTIES = st.dictionaries(st.sampled_from(WORDS), JSON, max_size=4)
SCHEMA = st.fixed_dictionaries({}, optional={"properties": PROPERTIES, **SCHEMA_FIELDS})
TOOL = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries(
        {"name": st.sampled_from(["now", "f.g", "a-b", "", "é"])},
        optional={"parameters": st.one_of(SCHEMA, JSON), "strict": st.booleans(), "description": JSON},
    )}
)  # fmt: skip


def read(tools: Any, choice: Any = None) -> ToolUse | None:
    try:
        return read_tool_use(tools, choice, None)
    except RequestError as error:
        assert str(error).startswith(("tools", "tool_choice"))
        return None


@given(st.one_of(JSON, st.lists(st.one_of(TOOL, JSON), max_size=3)), JSON)
def test_tools_and_choices(tools: Any, choice: Any) -> None:
    read(tools, choice)


@given(st.lists(TOOL, min_size=1, max_size=3), st.sampled_from(sorted(FAMILIES)), st.booleans())
def test_schemas(tools: Any, family: str, strict: bool) -> None:
    use = read(tools, "required")
    if use is None:
        return
    write = strict_calls if strict else forced_calls
    try:
        grammar = write(FAMILIES[family], use.functions, False, lambda text: None, json_options())
        if grammar is not None:
            checked(grammar)
    except RequestError:
        pass


@pytest.mark.parametrize("template", [HERMES, with_tools("<tool_call> <function= <think> </think>")])
@given(st.lists(st.dictionaries(st.sampled_from(["tool_calls", "reasoning", "tool_call_id"]), JSON), max_size=3), JSON)
def test_history(template: str, fields: list[dict[str, Any]], documents: Any) -> None:
    messages = [{"role": "assistant", "content": "x", **each} for each in fields]
    for options in ({"documents": documents}, {"continue_final_message": True}):
        try:
            assert isinstance(TemplateEncoder(template, {}).encode(messages, options).prompt, str)
        except RequestError as error:
            assert str(error)
