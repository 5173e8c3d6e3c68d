"""Read the calls of Qwen3-Coder: `<tool_call><function=f><parameter=a>...</parameter></function></tool_call>`.

Values are plain text; the tool's JSON schema says what they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pypto_serving.api.chat.parsers.json_calls import end_of_value, json_type, read_head
from pypto_serving.api.chat.parsers.tape import (
    Steps,
    Tape,
    Tools,
    drop_if,
    end_calls,
    meets,
    past_space,
    seek,
    to_json,
    with_gaps,
)

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
BEGINNING = f"{START}\n{FUNCTION}"
"""Ends the reasoning, too: some models call from within it."""
STARTS = (START, FUNCTION)
_SOUGHT = with_gaps(STARTS)
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END)
NAME = re.compile(r"[^\s<>][^<>\n]{0,250}")
_NAME = re.compile(rf"({NAME.pattern})>")
_MAX_NAME = 256


def read(tape: Tape, tools: Tools) -> Steps[None]:
    """Read content and calls. A function without START must be one of `tools`: the content may be markup, too."""
    while mark := (yield from seek(tape, _SOUGHT, tape.say)):
        at = len(mark)
        if mark.endswith(START):
            at = yield from past_space(tape, at)
            at = at + len(FUNCTION) if (yield from meets(tape, at, FUNCTION)) else -1
        name = None if at < 0 else (yield from read_head(tape, at, _NAME, ">", _MAX_NAME))
        if name is None or (mark.endswith(FUNCTION) and name[1] not in tools):
            tape.say(len(mark))
            continue
        tape.call(name[1])
        tape.drop(name.end())
        yield from _read_arguments(tape, tools.get(name[1], {}))
        yield from drop_if(tape, END)
        yield from end_calls(tape, START, FUNCTION)


def _read_arguments(tape: Tape, types: Mapping[str, Sequence[str]]) -> Steps[None]:
    """Read parameters up to the end of the function; without one the arguments stay open, as the model left them."""
    tape.arguments("{")
    separator = ""
    while True:
        at = yield from past_space(tape)
        name = None
        if (yield from meets(tape, at, PARAMETER)):
            name = yield from read_head(tape, at + len(PARAMETER), _NAME, ">", _MAX_NAME)
        if name is None:
            break
        tape.arguments(f"{separator}{to_json(name[1])}: ")
        tape.drop(name.end())
        yield from _read_value(tape, types.get(name[1], ()))
        separator = ", "
    if (yield from drop_if(tape, FUNCTION_END)) or (yield from meets(tape, at, END)):
        tape.arguments("}")


def _read_value(tape: Tape, types: Sequence[str]) -> Steps[None]:
    if (yield from meets(tape, 0, "\n")):
        tape.drop(1)
    if all(kind == "string" for kind in types):
        tape.arguments('"')
        if mark := (yield from seek(tape, _VALUE_ENDS, tape.quote)):
            tape.drop(len(mark))
            tape.arguments('"')
        return
    opens = "{" * ("object" in types) + "[" * ("array" in types)
    end = yield from end_of_value(tape, PARAMETER_END, 0, opens)
    if end < 0:
        tape.argue(len(tape.text))
        return
    tape.arguments(as_json(tape.text[:end].removesuffix("\n"), types))
    tape.drop(end + len(PARAMETER_END))


def as_json(text: str, types: Sequence[str]) -> str:
    """Write the value of a parameter that may have any of `types`; text if it has none of them."""
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    kinds = _KINDS.get(json_type(word), ())
    fits = any(kind in types for kind in kinds) or (word == "null" and "string" not in types)
    return word if fits else to_json(text)


_KINDS: Mapping[type | None, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    dict: ("object",),
    list: ("array",),
}
