"""The forms in which model families write tool calls: how to read and write them, and which one a template teaches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from pypto_serving.api.chat.parsers import dsml, pythonic, qwen3_coder
from pypto_serving.api.chat.parsers.json_calls import (
    FIRST_KEY,
    SPACE,
    read_array,
    read_calls,
    read_head,
    stream_arguments,
)
from pypto_serving.api.chat.parsers.scanner import (
    OutputScanner,
    Steps,
    Thinking,
    Tools,
    drop_if,
    end_calls,
    meets,
    past_space,
    read_marked,
)

_FENCE, _FENCE_END = "```json", "```"
_PYTHON_TAG, _SEPARATOR = "<|python_tag|>", ";"
_TOOL_CALLS, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_MISTRAL_NAME = re.compile(r"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_V3_CALLS, _V3_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_V3_CALL, _V3_CALL_END, _V3_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_V3_HEAD = re.compile(rf"(?:function{_V3_SEPARATOR}([^\n<]+)\n{_FENCE}\s*|([^\n<]+){_V3_SEPARATOR}\s*)(?=\{{)")
_MAX_HEAD = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """One form of tool calls. `read` reads content and calls; it gets the types of the tools' parameters.

    A model that must call writes: `begin`, calls with `between` between them, `end`.

    - A call is `head`, the name, `middle`, the arguments, `tail`.
    - `alone`: a single call needs neither `begin` nor `end`.
    - `starts`: all that begins calls within text, for the parser; `close` may follow them.
    - `opens`: what an output begins with that is read as a call without a mark, as a regular expression;
      "" if there is no such thing. `fences` may stand around calls there.
    - `goes_on`: what is read as one more call after calls, likewise.
    - `marks`: the parts of all these texts that are special tokens in some tokenizers.
    - `end_thinking`: beginnings of calls that end the reasoning. `short_ids`: ids of calls have 9 letters and digits.
    """

    read: Callable[[OutputScanner, Tools], Steps[None]]
    head: str
    middle: str
    tail: str
    begin: str = ""
    between: str = ""
    end: str = ""
    arguments: Literal["json", "python", "xml", "dsml"] = "json"
    alone: bool = False
    starts: tuple[str, ...] = ()
    close: str = ""
    opens: str = ""
    goes_on: str = ""
    fences: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()
    end_thinking: tuple[str, ...] = ()
    short_ids: bool = False


def _read_hermes(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and Qwen."""
    return read_marked(scanner, (qwen3_coder.START,), read_calls, ends=(qwen3_coder.END,))


