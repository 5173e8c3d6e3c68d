"""Leave out what no model here can have, such as hosted tools and images of earlier turns, and remember what it was."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_KIND_CHARS = 64
HOSTED = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use", "file_search", "image_generation", "local_shell",
        "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    }
)  # fmt: skip
"""Types of tools that OpenAI or its clients run, and that its models know without a description."""
_VERSION = re.compile(r"(_preview)?(_\d{4}_\d{2}_\d{2})?$")
_SHORT = {"image_url": "image", "input_image": "image", "input_file": "file", "input_audio": "audio"}


def is_hosted(tool: Any) -> bool:
    """Return whether this server leaves a tool of OpenAI's out, so that the model never calls it."""
    return isinstance(tool, Mapping) and isinstance(kind := tool.get("type"), str) and _VERSION.sub("", kind) in HOSTED


class LeftOut:
    """The names of what one request has in `field` and its model does not get. Changed by the reader of the field."""

    def __init__(self, field: str) -> None:
        self._names: dict[str, None] = {}
        self._field = field

    @property
    def names(self) -> list[str]:
        """Return the names, in the order in which they came."""
        return list(self._names)

    def add(self, kind: str) -> None:
        """Name something that is dropped."""
        self._names[f"{self._field}.{kind[:MAX_KIND_CHARS]}"] = None

    def stand_in(self, kind: str) -> str:
        """Name something, and return the text that takes its place."""
        self.add(kind)
        short = _SHORT.get(kind, kind[:MAX_KIND_CHARS].replace("_", " "))
        return f"[{short} left out: this model reads only text]"

    def tools(self, tools: Any, choice: Any, hosted: Sequence[Any]) -> tuple[Any, Any]:
        """Drop the `hosted` ones among `tools`, and a choice that only they could meet; return what is left of both."""
        if not hosted:
            return tools, choice
        for tool in hosted:
            self.add(str(tool["type"]))
        dropped = set(map(id, hosted))
        kept = [tool for tool in tools if id(tool) not in dropped]
        kind, name = (choice.get("type"), choice.get("name")) if isinstance(choice, Mapping) else (choice, None)
        needs_any = kind in ("required", "any") and not kept
        names_one = is_hosted(choice) or (kind == "tool" and name in [tool.get("name") for tool in hosted])
        return kept, None if needs_any or names_one else choice


def newest_words(roles: Sequence[str]) -> int:
    """Return the place of what a person has just written: the user's message after all others, but instructions.

    Return -1 if there is none.
    """
    last = next((i for i in reversed(range(len(roles))) if roles[i] not in ("system", "developer")), -1)
    return last if last >= 0 and roles[last] == "user" else -1
