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
    Names,
    end_braces,
    may_call,
    read_arguments,
    read_array,
    read_call,
    read_head,
)
from pypto_serving.api.chat.parsers.recovery import Markup
from pypto_serving.api.chat.parsers.scanner import OutputScanner, Steps, Thinking, Tools, drop_if, past_space

_FENCE, _FENCE_END = "```json", "```"
_FUNCTOOLS, _GRANITE = "functools", "<|tool_call|>"
_PYTHON_TAG, _SEPARATOR = "<|python_tag|>", ";"
_TOOL_CALLS, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_BEGINS = r"(?=\{|null|None)"
_MISTRAL_HEAD = re.compile(rf"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:(?:\[ARGS\]\s*)+{_BEGINS}|(?=\{{))")
_V3_CALLS, _V3_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_V3_CALL, _V3_CALL_END, _V3_SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_V3_HEAD = re.compile(
    rf"(?:function(?:{_V3_SEPARATOR})+([^\n<]+)\n\s*(?:`+\w*\s*)?|([^\n<]+)(?:{_V3_SEPARATOR})+\s*){_BEGINS}"
)
_KIMI_CALLS, _KIMI_CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_CALL_END, _KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_KIMI_HEAD = re.compile(
    rf"(?:functions\.)?([\w.-]+?)(?::\d+)?\s*(?:{re.escape(_KIMI_ARGUMENTS)})+\s*{_BEGINS}"
)  # such as functions.f:0
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


def _read_mistral(scanner: OutputScanner, tools: Tools, any_name: bool) -> Steps[bool]:
    """Read `[{...}, ...]`, or `name[ARGS]{...}`."""
    at = yield from past_space(scanner)
    if scanner.text.startswith(("[", "{"), at):
        return (yield from read_array(scanner))
    head = yield from read_head(scanner, at, _MISTRAL_HEAD, "{", _MAX_HEAD)
    return head is not None and (yield from _read_named(scanner, head[1], head.end(), None if any_name else tools))


def _read_named(scanner: OutputScanner, name: str, at: int, names: Names) -> Steps[bool]:
    """Read the arguments at `at` of the call `name`."""
    if not may_call(name, names):
        return False
    scanner.call(name)
    scanner.drop(at)
    given: list[str] = []

    def give(text: str) -> None:
        given.append(text)
        scanner.arguments(text)

    return (yield from read_arguments(scanner, give)) and (yield from end_braces(scanner, given))


def _read_deepseek_v3(scanner: OutputScanner, tools: Tools, any_name: bool) -> Steps[bool]:
    """Read a call of DeepSeek V3, R1 and V3.1, whose marks are special tokens.

    - V3 and R1: the word `function`, a separator, the name, and the arguments in a code block
    - V3.1: the name, a separator, and the arguments
    """
    at = yield from past_space(scanner)
    head = yield from read_head(scanner, at, _V3_HEAD, "{", _MAX_HEAD)
    if head is None:
        return False
    name, names = (head[1] or head[2]).strip(), None if any_name or head[1] else tools
    return (yield from _read_named(scanner, name, head.end(), names))


def _read_kimi(scanner: OutputScanner, tools: Tools, any_name: bool) -> Steps[bool]:
    """Read a call of Kimi K2: its id, which holds the name, a separator, and the arguments."""
    at = yield from past_space(scanner)
    head = yield from read_head(scanner, at, _KIMI_HEAD, "{", _MAX_HEAD)
    return head is not None and (yield from _read_named(scanner, head[1], head.end(), None if any_name else tools))


def _read_object(scanner: OutputScanner, tools: Tools, any_name: bool) -> Steps[bool]:
    """Read `{"name": ..., "arguments": {...}}`."""
    return read_call(scanner, None if any_name else tools)


def _read_json(scanner: OutputScanner, tools: Tools, any_name: bool) -> Steps[bool]:
    """Read calls of models without a form of their own: JSON, maybe in a code block or after the word functools."""
    _ = (yield from drop_if(scanner, _FENCE)) or (yield from drop_if(scanner, _FUNCTOOLS))
    return (yield from read_array(scanner, tools))


