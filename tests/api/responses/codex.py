"""An agent in a terminal, in the habits of Codex: what it sends of OpenAI's public protocol, by turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Item = dict[str, Any]
_TEXT, _NUMBER = {"type": "string"}, {"type": "number"}
_STEP = {
    "type": "object",
    "properties": {"step": _TEXT, "status": _TEXT},
    "required": ["step", "status"],
    "additionalProperties": False,
}
GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF
%import common.LF
"""


def _function(name: str, properties: dict[str, Any], *required: str) -> Item:
    schema = {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}
    return {"type": "function", "name": name, "description": f"Use {name}.", "strict": False, "parameters": schema}


TOOLS: list[Item] = [
    {
        **_function("exec_command", {"cmd": _TEXT, "workdir": _TEXT, "yield_time_ms": _NUMBER}, "cmd"),
        "output_schema": {"type": "object", "properties": {"output": _TEXT}},
    },
    _function("write_stdin", {"session_id": _NUMBER, "chars": _TEXT}, "session_id"),
    _function("update_plan", {"explanation": _TEXT, "plan": {"type": "array", "items": _STEP}}, "plan"),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Use the `apply_patch` tool to edit files. This is a FREEFORM tool, so do not wrap it in JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
    {"type": "web_search", "external_web_access": True, "search_content_types": ["text", "image"]},
    {"type": "image_generation", "output_format": "png"},
    _function("view_image", {"path": _TEXT}, "path"),
    {
        "type": "namespace",
        "name": "mcp__clock__",
        "description": "Tells the time.",
        "tools": [_function("now", {"zone": _TEXT})],
    },
]


class Codex:
    """Hold a conversation; each turn sends all of it, without ids. `outputs` are what its tools say, by call."""

    def __init__(self, post: Callable[[Item], list[Item]], outputs: Callable[[Item], str]) -> None:
        self._post = post
        self._outputs = outputs
        self.items = [
            _message("developer", "<permissions>Commands need no approval.</permissions>"),
            _message("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"),
        ]

    def ask(self, text: str) -> str:
        """Send what a user types, and answer calls until the model has none; return what it says then."""
        self.items.append(_message("user", text))
        while True:
            output = self._post(self._body())
            self.items += [_sent_again(item) for item in output]
            calls = [item for item in output if item["type"] in ("function_call", "custom_tool_call")]
            self.items += [
                {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": self._outputs(call)}
                for call in calls
            ]
            if not calls:
                return str(output[-1]["content"][0]["text"])

    def _body(self) -> Item:
        return {
            "model": "tiny",
            "instructions": "You are a coding agent.",
            "input": self.items,
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "0"},
        }


def _message(role: str, text: str) -> Item:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _sent_again(item: Item) -> Item:
    """Return an item of an answer as the agent keeps it."""
    kept = {key: value for key, value in item.items() if key not in ("id", "status", "annotations", "logprobs")}
    return kept | {"encrypted_content": None} if item["type"] == "reasoning" else kept