def _read_llama3(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read the calls of Llama 3: JSON after `<|python_tag|>`, or alone at the beginning, with `;` between several.

    Without the tag a call must name one of `tools`: the content may be JSON, too.
    """
    if (yield from read_calls(scanner, 0, tools, _SEPARATOR)):
        yield from end_calls(scanner, _PYTHON_TAG)
    yield from read_marked(scanner, (_PYTHON_TAG,), partial(read_calls, separator=_SEPARATOR))


def _read_mistral(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read `[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    return read_marked(scanner, (_TOOL_CALLS,), _read_mistral_calls)


def _read_mistral_calls(scanner: OutputScanner, at: int) -> Steps[bool]:
    if (yield from read_array(scanner, at)):
        return True
    at = yield from past_space(scanner, at)
    head = yield from read_head(scanner, at, _MISTRAL_NAME, "{", _MAX_HEAD)
    if head is not None:
        scanner.call(head[1])
        scanner.drop(head.end())
        yield from stream_arguments(scanner)
    return head is not None


def _read_deepseek_v3(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read the calls of DeepSeek V3, R1 and V3.1, whose marks are special tokens.

    - V3 and R1: the word `function`, a separator, the name, and the arguments in a code block
    - V3.1: the name, a separator, and the arguments
    """
    starts = (_V3_CALLS + _V3_CALL, _V3_CALL)
    return read_marked(
        scanner, starts, _read_deepseek_v3_call, ends=(_V3_CALL_END, _V3_CALLS_END), more=(_V3_CALL, _V3_CALLS)
    )


def _read_deepseek_v3_call(scanner: OutputScanner, at: int) -> Steps[bool]:
    head = yield from read_head(scanner, at, _V3_HEAD, "{", _MAX_HEAD)
    if head is None:
        return False
    scanner.call(head[1] or head[2])
    scanner.drop(head.end())
    yield from stream_arguments(scanner)
    if head[1] is not None:
        yield from drop_if(scanner, _FENCE_END)
    return True


def _read_json(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read calls of models without a form of their own: an output that begins with JSON, maybe in a code block.

    Calls must name one of `tools`. What follows them is content.
    """
    at = yield from past_space(scanner)
    fenced = yield from meets(scanner, at, _FENCE)
    if (yield from read_array(scanner, at + len(_FENCE) * fenced, tools)):
        if fenced:
            yield from drop_if(scanner, _FENCE_END)
        yield from end_calls(scanner)


_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '
_OPENS = rf"{SPACE}{FIRST_KEY}"
_MISTRAL_MARKS = (_TOOL_CALLS, _ARGS, "[CALL_ID]")
_V3_MARKS = (_V3_CALLS, _V3_CALLS_END, _V3_CALL, _V3_CALL_END, _V3_SEPARATOR)

FAMILIES: Mapping[str, CallForm] = {
    "hermes": CallForm(
        read=_read_hermes,
        head=f"{qwen3_coder.START}\n{_NAME}", middle=_ARGUMENTS, tail=f"}}\n{qwen3_coder.END}", between="\n",
        starts=(qwen3_coder.START,), marks=(qwen3_coder.START, qwen3_coder.END),
    ),
    "qwen3_coder": CallForm(
        read=qwen3_coder.read,
        head=f"{qwen3_coder.START}\n{qwen3_coder.FUNCTION}", middle=">\n",
        tail=f"{qwen3_coder.FUNCTION_END}\n{qwen3_coder.END}", between="\n", arguments="xml",
        starts=qwen3_coder.STARTS, marks=(qwen3_coder.START, qwen3_coder.END),
        end_thinking=(f"{qwen3_coder.START}\n{qwen3_coder.FUNCTION}",),  # some models call from within it
    ),
    "llama3_json": CallForm(
        read=_read_llama3,
        head=_NAME, middle='", "parameters": ', tail="}", between=f"{_SEPARATOR} ",
        starts=(_PYTHON_TAG,), opens=_OPENS, goes_on=rf"{SPACE}{_SEPARATOR}?{_OPENS}", marks=(_PYTHON_TAG,),
    ),
    "pythonic": CallForm(
        read=pythonic.read,
        head="", middle="(", tail=")", begin="[", between=", ", end="]", arguments="python",
        starts=(pythonic.START,), close=pythonic.END, opens=pythonic.OPENS, marks=(pythonic.START, pythonic.END),
    ),
    "mistral": CallForm(
        read=_read_mistral,
        head=_NAME, middle=_ARGUMENTS, tail="}", begin=f"{_TOOL_CALLS}[", between=", ", end="]",
        starts=(_TOOL_CALLS,), marks=_MISTRAL_MARKS, short_ids=True,
    ),
    "mistral_named": CallForm(
        read=_read_mistral,
        head=_TOOL_CALLS, middle=_ARGS, tail="", starts=(_TOOL_CALLS,), marks=_MISTRAL_MARKS, short_ids=True,
    ),
    "deepseek_v3": CallForm(
        read=_read_deepseek_v3,
        head=f"{_V3_CALL}function{_V3_SEPARATOR}", middle=f"\n{_FENCE}\n", tail=f"\n{_FENCE_END}{_V3_CALL_END}",
        begin=_V3_CALLS, between="\n", end=_V3_CALLS_END, starts=(_V3_CALLS + _V3_CALL, _V3_CALL), marks=_V3_MARKS,
    ),
    "deepseek_v31": CallForm(
        read=_read_deepseek_v3,
        head=_V3_CALL, middle=_V3_SEPARATOR, tail=_V3_CALL_END,
        begin=_V3_CALLS, end=_V3_CALLS_END, starts=(_V3_CALLS + _V3_CALL, _V3_CALL), marks=_V3_MARKS,
    ),
    "deepseek_v4": CallForm(
        read=dsml.read,
        head=f'<{dsml.MARK}invoke name="', middle='">\n', tail=f"{dsml.INVOKE_END}\n",
        begin=f"{dsml.CALLS_START}\n", end=dsml.CALLS_END, arguments="dsml",
        starts=(dsml.CALLS_START,), marks=(dsml.MARK,),
    ),
    "json": CallForm(
        read=_read_json,
        head=_NAME, middle=_ARGUMENTS, tail="}", begin="[", between=", ", end="]", alone=True,
        opens=rf"{SPACE}(?:{_FENCE}{SPACE})?(?:\[{SPACE})?{FIRST_KEY}",
        fences=((f"{_FENCE}\n", f"\n{_FENCE_END}"),),
    ),
}  # fmt: skip
"""By the names of `--tool-call-parser`."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("deepseek_v4", (dsml.CALLS_START,)),
    ("deepseek_v3", (_V3_CALLS, _FENCE)),
    ("deepseek_v31", (_V3_CALLS,)),
    ("mistral_named", (_TOOL_CALLS, _ARGS)),
    ("mistral", (_TOOL_CALLS,)),
    ("qwen3_coder", (qwen3_coder.START, qwen3_coder.FUNCTION)),
    ("hermes", (qwen3_coder.START, '"name"', "arguments")),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", (_PYTHON_TAG,)),
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
    """Return whether a template describes the tools of a request."""
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
