"""The functions that the model can call, and how calls and results are written: the Hermes form of Qwen3.

Prompts hold signatures only: a model of this size cannot read types and descriptions, which fill a short context.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


def _function(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """Return a function as a request names it; every parameter is a string and has a description."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


CALCULATE = _function(
    "calculate",
    "Calculate with any numbers.",
    expression="numbers with + - * / ** and brackets, such as 1234 * 99",
)
GET_TIME = _function("get_time", "Tell the time of day.", city="a city or country; without one, the time here")
TOOLS = [CALCULATE, GET_TIME]


@dataclass(frozen=True)
class Call:
    """A function and its arguments."""

    name: str
    arguments: Mapping[str, str]

    @property
    def text(self) -> str:
        """What the model writes to make the call."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {arguments}}}\n</tool_call>'


def calculate(expression: str) -> Call:
    """Return a call of the calculator."""
    return Call("calculate", {"expression": expression})


def get_time(city: str | None = None) -> Call:
    """Return a call of the clock."""
    return Call("get_time", {"city": city} if city else {})


def signature(tool: dict[str, Any]) -> str:
    """Return the line that stands for a function in the system message."""
    function = tool["function"]
    return f"{function['name']}({', '.join(function['parameters']['properties'])})"


def system_text(system: str | None, signatures: Iterable[str]) -> str:
    """Return the system message of a chat with functions."""
    listed = "\n".join(["<tools>", *signatures, "</tools>"])
    return f"{system}\n\n{listed}" if system else listed


def calls_text(calls: Iterable[Call]) -> str:
    """Return the reply that makes the calls."""
    return "\n".join(call.text for call in calls)


def responses_text(values: Iterable[str]) -> str:
    """Return the user message that carries the results of the calls."""
    return "\n".join(f"<tool_response>\n{value}\n</tool_response>" for value in values)
