"""Read the calls of Qwen3-Coder: `<tool_call><function=f><parameter=a>...</parameter></function></tool_call>`.

Values are plain text; the tool's JSON schema says what they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pypto_serving.api.chat.parsers.json_calls import end_of_value, json_type, read_head
from pypto_serving.api.chat.parsers.scanner import (
    OutputScanner,
    Steps,
    Tools,
    drop_if,
    meets,
    past_space,
    read_marked,
    seek,
    to_json,
)

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
STARTS = (START, FUNCTION)
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END)
NAME = re.compile(r"[^\s<>][^<>\n]{0,250}")
_NAME = re.compile(rf"({NAME.pattern})>")
_MAX_NAME = 256


def read(scanner: OutputScanner, tools: Tools) -> Steps[None]:
    """Read content and calls. A function without START must be one of `tools`: the content may be markup, too."""

    def read_call(scanner: OutputScanner, at: int) -> Steps[bool]:
        marked = scanner.text.endswith(START, 0, at)
        if marked:
            at = yield from past_space(scanner, at)
            if not (yield from meets(scanner, at, FUNCTION)):
                return False
            at += len(FUNCTION)
        name = yield from read_head(scanner, at, _NAME, ">", _MAX_NAME)
        if name is None or not (marked or name[1] in tools):
            return False
        scanner.call(name[1])
        scanner.drop(name.end())
        yield from _read_arguments(scanner, tools.get(name[1], {}))
        return True

    return read_marked(scanner, STARTS, read_call, ends=(END,))


def _read_arguments(scanner: OutputScanner, types: Mapping[str, Sequence[str]]) -> Steps[None]:
    """Read parameters up to the end of the function; without one the arguments stay open, as the model left them."""
    scanner.arguments("{")
    separator = ""
    while True:
        at = yield from past_space(scanner)
        name = None
        if (yield from meets(scanner, at, PARAMETER)):
            name = yield from read_head(scanner, at + len(PARAMETER), _NAME, ">", _MAX_NAME)
        if name is None:
            break
        scanner.arguments(f"{separator}{to_json(name[1])}: ")
        scanner.drop(name.end())
        yield from _read_value(scanner, types.get(name[1], ()))
        separator = ", "
    if (yield from drop_if(scanner, FUNCTION_END)) or (yield from meets(scanner, at, END)):
        scanner.arguments("}")


def _read_value(scanner: OutputScanner, types: Sequence[str]) -> Steps[None]:
    if (yield from meets(scanner, 0, "\n")):
        scanner.drop(1)
    if all(kind == "string" for kind in types):
        scanner.arguments('"')
        if mark := (yield from seek(scanner, _VALUE_ENDS, scanner.quote)):
            scanner.drop(len(mark))
            scanner.arguments('"')
        return
    opens = "{" * ("object" in types) + "[" * ("array" in types)
    end = yield from end_of_value(scanner, PARAMETER_END, 0, opens)
    if end < 0:
        scanner.argue(len(scanner.text))
        return
    scanner.arguments(as_json(scanner.text[:end].removesuffix("\n"), types))
    scanner.drop(end + len(PARAMETER_END))


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
