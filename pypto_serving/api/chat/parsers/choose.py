"""Choose how the outputs of a model are parsed, by its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from pypto_serving.api.chat.dsml import CALLS_START
from pypto_serving.api.chat.parsers import deepseek_v3, mistral
from pypto_serving.api.chat.parsers.thinking import Thinking

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("deepseek_v4", (CALLS_START,)),
    ("deepseek_v3", (deepseek_v3.CALLS, deepseek_v3.FENCE)),
    ("deepseek_v31", (deepseek_v3.CALLS,)),
    ("mistral_named", (mistral.MARK, mistral.ARGS)),
    ("mistral", (mistral.MARK,)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>", '"name"', "arguments")),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)
"""Texts that templates with these forms of calls have; the first that has all of its texts counts."""


class Habit(NamedTuple):
    """How a model marks its reasoning; with `always` outputs begin within it wherever the prompt did not close it."""

    start: str
    end: str
    always: bool = False

    def thinking(self, prompt: str, continued: str | None) -> Thinking | None:
        """Return how outputs of a prompt begin; None if they have no reasoning.

        `continued` is the text of the message that the output continues, if it does.
        """
        if continued is not None:
            opened = continued.rfind(self.start) > continued.rfind(self.end)
            return Thinking(self.start, self.end, True) if opened else None
        prompt = prompt.rstrip()
        if prompt.endswith(self.end):
            return None
        return Thinking(self.start, self.end, self.always or prompt.endswith(self.start))


HABITS: Mapping[str, Habit] = {
    "qwen3": Habit("<think>", "</think>"),
    "deepseek_r1": Habit("<think>", "</think>", always=True),
    "mistral": Habit("[THINK]", "[/THINK]"),
}
"""By the names of `--reasoning-parser`."""


def takes_tools(template: str) -> bool:
    """Tell whether a template describes the tools of a request."""
    return re.search(r"\btools\b", template) is not None


def choose_family(template: str) -> tuple[str, str]:
    """Return the form of calls that a template teaches, "none" if it has no tools, and why."""
    if not takes_tools(template):
        return "none", "the chat template has no tools"
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return name, f"the chat template has {' and '.join(signs)}"
    return "json", "the chat template has tools in no form that is known"


def choose_habit(template: str) -> tuple[str, str]:
    """Return how a model marks its reasoning, by its template; "none" if it does not, and why."""
    if "</think>" in template:
        return ("qwen3" if "<think>" in template else "deepseek_r1"), "the chat template has </think>"
    if "[/THINK]" in template:
        return "mistral", "the chat template has [/THINK]"
    return "none", "the chat template has no marks of reasoning"