_HERMES = Markup(
    _read_object, starts=(qwen3_coder.START,), loose_heads=('{"name"',), ends=(qwen3_coder.END,), opener="{"
)
_LLAMA3 = Markup(_read_object, starts=(_PYTHON_TAG,), opener="{", between=_SEPARATOR)
_MISTRAL = Markup(_read_mistral, starts=(_TOOL_CALLS,))
_DEEPSEEK_V3 = Markup(_read_deepseek_v3, starts=(_V3_CALL, _V3_CALLS), ends=(_FENCE_END, _V3_CALL_END, _V3_CALLS_END))
_KIMI = Markup(_read_kimi, starts=(_KIMI_CALL, _KIMI_CALLS), ends=(_KIMI_CALL_END, _KIMI_CALLS_END))
_GRANITE_CALLS = Markup(
    lambda scanner, tools, any_name: read_array(scanner, None if any_name else tools), starts=(_GRANITE,)
)
_JSON = Markup(_read_json, starts=(_FENCE,), ends=(_FENCE_END,))


def _first(markup: Markup, scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read calls at the beginning of the output, without a mark, then content and calls."""
    yield from markup.read_first(scanner, tools)
    yield from markup.read_text(scanner, tools)


_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '
_OPENS = rf"{SPACE}{FIRST_KEY}"
_MISTRAL_MARKS = (_TOOL_CALLS, _ARGS, "[CALL_ID]")
_KIMI_MARKS = (_KIMI_CALLS, _KIMI_CALLS_END, _KIMI_CALL, _KIMI_CALL_END, _KIMI_ARGUMENTS)
_V3_MARKS = (_V3_CALLS, _V3_CALLS_END, _V3_CALL, _V3_CALL_END, _V3_SEPARATOR)

FAMILIES: Mapping[str, CallForm] = {
    "hermes": CallForm(
        read=_HERMES.read_text,
        head=f"{qwen3_coder.START}\n{_NAME}", middle=_ARGUMENTS, tail=f"}}\n{qwen3_coder.END}", between="\n",
        starts=(qwen3_coder.START,), marks=(qwen3_coder.START, qwen3_coder.END),
    ),
    "qwen3_coder": CallForm(
        read=qwen3_coder.MARKUP.read_text,
        head=f"{qwen3_coder.START}\n{qwen3_coder.FUNCTION}", middle=">\n",
        tail=f"{qwen3_coder.FUNCTION_END}\n{qwen3_coder.END}", between="\n", arguments="xml",
        starts=qwen3_coder.STARTS, marks=(qwen3_coder.START, qwen3_coder.END),
        end_thinking=(f"{qwen3_coder.START}\n{qwen3_coder.FUNCTION}",),  # some models call from within it
    ),
    "llama3_json": CallForm(
        read=partial(_first, _LLAMA3),
        head=_NAME, middle='", "parameters": ', tail="}", between=f"{_SEPARATOR} ",
        starts=(_PYTHON_TAG,), opens=_OPENS, goes_on=rf"{SPACE}{_SEPARATOR}?{_OPENS}", marks=(_PYTHON_TAG,),
    ),
    "pythonic": CallForm(
        read=partial(_first, pythonic.MARKUP),
        head="", middle="(", tail=")", begin="[", between=", ", end="]", arguments="python",
        starts=(pythonic.START,), close=pythonic.END, opens=pythonic.OPENS, marks=(pythonic.START, pythonic.END),
    ),
    "lfm2": CallForm(
        read=pythonic.MARKUP_OF_LFM2.read_text,
        head="", middle="(", tail=")", begin=f"{pythonic.LFM2}[", between=", ", end=f"]{pythonic.LFM2_END}",
        arguments="python", starts=(pythonic.LFM2,), marks=(pythonic.LFM2, pythonic.LFM2_END),
    ),
    "olmo3": CallForm(
        read=pythonic.MARKUP_OF_LINES.read_text,
        head="", middle="(", tail=")", begin=pythonic.LINES, between="\n", end=pythonic.LINES_END,
        arguments="python", starts=(pythonic.LINES,), marks=(pythonic.LINES, pythonic.LINES_END),
    ),
    "mistral": CallForm(
        read=_MISTRAL.read_text,
        head=_NAME, middle=_ARGUMENTS, tail="}", begin=f"{_TOOL_CALLS}[", between=", ", end="]",
        starts=(_TOOL_CALLS,), marks=_MISTRAL_MARKS, short_ids=True,
    ),
    "mistral_named": CallForm(
        read=_MISTRAL.read_text,
        head=_TOOL_CALLS, middle=_ARGS, tail="", starts=(_TOOL_CALLS,), marks=_MISTRAL_MARKS, short_ids=True,
    ),
    "granite": CallForm(
        read=_GRANITE_CALLS.read_text,
        head=_NAME, middle=_ARGUMENTS, tail="}", begin=f"{_GRANITE}[", between=", ", end="]",
        starts=(_GRANITE,), marks=(_GRANITE,),
    ),
    "kimi_k2": CallForm(
        read=_KIMI.read_text,
        head=f"{_KIMI_CALL}functions.", middle=f":0{_KIMI_ARGUMENTS}", tail=_KIMI_CALL_END,
        begin=_KIMI_CALLS, end=_KIMI_CALLS_END, starts=(_KIMI_CALLS + _KIMI_CALL, _KIMI_CALL), marks=_KIMI_MARKS,
    ),
    "deepseek_v3": CallForm(
        read=_DEEPSEEK_V3.read_text,
        head=f"{_V3_CALL}function{_V3_SEPARATOR}", middle=f"\n{_FENCE}\n", tail=f"\n{_FENCE_END}{_V3_CALL_END}",
        begin=_V3_CALLS, between="\n", end=_V3_CALLS_END, starts=(_V3_CALLS + _V3_CALL, _V3_CALL), marks=_V3_MARKS,
    ),
    "deepseek_v31": CallForm(
        read=_DEEPSEEK_V3.read_text,
        head=_V3_CALL, middle=_V3_SEPARATOR, tail=_V3_CALL_END,
        begin=_V3_CALLS, end=_V3_CALLS_END, starts=(_V3_CALLS + _V3_CALL, _V3_CALL), marks=_V3_MARKS,
    ),
    "deepseek_v4": CallForm(
        read=dsml.MARKUP.read_text,
        head=f'<{dsml.MARK}invoke name="', middle='">\n', tail=f"{dsml.INVOKE_END}\n",
        begin=f"{dsml.CALLS_START}\n", end=dsml.CALLS_END, arguments="dsml",
        starts=(dsml.CALLS_START,), marks=(dsml.MARK,),
    ),
    "functools": CallForm(
        read=_JSON.read_first,
        head=_NAME, middle=_ARGUMENTS, tail="}", begin=f"{_FUNCTOOLS}[", between=", ", end="]",
        opens=rf"{SPACE}(?:{_FUNCTOOLS}{SPACE})?(?:\[{SPACE})?{FIRST_KEY}",
    ),
    "json": CallForm(
        read=_JSON.read_first,
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
    ("kimi_k2", (_KIMI_CALLS,)),
    ("granite", (_GRANITE,)),
    ("lfm2", (pythonic.LFM2,)),
    ("lfm2", ("List of tools: ",)),
    ("functools", (f"{_FUNCTOOLS}[",)),
    ("functools", ("<|tool|>", "<|/tool|>")),
    ("mistral_named", (_TOOL_CALLS, _ARGS)),
    ("mistral", (_TOOL_CALLS,)),
    ("qwen3_coder", (qwen3_coder.START, qwen3_coder.FUNCTION)),
    ("hermes", (qwen3_coder.START, '"name"', "arguments")),
    ("olmo3", (pythonic.LINES,)),
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


def choose_family(template: str, shows_tools: bool) -> tuple[str, str]:
    """Return the form of calls that a template teaches, and why it is this one."""
    if not shows_tools:
        return "hermes", "the chat template has no tools, so the server describes them in this form"
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
